"""Runs of gossip methods, evaluated on the mean of the nodes' models.

The dissertation's curves are those of the mean of the nodes' models, which no node
holds. Here all nodes live in one process, so the benchmark can read their states.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ConfigRecord

from benchmarks.runs import Rounds
from flwr_frl import simulate
from flwr_frl.clients.algorithms import complete
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.gossip.flat import FlatParameters
from flwr_frl.common.compression import (
    CompressionSettings,
    CompressorName,
    Identity,
    from_settings,
)
from flwr_frl.common.settings import Setting, build, resolve
from flwr_frl.strategies.gossip.graphs import practical_step
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.task.base import Task
from flwr_frl.task.tasks import build_task
from flwr_frl.task.training.local_training import evaluate

# Speed of a link in bits per second (dissertation, section 3.5.3)
LINK = 100_000
# Number of final evaluations that are averaged, for the table and for every choice
LAST = 5
# Early evaluations, as fractions of the rounds before the first regular one. Methods
# that send much reach the target early.
EARLY = (0.1, 0.2, 0.4, 0.6, 0.8)
# Row whose bits are the unit of the others
SENT = "SQuARM, no trigger"
NODES = 8

Numbers = dict[str, Any]
State = dict[str, torch.Tensor]


def prepared(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return a run's settings, with lengths in epochs and factors replaced.

    ``iterations`` are divided by the local steps. ``consensus-times`` multiplies the
    consensus step of ``auto``, to at most 1. ``warm-up`` is a fraction of the run, in
    whose second half the learning rate is divided by 5 twice.
    """
    given = dict(settings)
    total = int(given.pop("iterations"))
    if given.get("evaluate-on") == "validation":
        total = int(given.pop("search-iterations", total))
        del given["evaluate-on"]
        given["seed"] = 0
    given.pop("search-iterations", None)
    given["num-server-rounds"] = max(1, total // int(given.get("local-steps", 1)))
    if "warm-up" in given:
        # In the paper, the rate is divided at 200 and 300 of 400 epochs.
        warm_up = round(float(given.pop("warm-up")) * total)
        divided = f"{total // 2},{total * 3 // 4}"
        given["learning-rate-schedule"] = f"steps:{warm_up}:{divided}:5"
    if times := given.pop("consensus-times", 0):
        step = min(1.0, float(times) * Rounds(complete(resolve(given))).strategy.step)
        given["consensus-step"] = float(f"{step:.2g}")
    return given


def watch(settings: Mapping[str, Setting], place: Path) -> Numbers:
    """Run one algorithm inline and evaluate the mean of the nodes' models.

    Parameters
    ----------
    settings : mapping
        Settings as in `prepared`; ``looks`` and ``own`` are the number of evaluations
        and the interval of those that also test the nodes' own models; a run ends at
        the test error ``target``. A run of the search is only validated.
    place : Path
        Folder of the run.

    Returns
    -------
    dict
        ``gamma``, ``error``, ``validation`` and ``own`` (final errors) and ``curve``
        with a series for each of ``iteration``, ``bits`` (per node), ``error``,
        ``consensus`` and ``link`` (seconds on a link of 100 kbit/s, all nodes at once).
    """
    own_settings = dict(settings)
    looks, own = (int(own_settings.pop(name)) for name in ("looks", "own"))
    target = float(own_settings.pop("target", 0.0))
    searched = settings.get("evaluate-on") == "validation"
    given = prepared(own_settings)
    run_settings = complete(resolve(given))
    nodes = int(run_settings["num-clients"])
    task = build_task(run_settings, nodes)
    held_out = build_task({**run_settings, "evaluate-on": "validation"}, nodes)
    run = Rounds(run_settings)
    local = int(given.get("local-steps", 1))
    total = int(given["num-server-rounds"])
    at = {round(total / looks * part): 0 for part in EARLY}
    at |= {round(total * (i + 1) / looks): i + 1 for i in range(looks)}
    rows: list[dict[str, float]] = []
    bits, link = 0.0, 0.0
    for server_round in range(1, total + 1):
        sent = one_round(run)
        bits += sent["bits"] / nodes
        link += sent["bits"] / max(sent["sent"], 1) / LINK
        if server_round not in at:
            continue
        look, states = at[server_round], node_states(run.grid)
        mean = mean_state(states)
        row = {
            "iteration": server_round * local,
            "bits": bits,
            "validation": error(held_out, mean, range(nodes)),
            "consensus": consensus(states, mean),
            "link": link,
        }
        if not searched:
            row["error"] = error(task, mean, [0])
            if look and (look % own == 0 or look == looks):
                row["own"] = float(np.mean([error(task, s, [0]) for s in states]))
        rows.append(row)
        if row.get("error", 1.0) <= target:
            break
    final = {what: last(rows, what) for what in ("error", "validation", "own")}
    return {"gamma": run.strategy.step, "rows": rows, **final}


def last(rows: Sequence[Mapping[str, float]], what: str) -> float | None:
    """Return a quantity's mean over the last evaluations, or else its last value."""
    final = rows[-LAST:]
    if not all(what in row for row in final):
        final = rows[-1:]
    return float(np.mean([row[what] for row in final])) if what in final[0] else None


def one_round(run: Rounds) -> Numbers:
    """Run a round and return its metrics; fail if a node did not take part."""
    seen: Numbers = {}
    run.run(after_round=lambda _, __, metrics: seen.update(metrics))
    if seen["clients"] < len(run.grid.contexts):
        raise RuntimeError(f"round {run.done}: {run.strategy._run.round.rejections}")
    return seen


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


def first(run: Numbers, target: float, what: str) -> float:
    """Return a quantity when the error first reaches the target, or NaN."""
    found = (row[what] for row in run["rows"] if row["error"] <= target)
    return float(next(found, math.nan))


def to_target(config: Any, results: Any) -> Numbers:
    """Add the cost of a target and its ratio to that of `SENT`.

    The target of a cell is given, or the lowest error that all methods reach, rounded
    up to 0.1 %; methods with a trigger, and methods that send nothing, are excluded.
    ``sizes`` is the ratio of the bits per iteration.
    """
    found: Numbers = {}
    for cell in config.cells:
        by_row = {row: cells[cell] for row, cells in results.items() if cell in cells}
        base_row = config.cells[cell].get("base", SENT)
        least = [
            min(row["error"] for row in run["rows"])
            for name, runs in by_row.items()
            if "c =" not in name and runs[0]["rows"][-1]["bits"] > 0
            for run in runs
        ]
        lowest = math.ceil(round(1000 * max(least, default=1), 6)) / 1000
        found[cell] = target = config.common.get("target") or lowest
        for runs in by_row.values():
            for run, base in zip(runs, by_row.get(base_row, runs), strict=False):
                for what in ("iteration", "bits", "link"):
                    run[f"{what}-to-target"] = first(run, target, what)
                spent = first(base, target, "bits") or math.nan
                run["ratio"] = run["bits-to-target"] / spent
                ends = [r["rows"][-1] for r in (run, base)]
                one, other = (row["bits"] / row["iteration"] for row in ends)
                run["sizes"] = one / (other or math.nan)
                names = "bits", "error"
                run["curve"] = {"error": [[r[n] for r in run["rows"]] for n in names]}
    return {"target": found}


# Information that a relaying server obtains, and the consensus step


def relayed(settings: Mapping[str, Setting], place: Path) -> Numbers:
    """Return the cosine similarity of each node's model and the server's estimate.

    For each node, the server adds up the messages that it relays. D-PSGD's messages are
    the models. Those of the other algorithms are differences to a public estimate,
    which every neighbour, and the server, can maintain.
    """
    settings = resolve({**settings, "num-clients": NODES})
    run = Rounds(settings)
    strategy, grid = run.strategy, run.grid
    task = build_task(settings, NODES)
    scratch = task.scratch_model
    flat = FlatParameters(scratch)
    models = settings["algorithm"] == "dpsgd"

    def vector(state: State) -> Any:
        scratch.load_state_dict(state)
        return np.array(flat.vector.detach().numpy(), np.float64)

    start = vector(task.initial_state)
    compression = build(CompressionSettings, settings)
    compressor = Identity() if models else from_settings(compression, flat.sizes)
    estimates = [np.zeros_like(start) for _ in range(NODES)]
    rounds = int(settings["num-server-rounds"])
    for server_round in range(1, rounds + 1):
        messages = strategy.configure_train(
            server_round, run.arrays, ConfigRecord(), grid
        )
        replies = list(grid.send_and_receive(list(messages)))
        for reply in replies:
            data = reply.content.config_records["bytes"]["message"]
            node = reply.metadata.src_node_id - 1
            if data:
                found = compressor.decompress(data, len(start))
                estimates[node] = found if models else estimates[node] + found
        strategy.aggregate_train(server_round, replies)
    cosines = []
    for learned, state in zip(estimates, node_states(grid), strict=True):
        own = vector({name: state[name] for name in task.initial_state})
        scale = np.linalg.norm(own) * np.linalg.norm(learned)
        cosines.append(float(own @ learned / scale))
    return {"cosines": cosines, "cosine": fmean(cosines), "worst": min(cosines)}


def apart(settings: Mapping[str, Setting], place: Path) -> Numbers:
    """Return the consensus distance relative to that without communication.

    It is the worst of two graphs and two models. ``consensus-times`` multiplies the
    default step of the compressor for messages of the model's size, to at most 1.
    """
    own, worst = dict(settings), 0.0
    times, output = float(own.pop("consensus-times")), str(place)
    algorithm, rounds = own.pop("algorithm"), own["num-server-rounds"]
    own |= {"output": output, "evaluate-every": rounds, "evaluate-last": 1}
    name = cast(CompressorName, own["compressor"])
    k = float(own.get("compressor-k", 0.1))
    compression = CompressionSettings(compressor=name, compressor_k=k)
    for graph in ("ring", "complete"):
        for model in ("logistic", "mlp-2"):
            task = build_task(resolve({"model": model, "num-clients": 10}), 10)
            size = sum(p.numel() for p in task.initial_model().parameters())
            omega = from_settings(compression, (size,)).typical_omega(size)
            step = min(1.0, times * practical_step(omega))
            # With a negligible step, nodes train without communication.
            found = [
                simulate(
                    algorithm,
                    "inline",
                    **own | {"graph": graph, "model": model, "consensus-step": gamma},
                ).rows[-1]["consensus-distance"]
                for gamma in (step, 1e-12)
            ]
            worst = max(worst, found[0] / found[1])
    return {"distance": worst}
