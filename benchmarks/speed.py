"""Speed of inline and Ray, relative to plain PyTorch on the same minibatches.

The bare loop is plain PyTorch without any framework. For each round and each sampled
client, it loads the representation, trains the head, trains the representation and adds
it up. Its minibatches are prepared before its clock starts. The page reports the
largest difference between inline's representation and the bare loop's after one round.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import markdown, write
from flwr_frl import simulate
from flwr_frl.clients import FedRepClient
from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import Setting, Settings, build, resolve
from flwr_frl.strategies import FedRep, build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.rounds import run_rounds
from flwr_frl.task.models import SplitModel
from flwr_frl.task.tasks import build_task
from flwr_frl.task.training.local_training import train
from flwr_frl.task.training.sgd import SGD

Batches = list[tuple[Tensor, Tensor]]


def settings_for(arguments: argparse.Namespace) -> dict[str, Setting]:
    """Return FedRep's CIFAR-10 settings (100 clients, 5 classes, 10 % per round)."""
    return {
        "task": "image-folder",
        "data-dir": arguments.data_dir,
        "num-clients": 100,
        "classes-per-client": 5,
        "fraction-train": 0.1,
        "num-server-rounds": arguments.rounds,
        "head-epochs": 1,
        "evaluate-every": 0,
        "evaluate-last": 0,
    }


class Recorder(FedRepClient):
    """Records which client trains on which minibatches, for the bare loop."""

    seen: list[tuple[int, list[Batches]]] = []  # noqa: RUF012

    def fit(self, parameters: Any, config: Any) -> Any:
        """Draw the minibatches that `FedRepClient.fit` would draw; train nothing."""
        examples = self.task.train_examples(self._index)
        epochs = [list(examples.batches(10, shuffle=True)) for _ in range(2)]
        Recorder.seen.append((self._index, epochs))
        self._receive(parameters, config)
        return self._send(0.0)


class Recorded(FedRep, client=f"{__name__}:Recorder"):
    """FedRep whose clients only record their minibatches."""


def record(settings: Settings) -> list[list[tuple[int, list[Batches]]]]:
    """Return client and minibatches of every fit, by round."""
    Recorder.seen = []
    inline({**settings, "algorithm": f"{__name__}:Recorded"})
    per_round = int(int(settings["num-clients"]) * float(settings["fraction-train"]))
    seen = Recorder.seen
    return [seen[i : i + per_round] for i in range(0, len(seen), per_round)]


def inline(settings: Settings) -> tuple[float, dict[str, Tensor]]:
    """Return seconds of the rounds and the final representation, in one process."""
    grid = InlineGrid(make_app(dict(settings)), int(settings["num-clients"]))
    strategy = build_strategy(settings)
    arrays = strategy.initialize(grid)
    began = time.perf_counter()
    rounds = range(1, int(settings["num-server-rounds"]) + 1)
    arrays = run_rounds(strategy, grid, arrays, rounds, evaluated=lambda _: False)
    seconds = time.perf_counter() - began
    return seconds, {n: torch.from_numpy(a.numpy()) for n, a in arrays.items()}


def bare(
    model: SplitModel, rounds: list[list[tuple[int, list[Batches]]]]
) -> tuple[float, dict[str, Tensor]]:
    """Return seconds and the final representation of the plain PyTorch loop."""

    def sgd(module: torch.nn.Module) -> torch.optim.SGD:
        named = list(module.named_parameters())
        weights = [p for n, p in named if not n.endswith("bias")]
        biases = [p for n, p in named if n.endswith("bias")]
        groups = [{"params": weights, "weight_decay": 1e-4}, {"params": biases}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.5, fused=True)

    def epoch(part: torch.nn.Module, other: torch.nn.Module, batches: Batches) -> None:
        other.requires_grad_(False)
        part.requires_grad_(True)
        optimizer = sgd(part)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()

    began = time.perf_counter()
    state = {n: v.clone() for n, v in model.representation.state_dict().items()}
    initial_head = {n: v.clone() for n, v in model.head.state_dict().items()}
    heads: dict[int, dict[str, Tensor]] = {}
    for sampled in rounds:
        total = {n: torch.zeros_like(v) for n, v in state.items()}
        for client, (head_batches, representation_batches) in sampled:
            model.representation.load_state_dict(state)
            model.head.load_state_dict(heads.get(client, initial_head))
            epoch(model.head, model.representation, head_batches)
            epoch(model.representation, model.head, representation_batches)
            heads[client] = {n: v.clone() for n, v in model.head.state_dict().items()}
            for name, value in model.representation.state_dict().items():
                total[name] += value
        state = {n: v / len(sampled) for n, v in total.items()}
    return time.perf_counter() - began, state


