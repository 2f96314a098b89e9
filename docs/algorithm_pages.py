"""Assemble a page for each algorithm from its text and from facts of the code.

``methods/NAME.md`` has the idea, what server and client do, and when to use it. The
picture of what travels, the settings, the command and the results follow from the
classes, and from the data of the pages of results.
"""

import html
import re
import tomllib
from typing import Any, NamedTuple

from docs.algorithm_results import comparison, results, title_of
from docs.links import DOCS, for_site
from docs.settings import COMMON, Row, cases_of, descriptions, table
from flwr_frl.clients.algorithms import client_class, load_client
from flwr_frl.clients.base import Client, TaskOf, needs_classes, tests_received
from flwr_frl.clients.fedbn import batch_norms
from flwr_frl.common.algorithms import SIMULATION_DEFAULTS
from flwr_frl.common.settings import declared, defaults
from flwr_frl.results.comparison import references
from flwr_frl.strategies.algorithms import ALGORITHMS, settings_owners, strategy_class
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.cfl import CFL
from flwr_frl.strategies.fedbuff import AsynchronousRounds
from flwr_frl.strategies.fedcross import FedCross
from flwr_frl.strategies.flute import HeadsOnServer
from flwr_frl.strategies.gossip.base import Gossip
from flwr_frl.strategies.server.secure import needs_only_mean

METHODS = DOCS / "methods"
# Words for groups of arrays whose names do not explain themselves; "" is not shown.
WORDS = {
    "model.": "personal model",
    "before.": "model before training",
    "previous.": "previous representation",
    "candidates.": "models of other clients",
    "clusters.": "a model for each cluster",
    "components.": "components",
    "mixture.": "weights of the components",
    "core.": "core model",
    "rest.": "weighted sum of the rest",
    "relations.": "weights of models",
    "critical.": "critical positions",
    "count.": "",
    "lora-b.": "matrices B",
    "gossip.": "momentum and estimates",
    "small.": "small model",
    "link.": "layer on the features",
    "started.": "",
}
PICTURE = """<div class="exchange">
<div class="end"><b>{server} keeps</b><br>{stored}</div>
<div class="wire"><div class="down">{down}</div><div class="up">{up}</div></div>
<div class="end many"><b>Each {client} keeps</b><br>{stays}</div>
</div>
"""


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
    def is_secure(self) -> bool:
        """Whether the algorithm can run with secure aggregation."""
        strategy = settings_owners({**defaults(), "algorithm": self.name})[-1]
        has_rounds = not issubclass(self.strategy, AsynchronousRounds)
        return has_rounds and needs_only_mean(strategy)

    @property
    def kept_for_each(self) -> str:
        """Arrays that the server sends to their client alone; empty if none."""
        # The one that another strategy wraps, if any.
        strategy = settings_owners({**defaults(), "algorithm": self.name})[-1]
        # FedCross and CFL give the same models to several clients.
        shares = strategy in (FedCross, CFL)
        if strategy.per_client is Strategy.per_client or shares:
            return ""
        return "head" if issubclass(strategy, HeadsOnServer) else "model"


def algorithm_pages() -> dict[str, str]:
    """Return the pages of all algorithms by their files, and the table of all."""
    built_in = [algorithm(name) for name in ALGORITHMS]
    pages = {f"algorithms/{each.name}.md": page(each) for each in built_in}
    # ``algorithms.md`` includes this table.
    pages["algorithms/all.txt"] = overview(built_in)
    # ``coming-from.md`` includes this one.
    pages["algorithms/pfllib.txt"] = pfllib()
    # ``secure-aggregation.md`` includes this list.
    pages["algorithms/secure.txt"] = secure(built_in)
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
        down, up, stays = (", ".join(groups) or "\N{EN DASH}" for groups in flow(each))
        travels = down if down == up else f"to the client: {down}; back: {up}"
        about = each.about.replace("*", r"\*")
        name = f"[`{each.name}`](/algorithms/{each.name}.md)"
        text += f"| {name} | {about} | {travels} | {stays} |\n"
    return text


def pfllib() -> str:
    """Return a table of PFLlib's algorithms with their names here."""
    tables = tomllib.loads((DOCS / "pfllib.toml").read_text(encoding="utf-8"))
    here, missing = tables["here"], tables["missing"]
    known = {theirs: name for theirs, name in here.items() if name in ALGORITHMS}
    rows = dict.fromkeys(here, "not in this version")
    rows |= {t: f"[`{name}`](/algorithms/{name}.md)" for t, name in known.items()}
    rows |= {theirs: f"\N{EN DASH} ({why})" for theirs, why in missing.items()}
    text = f"{len(known)} of PFLlib's {len(rows)} algorithms are here:\n\n"
    text += "| PFLlib | flwr-frl |\n| --- | --- |\n"
    return text + "".join(f"| `{theirs}` | {ours} |\n" for theirs, ours in rows.items())


def secure(known: list[Algorithm]) -> str:
    """Return which algorithms support secure aggregation, as their strategies say."""
    lists: dict[bool, list[str]] = {True: [], False: []}
    for each in known:
        lists[each.is_secure].append(f"[`{each.name}`](/algorithms/{each.name}.md)")
    text = f"- **Supported**: {', '.join(lists[True])}.\n"
    text += "- **Refused**, because the server uses single replies, or there are no "
    return text + f"rounds: {', '.join(lists[False])}.\n"


