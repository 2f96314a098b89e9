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
from clients.representation_transfer import (
    FeatureTransferClient,
    RepresentationTransferClient,
)
from clients.squarm_sgd import SQuARMSGDClient

__all__ = [
    "ChocoSGDClient",
    "Client",
    "DPSGDClient",
    "FLUTEClient",
    "FLUTELinearClient",
    "FLUTEStarClient",
    "FeatureTransferClient",
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
