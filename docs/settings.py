"""Generate the lists of settings from their declarations: ``python -m docs.settings``.

Writes ``docs/settings.md``; ``[tool.flwr.app.config]`` of ``pyproject.toml`` in the
same sections, and ``[tool.flwr-frl]``, the facts that are needed without torch; and
``__init__.pyi``, the public names of each package for type checkers.
"""

import inspect
import json
import re
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_origin

from flwr_frl.clients.algorithms import load_client
from flwr_frl.clients.base import TrainingSettings
from flwr_frl.clients.device.setup import DeviceSettings
from flwr_frl.common.compression import CompressionSettings, UploadSettings
from flwr_frl.common.settings import Declared, declared, defaults, load
from flwr_frl.strategies.algorithms import ALGORITHMS, CASES, settings_owners
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.server.run_settings import RunSettings
from flwr_frl.strategies.server.secure import SecureSettings
from flwr_frl.strategies.server.traits import StrategySettings
from flwr_frl.task.data.datasets import DataSettings
from flwr_frl.task.data.partitions import PartitionSettings
from flwr_frl.task.models.adapters import AdapterSettings
from flwr_frl.task.tasks import TASKS
from flwr_frl.task.tasks.image import ImageSettings
from flwr_frl.task.training.sgd import SGD, TrainerSettings

PAGE = Path(__file__).with_suffix(".md")
ROOT = Path(__file__).parents[1]
PYPROJECT = ROOT / "pyproject.toml"
PACKAGES = ("clients", "strategies", "task")
COMMON: list[tuple[str, Any]] = [
    ("Run", RunSettings),
    ("Secure aggregation", SecureSettings),
    ("All strategies", StrategySettings),
    ("Simulated speeds", SpeedModel),
    ("Compressed messages", CompressionSettings),
    ("Compressed uploads", UploadSettings),
    ("All devices", DeviceSettings),
    ("Data", DataSettings),
    ("Partition", PartitionSettings),
    ("Images and models", ImageSettings),
    ("Adapters", AdapterSettings),
    ("Local SGD", SGD),
    ("Optimiser of local training", TrainerSettings),
    ("Local training of split models", TrainingSettings),
]


class Row(NamedTuple):
    """A setting in a list: its name, its declaration and its description."""

    name: str
    setting: Declared
    meaning: str


def sections() -> dict[str, list[Row]]:
    """Return all settings by the title of their section, each of them only once."""
    makers = {title: [maker] for title, maker in COMMON}
    for algorithm in ALGORITHMS:
        settings = {**defaults(), "algorithm": algorithm}
        makers[f"Algorithm `{algorithm}`"] = classes_of(settings)
    makers |= {f"Task `{task}`": [maker] for task, maker in TASKS.items()}
    listed = set[str]()
    by_title: dict[str, list[Row]] = {}
    for title, declaring in makers.items():
        for maker in declaring:
            meanings = descriptions(maker)
            for name, setting in declared(maker).items():
                if name not in listed:
                    row = Row(name, setting, meanings[setting.argument])
                    by_title.setdefault(title, []).append(row)
                    listed.add(name)
    return by_title


def classes_of(settings: dict[str, Any]) -> list[Any]:
    """Return an algorithm's strategies and clients, including those of other tasks."""
    strategies = list(settings_owners(settings))
    strategies += [case for each in strategies for case in cases_of(each)]
    clients = [load_client(s._traits.client) for s in strategies if not wraps(s)]
    return [*strategies, *clients]


def cases_of(strategy: Any) -> list[Any]:
    """Return the strategies that replace another one with certain tasks."""
    name = f"{strategy.__module__}:{strategy.__qualname__}"
    return [load(path, "strategy") for (of, _), path in CASES.items() if of == name]


def wraps(strategy: Any) -> bool:
    """Return whether a strategy wraps another one, whose client it uses."""
    return hasattr(strategy, "wrapped_settings")