def flow(each: Algorithm) -> tuple[list[str], list[str], list[str]]:
    """Return what a client receives, what it sends, and what stays, in words."""
    client, stays = each.client, whole(in_words(each.client.personal))
    if each.relays:
        return ["messages of neighbours"], ["a message"], stays
    down = in_words(client.shared)
    up = down if client.sent is Client.sent else in_words(client.sent)
    if ALGORITHMS[each.name][0] in SIMULATION_DEFAULTS:
        # The rest of the representation is frozen.
        down, up = (["adapters", *words[1:]] for words in (down, up))
    if each.kept_for_each != "head":
        down, up = whole(down), whole(up)
    return down, up, stays


def whole(words: list[str]) -> list[str]:
    """Return words with the two parts of a model as one."""
    both = words[:2] == ["representation", "head"]
    return ["model", *words[2:]] if both else words


def in_words(groups: object) -> list[str]:
    """Return groups of arrays in words; properties depend on the settings."""
    if not isinstance(groups, tuple):
        return ["depends on the role"]
    words = [WORDS.get(g, g.rstrip(".").replace("-", " ")) for g in groups]
    return [word for word in words if word]


def page(each: Algorithm) -> str:
    """Return the page of an algorithm."""
    file = METHODS / f"{each.name}.md"
    text = for_site(file.read_text(encoding="utf-8"), file)
    idea, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    written = dict(section.split("\n", 1) for section in sections)
    server, client, use = (
        written.pop(title).strip() for title in ("Server", "Client", "When to use it")
    )
    steps, _, notes = client.partition("\n\n")
    entries = references([each.name]).strip()
    parts = [
        f"# {title_of(each.name)}\n\n{idea.strip()}",
        "## Algorithm\n\n" + side_by_side(each, server, steps),
        notes,
        "The symbols are those of [all algorithms](/algorithms.md#notation). "
        f"In the code: {classes(each)}.",
        "## Messages and personal state\n\n" + picture(each),
        "[Privacy](/privacy.md) describes who can see what.",
        f"## When to use it\n\n{use}",
        comparison(each.name),
        "## Run it\n\n" + command(each) + "\n" + traits(each),
        "## Results\n\n" + results(each.name, written.pop("Results", "").strip()),
        "## Settings\n\n" + settings_table(each),
        f"## Cite\n\n```bibtex\n{entries}\n```" if entries else "",
        *(f"## {title}\n\n{text.strip()}" for title, text in written.items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def side_by_side(each: Algorithm, server: str, client: str) -> str:
    """Return the steps of both ends in two columns."""
    ends = ("Relay", "Node $i$") if each.relays else ("Server", "Client $i$")
    cards = "".join(
        f":::{{grid-item-card}} {end}\n{steps}\n:::\n"
        for end, steps in zip(ends, (server, client), strict=True)
    )
    return f"::::{{grid}} 1 1 2 2\n:gutter: 3\n\n{cards}::::"


def picture(each: Algorithm) -> str:
    """Return the picture of what travels and what stays, as HTML."""
    down, up, stays = flow(each)
    own = each.kept_for_each
    for_each = f"each client's {own}"
    stored = [for_each if word == own else word for word in down]
    if each.relays or own == "model":
        stored = [for_each] * bool(own)
    return PICTURE.format(
        server="Relay" if each.relays else "Server",
        client="node" if each.relays else "client",
        stored=chips(stored, for_each),
        down=chips(down, own),
        up=chips(up, own),
        stays=chips(stays, *stays),
    )


def chips(words: list[str], *personal: str) -> str:
    """Return labels in the colour of shared or of personal arrays, as HTML."""
    kinds = ("personal" if word in personal else "shared" for word in words)
    labels = zip(kinds, map(html.escape, words), strict=True)
    text = "".join(f'<span class="{kind}">{word}</span>' for kind, word in labels)
    return text or "nothing"


def traits(each: Algorithm) -> str:
    """Return a list of an algorithm's requirements and capabilities."""
    server, client = each.strategy._traits, each.client._traits
    sentences = []
    for check in client.requires:
        if isinstance(check, TaskOf):
            sentences.append(f"It needs a task of the type `{check.kind.__name__}`.")
        elif check is needs_classes:
            sentences.append("Targets must be classes.")
        else:
            need = (check.__doc__ or "").partition("\n")[0]
            sentences.append(need.replace("Refuse", "It refuses", 1))
    if server.evaluate_last_round_only:
        sentences.append("Only the last round is evaluated.")
    if tests_received(each.client):
        sentences.append(
            "The received model is tested as well: `accuracy-global` in the metrics."
        )
    return "".join(f"- {sentence}\n" for sentence in sentences)


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
    words = f"flwr-frl {each.name}"
    if batch_norms in each.client._traits.requires:
        words += " --run-config 'model=\"resnet20\"'"
    if each.relays:
        words += " --clients 10"
    return f"```sh\n{words}\n```\n"


def classes(each: Algorithm) -> str:
    """Return links to the classes in the reference, also those of other tasks."""
    cases = cases_of(each.strategy)
    clients = [load_client(case._traits.client) for case in cases]
    kinds = dict.fromkeys([each.strategy, each.client, *cases, *clients])
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
    return ", ".join(f"{{py:obj}}`~{name}`" for name in names)
