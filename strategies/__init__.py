"""The server side: one file per algorithm. Needs no data, and torch for FLUTE only."""

from flwr_frl.common.algorithms import ALGORITHMS as ALGORITHMS
from flwr_frl.common.algorithms import CASES, full
from flwr_frl.common.lazy import attach

# Everything public that is not the strategy of an algorithm.
_OTHERS = (
    "algorithms:build_strategy",
    "base:Strategy",
    "gossip.base:Gossip",
    "server.round:Participation",
    "server.round:Reply",
    "server.round:Round",
)


def strategy_paths() -> list[str]:
    """Return the import paths of all strategies, also of those for certain tasks."""
    return [path for path, _ in ALGORITHMS.values()] + list(CASES.values())


def _import_paths() -> list[str]:
    table = "flwr_frl.common.algorithms:ALGORITHMS"
    return [*map(full, _OTHERS), *strategy_paths(), table]


public_names, __getattr__ = attach(__name__, _import_paths)
