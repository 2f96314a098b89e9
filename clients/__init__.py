"""What a device does: one file per algorithm, named like its strategy."""

from importlib import import_module
from typing import Any

# Imported on first use: `flwr run`, which only asks where an app's code lies, loads no
# torch, and a device's process no algorithm but the run's.
_HOMES = {
    "APFLClient": "clients.apfl",
    "ChocoSGDClient": "clients.choco_sgd",
    "Client": "clients.base",
    "DPSGDClient": "clients.dpsgd",
    "DittoClient": "clients.ditto",
    "FLUTEClient": "clients.flute",
    "FLUTELinearClient": "clients.flute",
    "FLUTEStarClient": "clients.flute",
    "FeatureTransferClient": "clients.representation_transfer",
    "FedALAClient": "clients.fedala",
    "FedAvgClient": "clients.fedavg",
    "FedAvgFTClient": "clients.fedavg",
    "FedBABUClient": "clients.fedbabu",
    "FedBNClient": "clients.fedbn",
    "FedCPClient": "clients.fedcp",
    "FedDBEClient": "clients.feddbe",
    "FedMTLClient": "clients.fed_mtl",
    "FedPerClient": "clients.fedper",
    "FedProtoClient": "clients.fedproto",
    "FedProxClient": "clients.fedprox",
    "FedRepClient": "clients.fedrep",
    "FedRepLinearClient": "clients.fedrep",
    "FedRoDClient": "clients.fedrod",
    "GossipClient": "clients.gossip.base",
    "HEAD": "clients.device.slots",
    "HFMAMLClient": "clients.per_fedavg",
    "L2GDClient": "clients.l2gd",
    "LGFedAvgClient": "clients.lg_fedavg",
    "LocalClient": "clients.local",
    "MultiTaskClient": "clients.multi_task",
    "PFedMeClient": "clients.pfedme",
    "PerFedAvgClient": "clients.per_fedavg",
    "REPRESENTATION": "clients.device.slots",
    "RepresentationTransferClient": "clients.representation_transfer",
    "SCAFFOLDClient": "clients.scaffold",
    "SQuARMSGDClient": "clients.squarm_sgd",
    "TrainingSettings": "clients.base",
    "WHOLE": "clients.device.slots",
    "fine_tuned": "clients.fine_tuning",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
