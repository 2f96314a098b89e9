"""Accuracy under Byzantine clients, by algorithm, data, aggregation rule and attack.

Ten clients train on the bundled digits. The first three of them attack together and
know everything that the honest clients send (`benchmarks.attacks`). The other seven
test the models that they would use, on their own test data. Finished runs are stored in
``--output``, and a repeated command skips them.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord
from rich.progress import track

from benchmarks.attacks import (
    ATTACKERS,
    ATTACKS,
    BACKDOOR,
    CLIENTS,
    FLIP,
    HIDDEN,
    AttackedGrid,
    is_attacker,
)
from benchmarks.backdoor import BackdoorDigits
from benchmarks.common import markdown, write
from flwr_frl.clients.client_app import make_app
from flwr_frl.common.messages import EXAMPLES
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.rounds import run_rounds

ALGORITHMS = ("fedavg", "fedrep", "fedper", "flute", "ditto")
MEAN, PERSONAL, GLOBAL = "mean", "geometric-median", "centered-clip"
RULES = (MEAN, PERSONAL, GLOBAL, "multi-krum", "median", "trimmed-mean")
# The recommended rules, which have all seeds; the others have the first.
CHOICE = {name: GLOBAL if name == "fedavg" else PERSONAL for name in ALGORITHMS}
# Classes per client: similar data and very different data
CLASSES = {10: "all classes", 2: "2 classes"}
COLUMNS = list(itertools.product(ALGORITHMS, CLASSES))
POISONED = (FLIP, BACKDOOR, HIDDEN)


class Cell(NamedTuple):
    """A run; without an attack all clients are honest."""

    algorithm: str
    rule: str
    attack: str = ""
    classes: int = 10
    seed: int = 0


class Outcome(NamedTuple):
    """Means over the honest clients and the last rounds, between 0 and 1.

    Parameters
    ----------
    accuracy : float
        Accuracy on clean digits.
    success : float
        Share of triggered digits of other classes that are classified as the target.
    seconds : float
        CPU time of the run.
    """

    accuracy: float
    success: float
    seconds: float = 0.0


# Outcomes of all seeds, by the cell without its seed
Results = dict[tuple[str, str, str, int], list[Outcome]]


def outcome(arguments: argparse.Namespace, cell: Cell) -> Outcome:
    """Carry out a run and return its outcome."""
    began = time.process_time()
    settings = resolve(
        {
            "algorithm": cell.algorithm,
            "task": "benchmarks.backdoor:BackdoorDigits",
            "attackers": ATTACKERS if cell.attack in POISONED else 0,
            "label-flip": cell.attack == FLIP,
            "aggregation": cell.rule,
            "byzantine-fraction": ATTACKERS / CLIENTS,
            "num-clients": CLIENTS,
            "num-server-rounds": arguments.rounds,
            "fraction-train": 1.0,
            "classes-per-client": cell.classes,
            "representation-epochs": 2,
            "head-epochs": 3,
            "batch-size": 20,
            "learning-rate": 0.1,
            "seed": cell.seed,
        },
        [BackdoorDigits],
    )
    grid = AttackedGrid(make_app(settings), cell.attack)
    # The same clients with triggered test data
    triggered = InlineGrid(make_app({**settings, "test-triggered": True}), CLIENTS)
    triggered.contexts = grid.contexts
    strategy = build_strategy(settings)
    clean: list[float] = []
    fooled: list[float] = []

    def test(on: InlineGrid, server_round: int, arrays: ArrayRecord) -> float:
        config = ConfigRecord()
        messages = list(strategy.configure_evaluate(server_round, arrays, config, on))
        for message in messages if on is triggered else ():
            # Triggered examples have another fingerprint than those of the run.
            message.content.config_records["config"].pop(EXAMPLES, None)
        # A model that can no longer be tested counts as 0 % accurate.
        right = [
            float(reply.content.metric_records["metrics"].get("accuracy", 0.0))
            for reply in on.send_and_receive(messages)
            if reply.has_content() and not is_attacker(reply)
        ]
        return sum(right) / (CLIENTS - ATTACKERS)

    def after_round(r: int, arrays: ArrayRecord, metrics: dict[str, Any]) -> None:
        if r > arguments.rounds - arguments.last:
            clean.append(test(grid, r, arrays))
            if cell.attack in ("", BACKDOOR, HIDDEN):
                fooled.append(test(triggered, r, arrays))

    run_rounds(
        strategy,
        grid,
        strategy.initialize(grid),
        range(1, arguments.rounds + 1),
        evaluated=lambda r: False,
        after_round=after_round,
    )
    seconds = time.process_time() - began
    return Outcome(fmean(clean), fmean(fooled or [0.0]), seconds)


def needed(cell: Cell) -> bool:
    """Return whether a run is on the page; the mean has few."""
    if cell.rule == MEAN:
        return cell.attack in ("", "1e30")
    return cell.seed == 0 or cell.rule == CHOICE[cell.algorithm]


def carried_out(arguments: argparse.Namespace, all_cells: Iterable[Cell]) -> Results:
    """Carry out the runs that are not stored yet."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    results: Results = {}
    with (arguments.output / f"{arguments.rounds}-rounds.jsonl").open("a+") as file:
        file.seek(0)
        stored = {Cell(*cell): Outcome(*own) for cell, own in map(json.loads, file)}
        for cell in track(all_cells):
            if cell not in stored:
                stored[cell] = outcome(arguments, cell)
                print(json.dumps([cell, stored[cell]]), file=file, flush=True)
            results.setdefault(cell[:-1], []).append(stored[cell])
    return results


