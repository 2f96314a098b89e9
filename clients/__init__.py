"""Clients: one file per algorithm, named like its strategy."""

from typing import TYPE_CHECKING

from flwr_frl.common.lazy import attach

if TYPE_CHECKING:
    from flwr_frl.clients.apfl import APFLClient as APFLClient
    from flwr_frl.clients.base import Client as Client
    from flwr_frl.clients.base import TrainingSettings as TrainingSettings
    from flwr_frl.clients.choco_sgd import ChocoSGDClient as ChocoSGDClient
    from flwr_frl.clients.device.parameter_groups import HEAD as HEAD
    from flwr_frl.clients.device.parameter_groups import (
        REPRESENTATION as REPRESENTATION,
    )
    from flwr_frl.clients.device.parameter_groups import WHOLE as WHOLE
    from flwr_frl.clients.ditto import DittoClient as DittoClient
    from flwr_frl.clients.dpsgd import DPSGDClient as DPSGDClient
    from flwr_frl.clients.feature_transfer import (
        FeatureTransferClient as FeatureTransferClient,
    )
    from flwr_frl.clients.fed_mtl import FedMTLClient as FedMTLClient
    from flwr_frl.clients.fedala import FedALAClient as FedALAClient
    from flwr_frl.clients.fedamp import FedAMPClient as FedAMPClient
    from flwr_frl.clients.fedas import FedASClient as FedASClient
    from flwr_frl.clients.fedavg import FedAvgClient as FedAvgClient
    from flwr_frl.clients.fedavg import FedAvgFTClient as FedAvgFTClient
    from flwr_frl.clients.fedbabu import FedBABUClient as FedBABUClient
    from flwr_frl.clients.fedbn import FedBNClient as FedBNClient
    from flwr_frl.clients.fedcp import FedCPClient as FedCPClient
    from flwr_frl.clients.feddbe import FedDBEClient as FedDBEClient
    from flwr_frl.clients.feddpa import FedDPAClient as FedDPAClient
    from flwr_frl.clients.feddyn import FedDynClient as FedDynClient
    from flwr_frl.clients.fedfomo import FedFomoClient as FedFomoClient
    from flwr_frl.clients.fedpac import FedPACClient as FedPACClient
    from flwr_frl.clients.fedper import FedPerClient as FedPerClient
    from flwr_frl.clients.fedproto import FedProtoClient as FedProtoClient
    from flwr_frl.clients.fedprox import FedProxClient as FedProxClient
    from flwr_frl.clients.fedrep import FedRepClient as FedRepClient
    from flwr_frl.clients.fedrep import FedRepLinearClient as FedRepLinearClient
    from flwr_frl.clients.fedrod import FedRoDClient as FedRoDClient
    from flwr_frl.clients.fedsa_lora import FedSALoRAClient as FedSALoRAClient
    from flwr_frl.clients.ffa_lora import FFALoRAClient as FFALoRAClient
    from flwr_frl.clients.fine_tuning import fine_tuned as fine_tuned
    from flwr_frl.clients.flute import FLUTEClient as FLUTEClient
    from flwr_frl.clients.flute import FLUTELinearClient as FLUTELinearClient
    from flwr_frl.clients.flute import FLUTEStarClient as FLUTEStarClient
    from flwr_frl.clients.flute_regression import (
        FLUTERegressionClient as FLUTERegressionClient,
    )
    from flwr_frl.clients.gossip.base import Node as Node
    from flwr_frl.clients.gpfl import GPFLClient as GPFLClient
    from flwr_frl.clients.ifca import IFCAClient as IFCAClient
    from flwr_frl.clients.knn_per import KNNPerClient as KNNPerClient
    from flwr_frl.clients.l2gd import L2GDClient as L2GDClient
    from flwr_frl.clients.lg_fedavg import LGFedAvgClient as LGFedAvgClient
    from flwr_frl.clients.local import LocalClient as LocalClient
    from flwr_frl.clients.moon import MOONClient as MOONClient
    from flwr_frl.clients.multi_task import MultiTaskClient as MultiTaskClient
    from flwr_frl.clients.multi_task import (
        SyntheticMultiTaskClient as SyntheticMultiTaskClient,
    )
    from flwr_frl.clients.per_fedavg import HFMAMLClient as HFMAMLClient
    from flwr_frl.clients.per_fedavg import PerFedAvgClient as PerFedAvgClient
    from flwr_frl.clients.pfedfda import PFedFDAClient as PFedFDAClient
    from flwr_frl.clients.pfedhn import PFedHNClient as PFedHNClient
    from flwr_frl.clients.pfedme import PFedMeClient as PFedMeClient
    from flwr_frl.clients.representation_transfer import (
        RepresentationTransferClient as RepresentationTransferClient,
    )
    from flwr_frl.clients.scaffold import SCAFFOLDClient as SCAFFOLDClient
    from flwr_frl.clients.squarm_sgd import SQuARMSGDClient as SQuARMSGDClient
else:
    __all__, __getattr__ = attach(__name__, __file__)

if __name__ == "clients":
    # Imported by its short name in a checkout: alias the modules, do not copy them.
    from flwr_frl.common.short_names import alias

    alias(__name__)
