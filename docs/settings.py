"""Write the settings' lists from their declarations: ``python -m docs.settings``.

They are ``docs/settings.md`` and the one in ``pyproject.toml`` that Flower needs: what
is new is added at its end, and what is gone is taken out.
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flwr_frl.clients.algorithms import load_client
from flwr_frl.clients.base import TrainingSettings
from flwr_frl.clients.device.identity import DeviceSettings
from flwr_frl.strategies.algorithms import ALGORITHMS, settings_owners
from flwr_frl.strategies.base import BaseStrategy
from flwr_frl.strategies.grids.speeds import SpeedSettings
from flwr_frl.strategies.server.rounds import RunSettings
from flwr_frl.strategies.srpfl import SRPFL
from flwr_frl.task.compression.per_tensor import CompressionSettings
from flwr_frl.task.data.datasets import DataSettings
from flwr_frl.task.data.partitions import PartitionSettings
from flwr_frl.task.settings import declared, defaults, load
from flwr_frl.task.tasks import TASKS
from flwr_frl.task.tasks.image import ImageSettings
from flwr_frl.task.training import SGD

PAGE = Path(__file__).with_suffix(".md")
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
HEAD = """# Settings

Every setting with its default, what is allowed, and what it means. `--run-config
'NAME=VALUE …'`, a TOML file in its place, `flwr run . --run-config` and keyword
arguments of `simulate` set the same ones. A setting belongs to what reads it: one that
nothing in a run reads is named in a warning. It stands here once, under the first that
reads it; others may read it as well, as `flute-star` does `head-epochs`.

This page is made by `python -m docs.settings` from the declarations in the code.

"""
COMMON: list[tuple[str, Any]] = [
    ("The run", RunSettings),
    ("Every strategy", BaseStrategy),
    ("Simulated speeds", SpeedSettings),
    ("Every device", DeviceSettings),
    ("Data", DataSettings),
    ("Partition", PartitionSettings),
    ("Images and their model", ImageSettings),
    ("Local SGD", SGD),
    ("Local training of a split model", TrainingSettings),
    ("Messages to neighbours", CompressionSettings),
]


def page() -> str:
    """Return the whole page."""
    seen: dict[str, str] = {}
    sections = [section(title, maker, seen) for title, maker in COMMON]
    for algorithm in ALGORITHMS:
        names = {**defaults(), "algorithm": algorithm}
        for maker in makers_of(names):
            title = f"`{algorithm}`: `{maker.__name__}`"
            sections.append(section(title, maker, seen))
    for task, maker in TASKS.items():
        sections.append(section(f"Task `{task}`", maker, seen))
    return HEAD + "\n".join(text for text in sections if text)


def makers_of(settings: dict[str, Any]) -> list[Any]:
    """Return the classes of an algorithm, those of its other cases included."""
    found = [m for m in settings_owners(settings) if m is SRPFL or not is_srpfl(m)]
    cases = [
        load(path, "case")
        for m in found
        for path in vars(m).get("task_overrides", {}).values()
    ]
    strategies = [*found, *cases]
    clients = [load_client(m.client) for m in strategies if not is_srpfl(m)]
    return [*strategies, *clients]


def is_srpfl(maker: Any) -> bool:
    """Return whether a class has its client from what it wraps."""
    return issubclass(maker, SRPFL)


def section(title: str, maker: Callable[..., Any], seen: dict[str, str]) -> str:
    """Return a table of the settings that no section before has, or nothing."""
    rows = []
    about = descriptions(maker)
    for name, setting in declared(maker).items():
        if name in seen:
            continue
        seen[name] = title
        allowed = str(setting.allowed) or ("true or false")
        default = spelled(setting.default)
        cells = (f"`{name}`", f"`{default}`", allowed, about[setting.argument])
        rows.append(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        )
    if not rows:
        return ""
    head = "| setting | default | allowed | meaning |\n| --- | --- | --- | --- |\n"
    return f"## {title}\n\n{head}" + "\n".join(rows) + "\n"


def spelled(value: object) -> str:
    """Return a value as TOML spells it."""
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def listed(text: str) -> str:
    """Return the text of ``pyproject.toml`` with all settings and no others."""
    before, mark, rest = text.partition("[tool.flwr.app.config]\n")
    own, end, after = rest.partition("\n[")
    found = all_settings()
    lines = []
    for line in own.splitlines():
        name, equals, _ = line.partition(" = ")
        if not equals or name in found:
            lines.append(line)
            found.pop(name, None)
    for name, value in found.items():
        # The type is the setting's: 15 would be an integer.
        text = repr(value) if isinstance(value, float) else spelled(value)
        lines.append(f"{name} = {text}")
    return before + mark + "\n".join(lines).rstrip() + "\n" + end + after


def all_settings() -> dict[str, object]:
    """Return every setting's default; ``algorithm`` and ``task`` are the command's."""
    makers = [maker for _, maker in COMMON]
    for algorithm in ALGORITHMS:
        makers += makers_of({**defaults(), "algorithm": algorithm})
    makers += list(TASKS.values())
    own = {"algorithm": defaults()["algorithm"], "task": defaults()["task"]}
    declared_ = {n: s.default for m in makers for n, s in declared(m).items()}
    return {**own, **declared_}


def descriptions(maker: Any) -> dict[str, str]:
    """Return what the docstrings say of each parameter."""
    function = maker.func if isinstance(maker, partial) else maker
    function = getattr(function, "settings_type", function)
    found: dict[str, str] = {}
    for base in reversed(getattr(function, "__mro__", [function])):
        text = inspect.cleandoc(base.__doc__ or "")
        _, _, parameters = text.partition("Parameters\n----------\n")
        parameters = re.split(r"\n\n\w+\n-+\n", parameters)[0]
        for entry in re.split(r"\n(?=\S)", parameters):
            name, _, body = entry.partition(" : ")
            _, _, meaning = body.partition("\n")
            for single in name.split(", "):
                found[single.strip()] = " ".join(meaning.split())
    return found


if __name__ == "__main__":
    PYPROJECT.write_text(
        listed(PYPROJECT.read_text(encoding="utf-8")), encoding="utf-8"
    )
    PAGE.write_text(page(), encoding="utf-8")
