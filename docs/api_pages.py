"""Generate the API reference: one page per package, from ``__all__``."""

import inspect
import textwrap
from importlib import import_module
from typing import Any

# For each page: title, package, and further names for code outside of the package.
PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "run": (
        "Running",
        "flwr_frl.running",
        (
            "flwr_frl.results.methods:compare",
            "flwr_frl.results.methods:Comparison",
            "flwr_frl.results.methods:MethodResult",
            "flwr_frl.results.statistics:PairedTest",
            "flwr_frl.results.statistics:Ranking",
        ),
    ),
    "strategies": (
        "Strategies",
        "flwr_frl.strategies",
        (
            "flwr_frl.strategies.server.traits:StrategyTraits",
            "flwr_frl.strategies.server.traits:StrategySettings",
            "flwr_frl.strategies.server.replies:mean",
            "flwr_frl.strategies.server.replies:to_record",
            "flwr_frl.results.trackers:Tracker",
        ),
    ),
    "clients": (
        "Clients",
        "flwr_frl.clients",
        (
            "flwr_frl.clients.base:ClientTraits",
            "flwr_frl.clients.device.state:PersonalState",
            "flwr_frl.predict:Predictor",
            "flwr_frl.predict:load_model",
            "flwr_frl.predict:load_run",
        ),
    ),
    "task": (
        "Tasks, models and local training",
        "flwr_frl.task",
        (
            "flwr_frl.task.training.sgd:Proximal",
            "flwr_frl.task.training.sgd:freeze",
            "flwr_frl.task.training.sgd:loop",
            "flwr_frl.task.training.local_training:features_of",
        ),
    ),
}


def api_pages() -> dict[str, str]:
    """Return the pages of the reference by their files."""
    return {
        f"reference/{page}.md": _page(title, package, more)
        for page, (title, package, more) in PAGES.items()
    }


def _page(title: str, package: str, more: tuple[str, ...]) -> str:
    module = import_module(package)
    parts = [f"# {title}\n"]
    if package != "flwr_frl.running":
        parts.append(f"All of these can be imported from `{package}`.\n")
    parts += [_entry(getattr(module, name), name) for name in sorted(module.__all__)]
    if more:
        parts.append("## Further classes and functions\n")
        parts += [_named(path) for path in more]
    return "\n".join(parts)


def _named(path: str) -> str:
    package, _, name = path.partition(":")
    return _entry(getattr(import_module(package), name), name)


def _entry(found: Any, name: str) -> str:
    """Return the directive that documents an object where it is defined."""
    found = inspect.unwrap(found) if callable(found) else found
    is_class = inspect.isclass(found)
    if not (is_class or inspect.isfunction(found)):
        return f"`{name}`\n: The constant `{textwrap.shorten(repr(found), 70)}`.\n"
    kind = "autoclass" if is_class else "autofunction"
    options = "\n   :members:\n   :show-inheritance:" if is_class else ""
    path = f"{found.__module__}.{found.__qualname__}"
    return f"```{{eval-rst}}\n.. {kind}:: {path}{options}\n```\n"