def ray(given: Settings) -> tuple[float, float]:
    """Return the seconds of the rounds on Ray, and of its start and end."""
    with tempfile.TemporaryDirectory() as output:
        began = time.perf_counter()
        rows = simulate("fedrep", "ray", **{**given, "output": output}).rows
        total = time.perf_counter() - began
    seconds = [row["seconds"] for row in rows]
    # In the first round, the workers still import torch, so the mean of the other
    # rounds replaces its time.
    rounds = (seconds[-1] - seconds[0]) * len(seconds) / (len(seconds) - 1)
    return rounds, total - rounds


def head_epochs(settings: Settings, epochs: int) -> dict[str, float]:
    """Return seconds of head epochs with features computed in each epoch or once."""
    task = build_task(settings, int(settings["num-clients"]))
    model = task.initial_model()
    sgd = build(SGD, settings)
    augmented = task.train_examples(0)

    def seconds(action: Callable[[], object]) -> float:
        action()
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    plain = augmented.without_augmentation()
    each = seconds(lambda: train(model, "head", augmented, task.loss, epochs, sgd))
    once = seconds(lambda: train(model, "head", plain, task.loss, epochs, sgd))
    representation = seconds(
        lambda: train(model, "representation", augmented, task.loss, 1, sgd)
    )
    return {"each": each, "once": once, "representation": representation}


def main() -> None:
    """Measure and write ``results/speed``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="CIFAR-10 as image folder")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    given = settings_for(arguments)
    settings = resolve({**given, "algorithm": "fedrep"})
    task = build_task(settings, 100)
    rounds = record(settings)
    bare(task.initial_model(), rounds[:1])
    # The two alternate, so that a drift of the machine's speed affects both equally.
    times: dict[str, list[float]] = {"bare": [], "inline": []}
    for _ in range(3):
        times["bare"].append(bare(task.initial_model(), rounds)[0])
        times["inline"].append(inline(settings)[0])
    # Rounding differences grow from round to round, so the first one is compared.
    _, expected = bare(task.initial_model(), rounds[:1])
    _, found = inline({**settings, "num-server-rounds": 1})
    difference = max(
        (found[f"representation.{n}"] - v).abs().max().item()
        for n, v in expected.items()
    )
    ray_seconds, ray_start = ray(given)
    median = {name: sorted(values)[1] for name, values in times.items()}
    steps = 10 * 2 * 50 * arguments.rounds
    base = median["bare"]
    rows = [
        ("plain PyTorch loop, 1 thread", f"{base:.2f}", "1.00", ""),
        (
            "inline",
            f"{median['inline']:.2f}",
            f"{median['inline'] / base:.2f}",
            f"largest difference from the plain loop after a round {difference:.1e}",
        ),
        (
            "Ray, 2 actors",
            f"{ray_seconds:.2f}",
            f"{ray_seconds / base:.2f}",
            f"start and end {ray_start:.1f} s in addition",
        ),
    ]
    head = head_epochs(settings, 10)
    rounds_of_head = [head[n] + head["representation"] for n in ("each", "once")]
    body = (
        f"FedRep on CIFAR-10, 100 clients, 10 a round, {arguments.rounds} rounds, one "
        f"head and one representation epoch: {steps} steps of 10 images. Median of 3 "
        "alternating runs (Ray: one run).\n\n"
        + markdown(("", "seconds", "ratio", ""), rows)
        + "\nTen head epochs of one client (500 images), and a round that also has one "
        "representation epoch:\n\n"
        + markdown(
            ("", "head epochs (s)", "round (s)"),
            [
                (
                    "features computed in each epoch (default on augmented data)",
                    f"{head['each']:.3f}",
                    f"{rounds_of_head[0]:.3f}",
                ),
                (
                    "features computed once (`augment-head=false`, or no augmentation)",
                    f"{head['once']:.3f}",
                    f"{rounds_of_head[1]:.3f}",
                ),
                (
                    "gain",
                    f"{head['each'] / head['once']:.1f}",
                    f"{rounds_of_head[0] / rounds_of_head[1]:.1f}",
                ),
            ],
        )
    )
    write(
        "speed",
        "Speed",
        body,
        {
            "times": times,
            "ray": ray_seconds,
            "ray-start": ray_start,
            "difference": difference,
            "head-epochs": head,
        },
    )


if __name__ == "__main__":
    main()
