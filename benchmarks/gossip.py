"""Code shared by the two gossip benchmarks: running, evaluating and tuning methods.

The dissertation's curves are those of the mean of the nodes' models, which no node
holds. Here all nodes live in one process, so the benchmark can read their states.
"""

import json
import logging
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord
from rich.progress import track

from benchmarks.common import provenance
from flwr_frl.clients.algorithms import complete
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.settings import Setting, Settings, resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.rounds import run_rounds
from flwr_frl.task.base import Task
from flwr_frl.task.tasks import build_task
from flwr_frl.task.training import evaluate

# Speed of a link in bits per second (dissertation, section 3.5.3)
LINK = 100_000
# Number of final evaluations that are averaged, for the table and for every choice
LAST = 5
# Early evaluations, as fractions of the rounds before the first regular one. Methods
# that send much reach the target early.
EARLY = (0.1, 0.2, 0.4, 0.6, 0.8)
# Settings that `search` chooses
SEARCHED = ("learning-rate", "consensus-step")
# SQuARM-SGD that sends every message
SENT = "SQuARM, no trigger"

Run = dict[str, Any]
State = dict[str, torch.Tensor]


class Method(NamedTuple):
    """A row of the table.

    Parameters
    ----------
    settings : dict
        Settings of the method.
    steps : tuple of float, default ()
        Candidates for the consensus step γ, as multiples of that of ``auto``.
    as_in : str, default ""
        Method whose learning rate and γ are used; if empty, they are searched.
    """

    settings: dict[str, Setting]
    steps: tuple[float, ...] = ()
    as_in: str = ""


def methods(
    keep: float, steps: tuple[float, ...], triggers: Sequence[str]
) -> dict[str, Method]:
    """Return the rows of a table.

    Parameters
    ----------
    keep : float
        Fraction or number of entries that TopK and SignTopK keep.
    steps : tuple of float
        Candidates for the consensus step, as in `Method`.
    triggers : sequence of str
        SQuARM's thresholds, in addition to the row without a trigger.
    """
    choco: dict[str, Setting] = {"algorithm": "choco-sgd", "compressor-k": keep}
    squarm: dict[str, Setting] = {
        "algorithm": "squarm-sgd",
        "compressor": "sign-top-k",
        "compressor-k": keep,
        "local-steps": 5,
    }
    return {
        # No distance exceeds this threshold, so no node ever sends.
        "no communication": Method(squarm | {"trigger": "1e30"}),
        "D-PSGD": Method({"algorithm": "dpsgd"}),
        "CHOCO (Sign)": Method(choco | {"compressor": "sign"}, steps),
        "CHOCO (TopK)": Method(choco | {"compressor": "top-k"}, steps),
        SENT: Method(squarm, steps),
        **{
            f"SQuARM, c = {trigger}": Method(squarm | {"trigger": trigger}, as_in=SENT)
            for trigger in triggers
        },
    }


class Bench(NamedTuple):
    """The runs of a page: their folder, common settings, length and evaluations.

    Parameters
    ----------
    output : Path
        Folder of the runs. A stored run with the same settings is reused.
    shared : callable
        Maps the number of iterations of a run to the settings of all such runs.
    iterations, search_iterations : int
        Iterations of a run of the table and of a run of the search.
    looks : int
        Number of evaluations of a run, in addition to some early ones.
    own : int
        The nodes' own models are tested at every ``own``-th evaluation and at the last
        one. If 0, nothing is tested, only validated.
    """

    output: Path
    shared: Callable[[int], dict[str, Setting]]
    iterations: int
    search_iterations: int
    looks: int
    own: int

    def run(self, method: Method, picked: Settings, seed: int, search: bool) -> Run:
        """Return a run; carry it out if it is not stored."""
        iterations = self.search_iterations if search else self.iterations
        given = {**self.shared(iterations), **method.settings, **picked, "seed": seed}
        given["num-server-rounds"] = iterations // int(given.get("local-steps", 1))
        # Shorter runs only serve the search; they are validated and never tested.
        tested = self.own if iterations == self.iterations else 0
        return watch(given, self.output, self.looks, tested)


def watch(
    given: Settings, output: Path, looks: int, own: int, target: float = 0.0
) -> Run:
    """Run one algorithm inline and evaluate the mean of the nodes' models.

    Parameters
    ----------
    given : mapping
        Settings that differ from the defaults.
    output : Path
        Folder of the runs.
    looks, own : int
        As in `Bench`.
    target : float, default 0
        Test error of the mean model at which a run ends.

    Returns
    -------
    dict
        ``settings``, ``commit``, ``gamma`` and ``rows``. A row has ``iteration``,
        ``bits`` (per node, so far), ``error`` and ``validation`` (errors of the mean
        model), ``consensus``, ``seconds`` (compute), ``link`` (seconds on a link of
        100 kbit/s, all nodes sending at once) and, in some rows, ``own`` (mean test
        error of the nodes' own models).
    """
    path = output / f"{_name(given)}.json"
    if path.is_file():
        kept: Run = json.loads(path.read_text(encoding="utf-8"))
        return kept
    settings = complete(resolve(given))
    nodes = int(settings["num-clients"])
    task = build_task(settings, nodes)
    held_out = build_task({**settings, "evaluate-on": "validation"}, nodes)
    grid = InlineGrid(make_app(dict(settings)), nodes)
    strategy: Any = build_strategy(settings)
    arrays = strategy.initialize(grid)
    squarm = settings["algorithm"] == "squarm-sgd"
    local = int(settings["local-steps"]) if squarm else 1
    total = int(settings["num-server-rounds"])
    at = {round(total / looks * part): 0 for part in EARLY}
    at |= {round(total * (i + 1) / looks): i + 1 for i in range(looks)}
    rows: list[dict[str, float]] = []
    bits, link, began = 0.0, 0.0, time.monotonic()
    for server_round in track(range(1, total + 1), path.stem, transient=True):
        sent = one_round(strategy, grid, arrays, server_round)
        bits += sent["bits"] / nodes
        link += sent["bits"] / max(sent["sent"], 1) / LINK
        if server_round not in at:
            continue
        look, states = at[server_round], node_states(grid)
        mean = mean_state(states)
        row = {
            "iteration": server_round * local,
            "bits": bits,
            "validation": error(held_out, mean, range(nodes)),
            "consensus": consensus(states, mean),
            "seconds": time.monotonic() - began,
            "link": link,
        }
        if own:
            row["error"] = error(task, mean, [0])
        if own and look and (look % own == 0 or look == looks):
            row["own"] = float(np.mean([error(task, s, [0]) for s in states]))
        rows.append(row)
        if row.get("error", 1.0) <= target:
            break
    about = {"settings": given, "commit": provenance()["commit"]}
    run = {**about, "gamma": strategy.step.value, "rows": rows}
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run), encoding="utf-8")
    return run


