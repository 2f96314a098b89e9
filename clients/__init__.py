"""What a device does: one file per algorithm, named like its strategy."""

from clients.base import Client
from clients.choco_sgd import ChocoSGDClient
from clients.dpsgd import DPSGDClient
from clients.fedavg import FedAvgClient
from clients.fedavg_ft import FedAvgFTClient
from clients.fedper import FedPerClient
from clients.fedrep import FedRepClient, FedRepLinearClient
from clients.flute import FLUTEClient, FLUTELinearClient, FLUTEStarClient
from clients.gossip.base import GossipClient
from clients.lg_fedavg import LGFedAvgClient
from clients.local import LocalClient
from clients.multi_task import MultiTaskClient
from clients.representation_transfer import RepresentationTransferClient
from clients.squarm_sgd import SQuARMSGDClient

CLIENTS: dict[str, type[Client]] = {
    "choco-sgd": ChocoSGDClient,
    "dpsgd": DPSGDClient,
    "fedavg": FedAvgClient,
    "fedavg-ft": FedAvgFTClient,
    "fedper": FedPerClient,
    "fedrep": FedRepClient,
    "flute": FLUTEClient,
    "flute-star": FLUTEStarClient,
    "lg-fedavg": LGFedAvgClient,
    "local": LocalClient,
    "multi-task": MultiTaskClient,
    "representation-transfer": RepresentationTransferClient,
    "squarm-sgd": SQuARMSGDClient,
    # SRPFL is the server's affair: its clients are those of the wrapped algorithm.
    "srpfl": FedRepClient,
    "lg-srpfl": LGFedAvgClient,
    "flanp": FedAvgClient,
    "flanp-ft": FedAvgFTClient,
    "srpfl-flute": FLUTEClient,
}
LINEAR_CLIENTS: dict[str, type[Client]] = {
    "fedrep": FedRepLinearClient,
    "flute": FLUTELinearClient,
    "srpfl": FedRepLinearClient,
    "srpfl-flute": FLUTELinearClient,
}

__all__ = [
    "CLIENTS",
    "LINEAR_CLIENTS",
    "ChocoSGDClient",
    "Client",
    "DPSGDClient",
    "FLUTEClient",
    "FLUTELinearClient",
    "FLUTEStarClient",
    "FedAvgClient",
    "FedAvgFTClient",
    "FedPerClient",
    "FedRepClient",
    "FedRepLinearClient",
    "GossipClient",
    "LGFedAvgClient",
    "LocalClient",
    "MultiTaskClient",
    "RepresentationTransferClient",
    "SQuARMSGDClient",
]
