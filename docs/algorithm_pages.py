"""Generate a page for each algorithm from its strategy, its client and their settings.

Each row of ``strategies/table.py`` has a page. Docstrings describe what the algorithm
does, parameter groups what it shares and keeps, traits its requirements, and
declarations its settings. Published and measured accuracies are those of the pages of
results.
"""

import inspect
import re
import tomllib
from typing import Any, NamedTuple

from docs.algorithm_results import results
from docs.links import DOCS
from docs.settings import COMMON, Row, cases_of, descriptions, table, wraps
from flwr_frl.clients.algorithms import client_class, complete, load_client
from flwr_frl.clients.base import Client, tests_received
from flwr_frl.clients.device.groups import HEAD, REPRESENTATION
from flwr_frl.clients.device.traits import TaskOf, needs_classes
from flwr_frl.common.settings import SettingsError, declared, defaults
from flwr_frl.strategies.algorithms import ALGORITHMS, strategy_class
from flwr_frl.strategies.gossip.base import Gossip
from flwr_frl.task.names import GENERATED
from flwr_frl.task.tasks import build_task

# Settings that are tried, in this order, to find an example that the algorithm can run.
EXAMPLES: list[dict[str, Any]] = [
    {},
    {"model": "resnet20"},
    *({"task": task} for task in GENERATED[1:]),
]
GROUPS = {REPRESENTATION: "representation", HEAD: "head", "model.": "a second model"}


class Algorithm(NamedTuple):
    """An algorithm with its two classes."""

    name: str
    about: str
    strategy: type[Any]
    client: type[Client]

    @property
    def relays(self) -> bool:
        """Whether the server only relays messages between neighbours."""
        return issubclass(self.strategy, Gossip)

    @property
    def title(self) -> str:
        """The name before the citation, or that of the class if it has a space."""
        before = self.about.partition(" (")[0]
        return self.strategy.__name__ if " " in before else before


def algorithm_pages() -> dict[str, str]:
    """Return the pages of all algorithms by their files, and the table of all."""
    built_in = [algorithm(name) for name in ALGORITHMS]
    pages = {f"algorithms/{each.name}.md": page(each) for each in built_in}
    # ``algorithms.md`` includes this table.
    pages["algorithms/all.txt"] = overview(built_in)
    return pages


def algorithm(name: str) -> Algorithm:
    """Return a built-in algorithm."""
    settings = {**defaults(), "algorithm": name}
    about = ALGORITHMS[name][1]
    return Algorithm(name, about, strategy_class(settings), client_class(settings))


def overview(known: list[Algorithm]) -> str:
    """Return a table of all algorithms."""
    text = "| name | algorithm | travels | stays on the client |\n"
    text += "| --- | --- | --- | --- |\n"
    for each in known:
        name = f"[`{each.name}`](/algorithms/{each.name}.md)"
        text += f"| {name} | {each.about} | {travels(each)} | {stays(each)} |\n"
    return text


def travels(each: Algorithm) -> str:
    """Return which arrays clients and server exchange."""
    if each.relays:
        return "messages to neighbours"
    received, sent = groups(each.client.shared), each.client.sent
    if sent is Client.sent:
        return received
    return f"to the client: {received}; to the server: {groups(sent)}"


def stays(each: Algorithm) -> str:
    """Return which arrays never leave a client."""
    return groups(each.client.personal)


def groups(names: object) -> str:
    """Return parameter groups in words; properties depend on the settings."""
    if not isinstance(names, tuple):
        return "depends on the settings"
    if {*names} >= {REPRESENTATION, HEAD}:
        rest = [name for name in names if name not in GROUPS]
        return ", ".join(["the model", *(f"`{name[:-1]}`" for name in rest)])
    words = [GROUPS.get(name, f"`{name[:-1]}`") for name in names]
    return ", ".join(words) or "\N{EN DASH}"


