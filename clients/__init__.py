"""Clients: one file per algorithm, named like its strategy."""

from functools import cache

from flwr_frl.common.lazy import attach
from flwr_frl.common.settings import load

# Everything public that is not the client of an algorithm.
_OTHERS = (
    "base:Client",
    "base:TrainingSettings",
    "device.groups:HEAD",
    "device.groups:REPRESENTATION",
    "device.groups:WHOLE",
    "gossip.base:Node",
)


@cache
def public_names() -> dict[str, str]:
    """Return the import path of each public name: strategies name their clients."""
    from flwr_frl.strategies import strategy_paths

    strategies = [load(path, "algorithm") for path in strategy_paths()]
    paths = [f"flwr_frl.clients.{path}" for path in _OTHERS]
    paths += [strategy._traits.client for strategy in strategies]
    return {path.rpartition(":")[2]: path for path in filter(None, paths)}


__getattr__ = attach(__name__, public_names)
