"""What the server does: one file per algorithm. Needs no torch and no data."""

from typing import cast

from strategies.base import BaseStrategy
from strategies.choco_sgd import ChocoSGD
from strategies.dpsgd import DPSGD
from strategies.fedavg import FedAvg
from strategies.fedavg_ft import FedAvgFT
from strategies.fedper import FedPer
from strategies.fedrep import FedRep, FedRepLinear
from strategies.flute import FLUTE, FLUTELinear, FLUTEStar
from strategies.gossip.base import Gossip
from strategies.grids.speeds import SpeedModel
from strategies.lg_fedavg import LGFedAvg
from strategies.local import Local
from strategies.multi_task import MultiTask
from strategies.representation_transfer import (
    RepresentationTransfer,
    RepresentationTransferLinear,
)
from strategies.squarm_sgd import SQuARMSGD
from strategies.srpfl import SRPFL, stage_lengths
from task.settings import Settings, require, unknown

STRATEGIES: dict[str, type[BaseStrategy]] = {
    "choco-sgd": ChocoSGD,
    "dpsgd": DPSGD,
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedper": FedPer,
    "fedrep": FedRep,
    "flute": FLUTE,
    "flute-star": FLUTEStar,
    "lg-fedavg": LGFedAvg,
    "local": Local,
    "multi-task": MultiTask,
    "representation-transfer": RepresentationTransfer,
    "squarm-sgd": SQuARMSGD,
}
LINEAR_STRATEGIES: dict[str, type[BaseStrategy]] = {
    "fedrep": FedRepLinear,
    "flute": FLUTELinear,
}


# SRPFL over what; FLANP is the same doubling over FedAvg.
SRPFL_BASES = {
    "srpfl": "fedrep",
    "lg-srpfl": "lg-fedavg",
    "flanp": "fedavg",
    "flanp-ft": "fedavg-ft",
    "srpfl-flute": "flute",
}
ALGORITHMS = (*STRATEGIES, *SRPFL_BASES)


def build_strategy(settings: Settings) -> BaseStrategy:
    """Return the strategy of the algorithm that the settings name.

    Parameters
    ----------
    settings : mapping
        All settings.

    Returns
    -------
    BaseStrategy
        The strategy, or an `SRPFL` around it, which behaves as one.

    Raises
    ------
    SettingsError
        If the algorithm is unknown or a setting is out of its range.
    """
    algorithm = str(settings["algorithm"])
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm", algorithm, ALGORITHMS)
    name = SRPFL_BASES.get(algorithm, algorithm)
    strategy = STRATEGIES[name]
    if settings["task"] == "linear":
        strategy = LINEAR_STRATEGIES.get(name, strategy)
    if algorithm in SRPFL_BASES:
        # SRPFL's linear FedRep always has the QR step (its algorithm 2).
        settings = {**settings, "orthonormalize": True}
    base = strategy.from_settings(settings)
    if algorithm not in SRPFL_BASES:
        return base
    return cast(BaseStrategy, _srpfl(base, settings))


def _srpfl(base: BaseStrategy, settings: Settings) -> SRPFL:
    stages, arrivals = str(settings["rounds-per-stage"]), None
    initial_nodes = int(settings["initial-nodes"])
    speeds = speed_model(settings, int(settings["num-clients"]))
    if stages == "theory" and speeds is not None:
        sampled = len(base.sample(1, list(range(speeds.num_clients))))
        arrivals = speeds.expected_arrivals(sampled)
    require(initial_nodes >= 1, "initial-nodes", initial_nodes, "at least 1")
    return SRPFL(base, initial_nodes, stage_lengths(stages, initial_nodes, arrivals))


def speed_model(settings: Settings, num_clients: int) -> SpeedModel | None:
    """Return the speed model that the settings name.

    Parameters
    ----------
    settings : mapping
        All settings.
    num_clients : int
        Number of clients.

    Returns
    -------
    SpeedModel or None
        None for ``none``: replies come when they come.

    Raises
    ------
    SettingsError
        If the model is unknown or its file is not good.
    """
    name = str(settings["speed-model"])
    time = float(settings["communication-time"])
    require(time >= 0, "communication-time", time, "at least 0")
    if name == "none":
        return None
    fraction = float(settings["straggler-fraction"])
    return SpeedModel(name, num_clients, int(settings["seed"]), fraction)


__all__ = [
    "ALGORITHMS",
    "DPSGD",
    "FLUTE",
    "LINEAR_STRATEGIES",
    "SRPFL",
    "SRPFL_BASES",
    "STRATEGIES",
    "BaseStrategy",
    "ChocoSGD",
    "FLUTELinear",
    "FLUTEStar",
    "FedAvg",
    "FedAvgFT",
    "FedPer",
    "FedRep",
    "FedRepLinear",
    "Gossip",
    "LGFedAvg",
    "Local",
    "MultiTask",
    "RepresentationTransfer",
    "RepresentationTransferLinear",
    "SQuARMSGD",
    "build_strategy",
    "speed_model",
]
