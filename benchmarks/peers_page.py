"""The page of ``peers.py``: measurements of each peer, and tables of all."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from benchmarks.common import markdown
from benchmarks.peer_apps.work import CLIENTS, initial_model, read_client
from benchmarks.peers_runs import BARE, SOFTMAX, WORKS

Works = Mapping[str, Mapping[str, "Found"]]
Left = list[tuple[str, str]]
Examples = tuple[torch.Tensor, torch.Tensor]
COLUMNS = (
    "",
    "CPU s a round",
    "/ bare loop",
    "each pass",
    "seconds a round",
    "/ bare loop",
    "steps a round",
    "moved",
    "cosine",
    "loss",
)


@dataclass
class Found:
    """Measurements of a peer over all passes.

    Parameters
    ----------
    work : str
        A key of ``WORKS``.
    seconds, cpu : list of list of float
        Time of each round after the first, by pass, or the mean over rounds that are
        timed together.
    steps : list of float
        Number of steps in each round.
    moved : list of float
        Distance from the initial shared model to the final one.
    agrees : list of float
        Cosine similarity of this change with the bare loop's in the same pass.
    loss : list of float
        Loss of the final model on a tenth of all training examples; FedAvg only.
    """

    work: str
    seconds: list[list[float]] = field(default_factory=list)
    cpu: list[list[float]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    agrees: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    @property
    def round(self) -> float:
        """Median seconds of a round, over all passes."""
        return median(s for each in self.seconds for s in each)

    @property
    def cpu_round(self) -> float:
        """Median CPU seconds of a round, over all passes."""
        return median(s for each in self.cpu for s in each)

    def add(
        self,
        notes: list[dict[str, float]],
        model: list[torch.Tensor],
        bare: list[torch.Tensor],
        some: Examples,
    ) -> None:
        """Add the measurements of a pass."""
        pairs, work = list(pairwise(notes)), WORKS[self.work]
        self.seconds.append([(b["time"] - a["time"]) / work.every for a, b in pairs])
        self.cpu.append([(b["cpu"] - a["cpu"]) / work.every for a, b in pairs])
        self.steps.append(notes[-1]["steps"] / len(notes) / work.every)
        initial = list(initial_model(work.model).parameters())
        way, other = displacement(model, initial), displacement(bare, initial)
        self.moved.append(way.norm().item())
        self.agrees.append(torch.cosine_similarity(way, other, dim=0).item())
        if len(model) == len(initial):
            self.loss.append(loss(initial_model(work.model), model, some))

    def __str__(self) -> str:
        """Return a summary."""
        return f"{self.round:.3g} s a round, CPU {self.cpu_round:.3g} s"


def displacement(
    model: list[torch.Tensor], initial: list[torch.nn.Parameter]
) -> torch.Tensor:
    """Return the change from the initial parameters, as one vector."""
    pairs = zip(model, initial, strict=False)
    return torch.cat([(new - old.detach()).flatten() for new, old in pairs])


@torch.no_grad()
def loss(whole: torch.nn.Module, model: list[torch.Tensor], some: Examples) -> float:
    """Return the mean loss of a model with these parameters on some examples."""
    for parameter, value in zip(whole.parameters(), model, strict=True):
        parameter.copy_(value)
    return torch.nn.functional.cross_entropy(whole(some[0]), some[1]).item()


def every_tenth(folder: Path) -> Examples:
    """Return a tenth of each client's training examples."""
    parts = [read_client(folder, client) for client in range(CLIENTS)]
    return torch.cat([x[::10] for x, _ in parts]), torch.cat(
        [y[::10] for _, y in parts]
    )


def rows_of(work: str, found: Mapping[str, Found], left: Left) -> Iterator[list[str]]:
    """Yield a table row for each library, including those that did not run."""
    base = found[BARE]
    for name, each in found.items():
        steps = median(each.steps)
        yield [
            name,
            f"{each.cpu_round:#.3g}",
            f"{each.cpu_round / base.cpu_round:.2f}",
            " / ".join(f"{median(cpu):#.3g}" for cpu in each.cpu),
            f"{each.round:#.3g}",
            f"{each.round / base.round:.2f}",
            f"{steps:.0f}" if steps else "",
            f"{median(each.moved):.3f}",
            f"{median(each.agrees):.3f}",
            f"{median(each.loss):.2f}" if each.loss else "",
        ]
    for own_work, name in left:
        if own_work == work:
            yield [name, "not run", *[""] * 8]


def tables(found: Works, left: Left) -> str:
    """Return a table for each work."""
    parts = []
    for work, by_name in found.items():
        rows = list(rows_of(work, by_name, left))
        timed = sum(map(len, by_name[BARE].seconds)) * WORKS[work].every
        parts.append(f"{work}, {timed} rounds:\n\n{markdown(COLUMNS, rows)}")
    return "\n".join(parts)


def page(
    found: Works,
    left: Left,
    versions: Mapping[str, str],
    commands: Sequence[tuple[str, str]],
    passes: int,
) -> str:
    """Return the page's text.

    Parameters
    ----------
    found : mapping
        Measurements of each library, by work and name.
    left : list of tuple
        Work and name of each library that did not run.
    versions : mapping
        Version of each library, by name.
    commands : sequence of tuple
        Name and command.
    passes : int
        Number of passes.

    Returns
    -------
    str
        Markdown.
    """
    lines = [f"- {name} {version}" for name, version in versions.items()]
    lines += [f"- {name}: `{command}`" for name, command in commands]
    text = (Path(__file__).parent / "peer_apps" / "page.md").read_text("utf-8")
    return text.format(
        passes=passes,
        every=WORKS[SOFTMAX].every,
        tables=tables(found, left),
        commands="\n".join(lines),
    )
