"""Short seeded runs of every algorithm and task, to show that no number has moved.

``python -m benchmarks.same_numbers record DIR`` runs them one after the other, inline;
``python -m benchmarks.same_numbers compare OLD NEW`` tells what differs between two
such folders, times apart, and ends with 1 if anything does. Record before a change of
the frame, and again after it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

# What may differ between two runs of the same code.
TIMES = ("seconds",)
IMAGES = (
    "fedavg fedavg-ft fedper fedrep flute flute-star lg-fedavg local srpfl lg-srpfl "
    "flanp flanp-ft srpfl-flute dpsgd choco-sgd squarm-sgd representation-transfer"
)
SMALL = 'initial-nodes=1 rounds-per-stage="2" evaluate-every=1 num-sources=3'
ARRAYS = "--task arrays --data-dir {data} --classes-per-client 2"
# Name of a run: what `simulation.py` is given.
RUNS = {
    "digits": f"{IMAGES} --run-config {SMALL}",
    "digits-baselines": "fedprox scaffold scaffold-ft ditto apfl pfedme fedbabu "
    "fedproto fedala feddbe per-fedavg hf-maml l2gd fed-mtl fedrod fedcp --run-config "
    "evaluate-every=1 fraction-train=0.5",
    "digits-options": "fedrep flute fedavg --run-config weighting=examples "
    "transport=float16 partition=dirichlet fraction-train=0.5 evaluate-every=2",
    "digits-log-normal": "fedper fedavg-ft lg-srpfl --run-config partition=log-normal "
    "speed-model=dynamic communication-time=1.0 initial-nodes=1 evaluate-every=1 "
    'rounds-per-stage="1"',
    "digits-theory": "srpfl --run-config rounds-per-stage=theory initial-nodes=1 "
    "speed-model=groups redraw-speeds=true evaluate-every=1 fraction-train=1.0",
    "digits-resnet": "fedrep fedper fedbn --rounds 2 --run-config model=resnet20 "
    "bfloat16=true evaluate-every=1 head-epochs=2",
    "digits-logistic": "dpsgd choco-sgd squarm-sgd --run-config model=logistic "
    'partition=iid evaluate-every=1 consensus-step=0.2 compressor-k=10 trigger="1" '
    "learning-rate-schedule=inverse:10",
    "digits-compressors": "squarm-sgd --run-config compressor=qsgd per-tensor=true "
    "compressor-levels=1000 graph=complete evaluate-every=1",
    "digits-orders": "flute-star --run-config head-epochs-order=after head-epochs=2 "
    "evaluate-every=1",
    "arrays": f"fedavg fedrep flute dpsgd {ARRAYS} --run-config model=digits-cnn "
    "evaluate-every=1 head-epochs=2",
    "arrays-plain": f"fedrep {ARRAYS} --run-config augment-head=false "
    "model=digits-cnn evaluate-every=1 test-partition=all",
    "arrays-dropout": "fedrep --task arrays --data-dir {data} --rounds 1 "
    "--run-config model=cifar100-cnn head-epochs=1 evaluate-every=1",
    "linear": "fedrep flute srpfl srpfl-flute fedavg fedper lg-fedavg local fedavg-ft "
    f"dpsgd squarm-sgd --task linear --run-config {SMALL} head-layers=1",
    "linear-random": "fedrep srpfl --task linear --run-config initialization=random "
    "head-steps=3 fresh-samples=false evaluate-every=1 initial-nodes=1 "
    'rounds-per-stage="10"',
    "linear-gaussian": "flute --task linear --run-config spectrum=gaussian "
    "evaluate-every=1 fraction-train=1.0",
    "transfer": "representation-transfer fedavg fedrep local dpsgd --task transfer "
    "--run-config num-sources=3 evaluate-every=1 dimension=20",
    "transfer-descent": "representation-transfer --task transfer --run-config "
    "num-sources=3 descent-steps=20 dimension=20",
    "qcqp": "multi-task --task qcqp --run-config evaluate-every=1 compressor-k=3",
    "qcqp-bandit": "multi-task --task qcqp --run-config bandit-radius=1e-4 "
    "evaluate-every=1 compressor=identity",
    "logistic": "multi-task --task multi-task-logistic --run-config "
    "evaluate-every=1 compressor=top-k compressor-k=3",
    "ray": "fedrep --backend ray --run-config evaluate-every=1",
}
# Algorithms that are stopped after two rounds and go on from their checkpoints.
RESUMED = {
    "resumed": "fedrep flute srpfl local squarm-sgd lg-fedavg --run-config "
    'checkpoint-every=1 evaluate-every=1 initial-nodes=1 rounds-per-stage="1"',
    "resumed-baselines": "scaffold ditto l2gd fedproto feddbe --run-config "
    "checkpoint-every=1 evaluate-every=1 fraction-train=0.5",
    "resumed-transfer": "representation-transfer --task transfer --run-config "
    "checkpoint-every=1 num-sources=3 dimension=20",
    "resumed-qcqp": "multi-task --task qcqp --run-config checkpoint-every=1 "
    "compressor-k=3",
}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("directory", type=Path)
    recorder.add_argument("--only", default="", help="names that contain this")
    recorder.set_defaults(
        run=lambda options: record(options.directory.resolve(), options.only)
    )
    comparer = commands.add_parser("compare")
    comparer.add_argument("old", type=Path)
    comparer.add_argument("new", type=Path)
    comparer.set_defaults(run=lambda options: compare(options.old, options.new))
    options: Any = parser.parse_args()
    return int(options.run(options))


def record(directory: Path, only: str) -> int:
    """Make all runs, each in a process of its own."""
    data = directory / "data"
    write_arrays(data)
    failed = 0
    for name in track([n for n in (*RUNS, *RESUMED) if only in n], "runs"):
        words = ["--rounds", "4", "--output", str(directory / name)]
        words += [w.format(data=data) for w in {**RUNS, **RESUMED}[name].split()]
        if name in RESUMED:
            failed += simulate([*words, "num-server-rounds=2"], name)
            words += [f'resume="{directory / name}"']
        failed += simulate(words, name)
    return failed


def simulate(words: list[str], name: str) -> int:
    """Run `simulation.py`; later words win, as its own do."""
    command, config = words, []
    if "--run-config" in words:
        at = words.index("--run-config")
        command, config = words[:at], words[at + 1 :]
    values = dict(word.split("=", 1) for word in config)
    rounds = values.pop("num-server-rounds", None)
    if rounds:
        command = [*command, "--rounds", rounds]
    for flag, value in (("--backend", "inline"), ("--clients", "10")):
        if flag not in command:
            command = [*command, flag, value]
    # One by one is the reference; together the numbers agree to rounding.
    values.setdefault("cohort", "off")
    line = " ".join(f"{n}={quoted(v)}" for n, v in values.items())
    full = [sys.executable, "simulation.py", *command, "--run-config", line]
    result = subprocess.run(full, capture_output=True, text=True, check=False)
    if result.returncode:
        print(f"{name}: {result.stderr.strip() or result.stdout.strip()}")
    return min(1, result.returncode)


def quoted(value: str) -> str:
    """Return a value as TOML spells it."""
    if value.startswith('"') or value in ("true", "false"):
        return value
    try:
        float(value)
    except ValueError:
        return f'"{value}"'
    return value


def write_arrays(directory: Path) -> None:
    """Write colour images with something to learn, as the task ``arrays`` reads it."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 200, (4, 16, 16, 3))
    for part, n in (("train", 240), ("test", 80)):
        labels = np.arange(n) % 4
        images = patterns[labels] + rng.integers(0, 56, (n, 16, 16, 3))
        np.savez(directory / f"{part}.npz", images=images.astype("u1"), labels=labels)


def results(directory: Path) -> dict[str, Any]:
    """Return everything that the runs of a folder have written, without times."""
    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*/*/metrics.jsonl")):
        run = str(path.parent.relative_to(directory))
        for line in path.read_text().splitlines():
            row = json.loads(line)
            for name in row.keys() - TIMES:
                found[f"{run}, round {row['round']}, {name}"] = row[name]
        clients = json.loads((path.parent / "clients.json").read_text())
        for client, metrics in clients.items():
            for name, value in metrics.items():
                found[f"{run}, client {client}, {name}"] = value
    return found


def compare(old: Path, new: Path) -> int:
    """Print what differs; what the old runs did not measure cannot."""
    before, after = results(old), results(new)
    # NaN differs from itself, so text is compared.
    differ = [n for n in before if repr(before[n]) != repr(after.get(n))]
    for name in differ:
        print(f"{name}: was {before[name]!r}, is {after.get(name)!r}")
    new_names = len(after.keys() - before.keys())
    print(f"{len(before)} numbers, {len(differ)} differ; {new_names} are new")
    return 1 if differ or not before else 0


if __name__ == "__main__":
    sys.exit(main())
