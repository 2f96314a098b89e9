"""The server side: one file per algorithm. Needs no data, and torch for FLUTE only."""

from functools import cache

from flwr_frl.common.lazy import attach
from flwr_frl.strategies.table import ALGORITHMS as ALGORITHMS
from flwr_frl.strategies.table import CASES, FINE_TUNED, full

# Everything public that is not the strategy of an algorithm.
_OTHERS = (
    "algorithms:build_strategy",
    "averaging:FedAvgFT",
    "base:Strategy",
    "gossip.base:Gossip",
    "server.round:Participation",
    "server.round:Reply",
    "server.round:Round",
    "table:ALGORITHMS",
)


def strategy_paths() -> list[str]:
    """Return the import paths of all strategies, also of those for certain tasks."""
    paths = [path for path, _ in ALGORITHMS.values()] + list(CASES.values())
    return [path for path in paths if not path.endswith(FINE_TUNED)]


@cache
def public_names() -> dict[str, str]:
    """Return the import path of each public name."""
    paths = [*map(full, _OTHERS), *strategy_paths()]
    return {path.rpartition(":")[2]: path for path in paths}


__getattr__ = attach(__name__, public_names)
