"""Clients: one file per algorithm, named like its strategy."""

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


def _import_paths() -> list[str]:
    # Strategies name their clients.
    from flwr_frl.strategies import strategy_paths

    strategies = [load(path, "algorithm") for path in strategy_paths()]
    clients = [strategy._traits.client for strategy in strategies]
    return [f"flwr_frl.clients.{path}" for path in _OTHERS] + [*filter(None, clients)]


public_names, __getattr__ = attach(__name__, _import_paths)
