"""What the server does: one file per algorithm. Needs no torch and no data."""

from strategies.base import BaseStrategy
from strategies.fedavg import FedAvg
from strategies.fedavg_ft import FedAvgFT
from strategies.fedper import FedPer
from strategies.fedrep import FedRep, FedRepLinear
from strategies.flute import FLUTE, FLUTELinear, FLUTEStar
from strategies.local import Local
from task.settings import Settings, unknown

STRATEGIES: dict[str, type[BaseStrategy]] = {
    "fedavg": FedAvg,
    "fedavg-ft": FedAvgFT,
    "fedper": FedPer,
    "fedrep": FedRep,
    "flute": FLUTE,
    "flute-star": FLUTEStar,
    "local": Local,
}
LINEAR_STRATEGIES: dict[str, type[BaseStrategy]] = {
    "fedrep": FedRepLinear,
    "flute": FLUTELinear,
}


def build_strategy(settings: Settings) -> BaseStrategy:
    """Return the strategy of the algorithm that the settings name.

    Parameters
    ----------
    settings : mapping
        All settings.

    Returns
    -------
    BaseStrategy
        The strategy.

    Raises
    ------
    SettingsError
        If the algorithm is unknown or a setting is out of its range.
    """
    algorithm = str(settings["algorithm"])
    if algorithm not in STRATEGIES:
        raise unknown("algorithm", algorithm, STRATEGIES)
    strategy = STRATEGIES[algorithm]
    if settings["task"] == "linear":
        strategy = LINEAR_STRATEGIES.get(algorithm, strategy)
    return strategy.from_settings(settings)


__all__ = [
    "FLUTE",
    "LINEAR_STRATEGIES",
    "STRATEGIES",
    "BaseStrategy",
    "FLUTELinear",
    "FLUTEStar",
    "FedAvg",
    "FedAvgFT",
    "FedPer",
    "FedRep",
    "FedRepLinear",
    "Local",
    "build_strategy",
]
