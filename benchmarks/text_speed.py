"""CPU time of `text-folder` relative to plain PyTorch, and of a first run on roles.

The data are the twenty longest files of a folder with one text for each role. The plain
loop trains the same model on the same minibatches, with torch's fused SGD.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.common import RESULTS, markdown, write
from benchmarks.paired_speed import cpu_time
from benchmarks.speed import inline
from flwr_frl.common.settings import Setting, resolve
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.tasks import build_task
from flwr_frl.task.training import SGD, train

CLIENTS, ROUNDS = 20, 20
PAIRS = 5
# The width of docs/your-task.md, and the default
WIDTHS = 64, 256
RATE = 0.8
ALGORITHMS = "fedavg", "fedrep"
# Number of sliding windows that are measured; all of a role's would take too long.
SLIDING = 500


def plain(model: SplitModel, examples: ExampleSet) -> None:
    """Train for one epoch in a plain PyTorch loop."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if ".bias" not in n], "weight_decay": 1e-4},
        {"params": [p for n, p in named if ".bias" in n]},
    ]
    optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.5, fused=True)
    for rows in torch.randperm(len(examples)).split(10):
        optimizer.zero_grad()
        outputs = model(examples.inputs[rows])
        loss = nn.functional.cross_entropy(outputs, examples.targets[rows])
        loss.backward()
        optimizer.step()


def compare(settings: dict[str, Setting]) -> dict[str, float]:
    """Return the seconds of an epoch of a role's examples, by median."""
    task = build_task(resolve(settings), CLIENTS)
    examples = task.train_examples(0)
    if settings["text-windows"] == "sliding":
        examples = ExampleSet(examples.inputs[:SLIDING], examples.targets[:SLIDING])
    sgd = SGD(learning_rate=RATE)
    times: list[tuple[float, float]] = []
    # The first pair, which warms up, is not counted. The two alternate, so that a drift
    # of the machine's speed affects both equally.
    for _ in range(1 + PAIRS):
        models = task.initial_model(), task.initial_model()
        torch.manual_seed(0)
        began = time.process_time()
        train(models[0], "all", examples, task.loss, 1, sgd)
        middle = time.process_time()
        torch.manual_seed(0)
        again = time.process_time()
        plain(models[1], examples)
        times.append((middle - began, time.process_time() - again))
    ours, bare = (statistics.median(column) for column in zip(*times[1:], strict=True))
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    measured = {"ours": ours, "plain": bare, "ratio": ours / bare}
    return {"examples": len(examples), **measured, "difference": difference}


def main() -> None:
    """Measure and write ``results/text_speed``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="<role>.txt files")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    files = sorted(arguments.data_dir.glob("*.txt"), key=lambda f: -f.stat().st_size)
    files = files[:CLIENTS]
    size = sum(len(file.read_text(encoding="utf-8")) for file in files)
    with tempfile.TemporaryDirectory() as roles:
        for file in files:
            (Path(roles) / file.name).symlink_to(file.resolve())
        settings: dict[str, Setting] = {"task": "text-folder", "data-dir": roles}
        settings |= {"num-clients": CLIENTS, "fraction-train": 0.25}
        settings |= {"num-server-rounds": 1, "learning-rate": RATE}
        epochs = {}
        given: dict[str, Setting]
        for cut in ("disjoint", "sliding"):
            given = {**settings, "lstm-width": WIDTHS[0], "text-windows": cut}
            epochs[cut] = compare(given)
        rounds: dict[str, dict[str, float]] = {a: {} for a in ALGORITHMS}
        for algorithm in ALGORITHMS:
            for width in WIDTHS:
                given = {**settings, "algorithm": algorithm, "lstm-width": width}
                began = time.process_time()
                inline(resolve(given))
                rounds[algorithm][str(width)] = time.process_time() - began
        command = [
            *[*ALGORITHMS, "--task", "text-folder", "--data-dir", roles],
            *["--clients", str(CLIENTS), "--rounds", str(ROUNDS), "--fraction", "0.25"],
            *["--run-config", f"lstm-width={WIDTHS[0]} learning-rate={RATE}"],
        ]
        first = cpu_time(RESULTS.parents[1], command)
    windows = [
        [
            *(name, e["examples"], f"{e['plain']:.3f}", f"{e['ours']:.3f}"),
            *(f"{e['ratio']:.2f}", f"{e['difference']:.1e}"),
        ]
        for name, e in epochs.items()
    ]
    widths = [
        [f"`{name}`", *(f"{s:.1f}" for s in r.values()), f"{r['256'] / r['64']:.1f}"]
        for name, r in rounds.items()
    ]
    columns = ("`text-windows`", "windows", "plain PyTorch loop", "flwr-frl", "ratio")
    body = (
        f"CPU time in s, one thread. The {CLIENTS} longest roles of the folder, "
        f"{size:,} characters. An epoch of one role, LSTM of width {WIDTHS[0]}, "
        f"minibatches of 10, medians of {PAIRS} alternating pairs:\n\n"
        + markdown((*columns, "largest difference between the models"), windows)
        + f"\nThe sliding windows are the first {SLIDING} of the role.\n\n"
        "One round of 5 clients, without evaluation:\n\n"
        + markdown(("", *(f"width {w}" for w in WIDTHS), "ratio"), widths)
        + f"\nThe command of docs/your-task.md, `fedavg` and `fedrep` with {ROUNDS} "
        f"rounds each and width {WIDTHS[0]}, in one process, with Python's start and "
        f"all evaluations: {first:.0f} s.\n"
    )
    data = {"epochs": epochs, "rounds": rounds, "first-run": first, "characters": size}
    write("text_speed", "Speed on texts", body, data)


if __name__ == "__main__":
    main()