def one_round(
    strategy: Any, grid: InlineGrid, arrays: ArrayRecord, server_round: int
) -> dict[str, Any]:
    """Run a round and return its metrics; fail if a node did not take part."""
    seen: dict[str, Any] = {}
    run_rounds(
        strategy,
        grid,
        arrays,
        range(server_round, server_round + 1),
        evaluated=lambda _: False,
        after_round=lambda _, __, metrics: seen.update(metrics),
    )
    if seen["clients"] < len(grid.contexts):
        raise RuntimeError(f"round {server_round}: {strategy.round.rejections}")
    return seen


def _name(given: Settings) -> str:
    """Return a file name for the settings, independent of the data's location."""
    settings = {name: value for name, value in given.items() if name != "data-dir"}
    checksum = zlib.crc32(json.dumps(settings, sort_keys=True).encode())
    return f"{given['algorithm']}-{given['seed']}-{checksum:08x}"


def node_states(grid: InlineGrid) -> list[State]:
    """Return the nodes' models: parameters, and batch statistics if there are any.

    These are the models after the last exchange, which preserves the mean (eq. 3.9).
    """
    states = []
    for context in grid.contexts.values():
        arrays = PersonalState(context).load() or {}
        states.append(
            {
                name: torch.from_numpy(array)
                for name, array in arrays.items()
                if not name.startswith("gossip.")
            }
        )
    return states


def mean_state(states: Sequence[State]) -> State:
    """Return the mean of models."""
    return {
        name: torch.stack([s[name].double() for s in states]).mean(0).to(first.dtype)
        for name, first in states[0].items()
    }


def consensus(states: Sequence[State], mean: State) -> float:
    """Return 1/n Σ ‖x_i − x̄‖², over the parameters and the batch statistics."""
    names = [n for n, value in mean.items() if value.is_floating_point()]
    far = [(s[n] - mean[n]).double().square().sum() for s in states for n in names]
    return float(sum(far)) / len(states)


def error(task: Task, state: State, clients: Sequence[int]) -> float:
    """Return a model's error on the pooled test examples of some clients."""
    model, wrong, number = task.scratch_model, 0.0, 0
    with torch.no_grad():
        model.load_state_dict(state)
    for client in clients:
        examples = task.test_examples(client)
        _, accuracy = evaluate(model, examples, task.loss)
        wrong += (1 - accuracy) * len(examples)
        number += len(examples)
    # Rounded, so that an error of 0.158 meets a target of 0.158.
    return round(wrong / number, 9)


def final(run: Run, what: str = "error") -> float:
    """Return a quantity's mean over the last evaluations, or else its last value."""
    rows = run["rows"][-LAST:]
    if not all(what in row for row in rows):
        rows = run["rows"][-1:]
    return float(np.mean([row[what] for row in rows]))


def search(
    bench: Bench, method: Method, rates: Sequence[float]
) -> tuple[Settings, list[Run]]:
    """Choose a method's learning rate and γ by validation; the rule is always the same.

    The learning rate is chosen first, with the γ of ``auto``, and then γ with that
    rate. Each time, the value with the smallest final validation error is chosen, with
    seed 0.

    Parameters
    ----------
    bench : Bench
        Common properties of all runs.
    method : Method
        The method.
    rates : sequence of float
        Learning rates to choose from.

    Returns
    -------
    picked : dict
        The chosen settings.
    runs : list of dict
        The runs that were compared.
    """
    quiet()
    runs = [bench.run(method, {"learning-rate": r}, 0, True) for r in rates]
    chosen = _best(runs)
    rate = {"learning-rate": chosen["settings"]["learning-rate"]}
    for times in method.steps:
        step = float(f"{min(1.0, times * chosen['gamma']):.2g}")
        runs.append(bench.run(method, {**rate, "consensus-step": step}, 0, True))
    found = _best(runs)["settings"]
    return {what: found[what] for what in SEARCHED if what in found}, runs


def whole(bench: Bench, name: str, method: Method, picked: Settings, seed: int) -> Run:
    """Return a run of the table, stored or new, and print its final error."""
    quiet()
    run = bench.run(method, picked, seed, False)
    print(f"{name}, seed {seed}: {final(run):.2%}", file=sys.stderr, flush=True)
    return run


def _best(runs: Sequence[Run]) -> Run:
    return min(runs, key=lambda run: final(run, "validation"))


def quiet() -> None:
    """Limit Flower's log to errors, and torch to one thread."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
