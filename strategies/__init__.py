"""The server side: one file per algorithm. Needs no data, and torch for FLUTE only."""

from typing import TYPE_CHECKING

from flwr_frl.common.lazy import attach

if TYPE_CHECKING:
    from flwr_frl.strategies.algorithms import build_strategy as build_strategy
    from flwr_frl.strategies.algorithms import fine_tuned as fine_tuned
    from flwr_frl.strategies.averaging import APFL as APFL
    from flwr_frl.strategies.averaging import GPFL as GPFL
    from flwr_frl.strategies.averaging import HFMAML as HFMAML
    from flwr_frl.strategies.averaging import L2GD as L2GD
    from flwr_frl.strategies.averaging import MOON as MOON
    from flwr_frl.strategies.averaging import Ditto as Ditto
    from flwr_frl.strategies.averaging import FedALA as FedALA
    from flwr_frl.strategies.averaging import FedAvg as FedAvg
    from flwr_frl.strategies.averaging import FedAvgFT as FedAvgFT
    from flwr_frl.strategies.averaging import FedBABU as FedBABU
    from flwr_frl.strategies.averaging import FedBN as FedBN
    from flwr_frl.strategies.averaging import FedCP as FedCP
    from flwr_frl.strategies.averaging import FedDPA as FedDPA
    from flwr_frl.strategies.averaging import FedMTL as FedMTL
    from flwr_frl.strategies.averaging import FedPer as FedPer
    from flwr_frl.strategies.averaging import FedProx as FedProx
    from flwr_frl.strategies.averaging import FedRoD as FedRoD
    from flwr_frl.strategies.averaging import FedSALoRA as FedSALoRA
    from flwr_frl.strategies.averaging import FFALoRA as FFALoRA
    from flwr_frl.strategies.averaging import KNNPer as KNNPer
    from flwr_frl.strategies.averaging import LGFedAvg as LGFedAvg
    from flwr_frl.strategies.averaging import Local as Local
    from flwr_frl.strategies.averaging import PerFedAvg as PerFedAvg
    from flwr_frl.strategies.averaging import PFedFDA as PFedFDA
    from flwr_frl.strategies.averaging import PFedMe as PFedMe
    from flwr_frl.strategies.base import Strategy as Strategy
    from flwr_frl.strategies.fedamp import FedAMP as FedAMP
    from flwr_frl.strategies.fedas import FedAS as FedAS
    from flwr_frl.strategies.fedasync import FedAsync as FedAsync
    from flwr_frl.strategies.fedbuff import FedBuff as FedBuff
    from flwr_frl.strategies.feddbe import FedDBE as FedDBE
    from flwr_frl.strategies.feddyn import FedDyn as FedDyn
    from flwr_frl.strategies.fedfomo import FedFomo as FedFomo
    from flwr_frl.strategies.fedpac import FedPAC as FedPAC
    from flwr_frl.strategies.fedproto import FedProto as FedProto
    from flwr_frl.strategies.fedrep import FedRep as FedRep
    from flwr_frl.strategies.fedrep import FedRepLinear as FedRepLinear
    from flwr_frl.strategies.flute import FLUTE as FLUTE
    from flwr_frl.strategies.flute import FLUTELinear as FLUTELinear
    from flwr_frl.strategies.flute import FLUTEStar as FLUTEStar
    from flwr_frl.strategies.flute_regression import FLUTERegression as FLUTERegression
    from flwr_frl.strategies.gossip.base import Gossip as Gossip
    from flwr_frl.strategies.ifca import IFCA as IFCA
    from flwr_frl.strategies.multi_task import MultiTask as MultiTask
    from flwr_frl.strategies.pfedhn import PFedHN as PFedHN
    from flwr_frl.strategies.relaying import DPSGD as DPSGD
    from flwr_frl.strategies.relaying import ChocoSGD as ChocoSGD
    from flwr_frl.strategies.relaying import SQuARMSGD as SQuARMSGD
    from flwr_frl.strategies.scaffold import SCAFFOLD as SCAFFOLD
    from flwr_frl.strategies.server.participation import Participation as Participation
    from flwr_frl.strategies.server.round import Reply as Reply
    from flwr_frl.strategies.server.round import Round as Round
    from flwr_frl.strategies.srpfl import SRPFL as SRPFL
    from flwr_frl.strategies.table import ALGORITHMS as ALGORITHMS
else:
    __all__, __getattr__ = attach(__name__, __file__)

if __name__ == "strategies":
    # Imported by its short name in a checkout: alias the modules, do not copy them.
    from flwr_frl.common.short_names import alias

    alias(__name__)