class Page:
    """The page's text and tables."""

    def __init__(self, results: Results) -> None:
        self.results = results

    def table(self, rows: Mapping[str, Callable[[str, int], object]]) -> str:
        """Return a table with a column for each algorithm and kind of data."""
        head = ["", *(f"`{name}`, {CLASSES[n]}" for name, n in COLUMNS)]
        cells = [[name, *(row(*c) for c in COLUMNS)] for name, row in rows.items()]
        return markdown(head, cells)

    def percent(
        self, attack: str, algorithm: str, classes: int, rule: str = "", of: str = ""
    ) -> float:
        """Return the mean of the seeds in %, by default with the recommended rule."""
        rule = rule or CHOICE[algorithm]
        runs = self.results[algorithm, rule, attack, classes]
        return 100 * fmean(getattr(run, of or "accuracy") for run in runs)

    def worst(self, algorithm: str, classes: int, rule: str = "") -> tuple[float, str]:
        """Return the lowest accuracy over all attacks in %, and its attack."""
        here = (algorithm, rule or CHOICE[algorithm], classes)
        attacks = [k[2] for k in self.results if (*k[:2], k[3]) == here and k[2]]
        return min((self.percent(a, algorithm, classes, rule), a) for a in attacks)

    def lost(self, *column: Any) -> float:
        """Return the points lost by the recommended rule to its worst attack."""
        return self.percent("", *column, MEAN) - self.worst(*column)[0]

    def text(self, arguments: argparse.Namespace) -> str:
        """Return the text of the page below its heading."""

        def cell(attack: str, *column: Any, of: str = "") -> str:
            return f"{self.percent(attack, *column, of=of):.1f}"

        def lowest(rule: str, *column: Any) -> str:
            return "{:.1f} ({})".format(*self.worst(*column, rule))

        fooled = [
            self.percent(attack, "fedavg", 10, "multi-krum", "success")
            for attack in (BACKDOOR, HIDDEN)
        ]
        personal = [self.lost(*c) for c in COLUMNS if c[0] != "fedavg"]
        least = max(self.worst("fedavg", 2, rule)[0] for rule in RULES[1:])
        chosen = {
            "rule": lambda a, _: f"`{CHOICE[a]}`",
            "mean, no attack": lambda *c: f"{self.percent('', *c, MEAN):.1f}",
            "rule, no attack": partial(cell, ""),
            "rule, worst attack": partial(lowest, ""),
            "points lost": lambda *c: f"{self.lost(*c):.1f}",
        }
        poisoned = {
            f"{a}: success": partial(cell, a, of="success") for a in POISONED[1:]
        }
        return f"""The rule to choose:

- Methods with a personal part: `geometric-median`. They lose at most
{max(personal):.1f} points under the worst of {len(ATTACKS)} attacks by {ATTACKERS} of
{CLIENTS} clients.
- FedAvg: `centered-clip`, which loses {self.lost("fedavg", 10):.1f} points on similar
data. With 2 classes a client no rule protects it: the best one falls to
{least:.1f} %. Use a method with a personal part.
- Against backdoors: a personal head, as with FedRep and FedPer (success rates below).
On FedAvg and similar data, `multi-krum` stops the scaled backdoor ({fooled[0]:.1f} %),
but not the one within the honest clients' spread ({fooled[1]:.1f} %).
- `bucket-size=2` is for less than a quarter of attackers: {ATTACKERS} of {CLIENTS}
corrupt most of five buckets.

{self.table(chosen)}
## Lowest accuracy by rule

{self.table({f"`{rule}`": partial(lowest, rule) for rule in RULES})}
## All attacks on the recommended rules

{self.table({a or "none": partial(cell, a) for a in ("", *ATTACKS)} | poisoned)}
## Setting

Accuracies in % of the {CLIENTS - ATTACKERS} clients that never attack, each with its
model on its own test digits: means of the last {arguments.last} of {arguments.rounds}
rounds, and of {arguments.seeds} seeds for the recommended rules and the mean; other
rules have one seed. `byzantine-fraction` is {ATTACKERS / CLIENTS:g}; the rules' other
settings have their defaults. The model is a perceptron with one hidden layer.

Attackers know the changes of all honest clients in the round. The attacks are:

- `1e30`: every value is 1e30. Only this attack was run with the mean.
- `sign flip`: the trained model with all signs flipped.
- `ALIE` (Baruch et al., 2019): the honest mean minus 1.5 standard deviations of each
entry. Their formula gives only 0.18 for 3 of 10 clients.
- `IPM` (Xie et al., 2020): minus 0.5 or 3 times the honest mean.
- `ascent`: against the honest mean, with the median norm of the honest changes.
- `min-max`, `min-sum` (Shejwalkar and Houmansadr, 2021): from the honest mean against
its direction, as far as honest clients are from each other.
- `mimic` (Karimireddy et al., 2022): the honest change farthest along the direction in
which they differ most.
- `ROP` (Özfatura et al., 2023): from the last round's change, in a constant direction
made orthogonal to it, as far as the median honest client.
- `{FLIP}`: training with the labels 9 - y.
- `{BACKDOOR}` (Bagdasaryan et al., 2020): training in which every second digit has a
white patch of 2 x 2 pixels and the label 0, and {CLIENTS}/{ATTACKERS} times the
change. Its success rate is the share of patched digits that are classified as 0.
- `{HIDDEN}`: the same training; the difference from the honest mean is scaled as in
`min-max`.
"""


def main() -> None:
    """Carry out all runs and write ``results/liars``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--last", type=int, default=3, help="number of rounds tested")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("results/liars"))
    arguments = parser.parse_args()
    each = ALGORITHMS, RULES, ("", *ATTACKS), CLASSES, range(arguments.seeds)
    all_cells = filter(needed, map(Cell._make, itertools.product(*each)))
    results = carried_out(arguments, list(all_cells))
    data = {
        "results": {"/".join(map(str, key)): own for key, own in results.items()},
        "seconds": sum(run.seconds for runs in results.values() for run in runs),
    }
    write("liars", "Byzantine clients", Page(results).text(arguments), data)


if __name__ == "__main__":
    main()
