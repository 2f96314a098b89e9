"""What a device does: one file per algorithm, named like its strategy."""

from clients.base import Client
from clients.fedavg import FedAvgClient
from clients.fedavg_ft import FedAvgFTClient
from clients.fedper import FedPerClient
from clients.fedrep import FedRepClient, FedRepLinearClient
from clients.local import LocalClient

CLIENTS: dict[str, type[Client]] = {
    "fedavg": FedAvgClient,
    "fedavg-ft": FedAvgFTClient,
    "fedper": FedPerClient,
    "fedrep": FedRepClient,
    "local": LocalClient,
}
LINEAR_CLIENTS: dict[str, type[Client]] = {
    "fedrep": FedRepLinearClient,
}

__all__ = [
    "CLIENTS",
    "LINEAR_CLIENTS",
    "Client",
    "FedAvgClient",
    "FedAvgFTClient",
    "FedPerClient",
    "FedRepClient",
    "FedRepLinearClient",
    "LocalClient",
]