def page(each: Algorithm) -> str:
    """Return the page of an algorithm."""
    parts = [
        f"# {each.title}\n\n`{each.name}`: {each.about}{paper(each.name)}\n",
        "## What it does\n",
        described("On the server", each.strategy),
        described("On the client", each.client),
        *(
            described(f"On the task `{task}`: the server", case)
            + "\n"
            + described(
                f"On the task `{task}`: the client",
                load_client(case._traits.client),
            )
            for task, case in cases_of(each.strategy).items()
        ),
        "## What is shared and what stays\n",
        f"| travels | stays on the client |\n| --- | --- |\n"
        f"| {travels(each)} | {stays(each)} |\n",
        "[Who sees what](/privacy.md)\n",
        "## Needs and capabilities\n\n" + "".join(f"- {t}\n" for t in traits(each)),
        "## Settings\n\n" + settings_table(each),
        "## Run it\n\n" + command(each),
        "## Results\n\n" + results(each.name),
        "## Source\n\n" + source(each),
    ]
    return "\n".join(part for part in parts if part)


def paper(name: str) -> str:
    """Return a link to the paper, if ``papers.toml`` has one."""
    links = tomllib.loads((DOCS / "papers.toml").read_text(encoding="utf-8"))
    plain = name.removesuffix("-ft")
    return f" · [paper]({links[plain]})" if plain in links else ""


def prose(docstring: str | None) -> str:
    """Return a docstring's text above its sections, as Markdown."""
    text = inspect.cleandoc(docstring or "")
    text = re.split(r"\n\n[A-Z]\w+( \w+)?\n-+\n", text)[0]
    # Literal blocks become fenced blocks.
    text = re.sub(
        r"::\n\n((?:    .*\n?|\n)+)",
        lambda m: ":\n\n```text\n" + inspect.cleandoc(m[1]) + "\n```\n\n",
        text,
    )
    code = re.split(r"(`+[^`]+`+)", text)
    code[::2] = [re.sub(r"([*<|])", r"\\\1", part) for part in code[::2]]
    return "".join(code).strip()


def described(title: str, kind: type) -> str:
    """Return the docstring of a strategy or a client as a section."""
    return f"### {title}\n\n{prose(kind.__doc__)}\n"


def traits(each: Algorithm) -> list[str]:
    """Return sentences on an algorithm's requirements and capabilities."""
    server, client = each.strategy._traits, each.client._traits
    sentences = []
    for check in client.requires:
        if isinstance(check, TaskOf):
            sentences.append(f"It needs a task of the type `{check.kind.__name__}`.")
        elif check is needs_classes:
            sentences.append("Targets must be classes.")
        else:
            need = prose(check.__doc__).partition("\n")[0]
            sentences.append(need.replace("Refuse", "It refuses", 1))
    if server.evaluate_last_round_only:
        sentences.append("Only the last round is evaluated.")
    if not (wraps(each.strategy) or server.takes_newcomers):
        sentences.append("Clients that join after training get no model.")
    if tests_received(each.client):
        sentences.append(
            "The received model is tested as well: `accuracy-global` in the metrics."
        )
    if client.supports_example_dp:
        sentences.append(
            "[Noise on the device](/privacy.md) (`dp-noise`) can be counted."
        )
    return sentences


def settings_table(each: Algorithm) -> str:
    """Return the settings that an algorithm's own classes declare."""
    common = {name for _, maker in COMMON for name in declared(maker)}
    rows: dict[str, Row] = {}
    for kind in (each.strategy, each.client):
        meanings = descriptions(kind)
        for name, setting in declared(kind).items():
            if name not in common:
                rows.setdefault(name, Row(name, setting, meanings[setting.argument]))
    more = "[All settings](/settings.md) has those that every algorithm reads."
    if not rows:
        return f"None of its own. {more}\n"
    return f"{table([*rows.values()])}\n{more}\n"


def command(each: Algorithm) -> str:
    """Return a command that runs the algorithm on data that need no download."""
    settings = next((g for g in EXAMPLES if _runs(each, g)), {})
    words = f"flwr-frl {each.name}"
    if "task" in settings:
        words += f" --task {settings['task']}"
    if "model" in settings:
        words += f" --run-config 'model=\"{settings['model']}\"'"
    if each.relays:
        words += " --clients 10"
    return f"```sh\n{words}\n```\n"


def _runs(each: Algorithm, given: dict[str, Any]) -> bool:
    settings = {**defaults(), "algorithm": each.name, "num-clients": 5, **given}
    try:
        kind = client_class(settings)
        kind._traits.check(build_task(complete(settings), 5))
    except SettingsError:
        return False
    return True


def source(each: Algorithm) -> str:
    """Return links to the classes in the reference."""
    kinds = {each.strategy, each.client}
    names = sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
    return "".join(f"- {{py:obj}}`{name}`\n" for name in names)