def table(rows: list[Row]) -> str:
    """Return a table of settings."""
    text = "| setting | default | allowed | meaning |\n| --- | --- | --- | --- |\n"
    for name, setting, meaning in rows:
        default = spelled(setting.default)
        cells = [f"`{name}`", f"`{default}`", setting.allowed, meaning]
        cells = [cell.replace("|", "\\|") for cell in cells]
        text += f"| {' | '.join(cells)} |\n"
    return text


def page() -> str:
    """Return the text of ``docs/settings.md``: its introduction, and the tables."""
    introduction, _, _ = PAGE.read_text(encoding="utf-8").partition("## ")
    tables = [f"## {title}\n\n{table(rows)}" for title, rows in sections().items()]
    return introduction + "\n".join(tables)


def with_settings(pyproject: str) -> str:
    """Return the text of ``pyproject.toml`` with the current settings and facts."""
    lines = []
    for title, rows in sections().items():
        lines.append(f"# {title.replace('`', '')}")
        # JSON's numbers, booleans and strings are those of TOML.
        lines += [f"{name} = {json.dumps(each.default)}" for name, each, _ in rows]
    text = with_table(pyproject, "tool.flwr.app.config", lines)
    return with_table(text, "tool.flwr-frl", list(fact_lines()))


def with_table(pyproject: str, title: str, lines: list[str]) -> str:
    """Return the text of ``pyproject.toml`` with another content of a table."""
    before, head, rest = pyproject.partition(f"[{title}]\n")
    _, end, after = rest.partition("\n[")
    return before + head + "\n".join(lines) + "\n" + end + after


def fact_lines() -> Iterator[str]:
    """Yield the settings with each fact, from their first declarations."""
    common = [name for _, maker in COMMON for name in declared(maker)]
    rows = [row for rows in sections().values() for row in rows]
    facts = {name: setting for name, setting, _ in rows}
    with_fact = {
        "safe": [row.name for row in rows if is_safe(row.setting)],
        "code": [name for name, each in facts.items() if each.code],
        # Settings of a single algorithm are read from its class.
        "per-device": [name for name in common if facts[name].per_device],
        "on-resume": [n for n, each in facts.items() if each.may_differ != "never"],
        "always": [n for n, each in facts.items() if each.may_differ == "always"],
    }
    for fact, names in with_fact.items():
        listed = (f'    "{name}",' for name in sorted({*names}))
        yield from (f"{fact} = [", *listed, "]")


def is_safe(setting: Declared) -> bool:
    """Return whether a stranger's file may set a string."""
    is_text = isinstance(setting.default, str)
    return is_text and (setting.safe or get_origin(setting.kind) is Literal)


def stub(package: str) -> str:
    """Return the public names of a package of `flwr_frl`, for type checkers."""
    names = import_module(f"flwr_frl.{package}").public_names()
    imports = [
        f"from {path.replace(':', ' import ')} as {n}" for n, path in names.items()
    ]
    return "\n".join([*sorted(imports), ""])


def spelled(value: object) -> str:
    """Return a value in the syntax of TOML."""
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def descriptions(maker: Any) -> dict[str, str]:
    """Return the descriptions of a class's parameters from its docstrings."""
    function = maker.func if isinstance(maker, partial) else maker
    function = getattr(function, "_settings_type", function)
    meanings: dict[str, str] = {}
    for base in reversed(getattr(function, "__mro__", [function])):
        text = inspect.cleandoc(base.__doc__ or "")
        _, _, parameters = text.partition("Parameters\n----------\n")
        parameters = re.split(r"\n\n\w+\n-+\n", parameters)[0]
        for entry in re.split(r"\n(?=\S)", parameters):
            names, _, body = entry.partition(" : ")
            _, _, meaning = body.partition("\n")
            for name in names.split(", "):
                meanings[name.strip()] = " ".join(meaning.split())
    return meanings


if __name__ == "__main__":
    pyproject = PYPROJECT.read_text(encoding="utf-8")
    PYPROJECT.write_text(with_settings(pyproject), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    for package in PACKAGES:
        path = ROOT / package / "__init__.pyi"
        path.write_text(stub(package), encoding="utf-8")
