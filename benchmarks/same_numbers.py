"""Short seeded runs of every algorithm and task, to verify that no result has changed.

``python -m benchmarks.same_numbers record DIR`` carries out the runs of
``same_numbers.toml`` one after the other in this process. It writes a file for each
run: its metrics without times, its clients' metrics, and hashes of the arrays in its
checkpoint and in its clients' files. ``compare OLD NEW`` lists the differences between
two such folders and exits with 1 if there are any. Record before a change that must not
affect results, and again after it, on the same machine. Both run in the root of a
checkout, and use only its command line and the files that it writes.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import runpy
import secrets
import shutil
import sys
import tempfile
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from safetensors.numpy import load_file

from benchmarks.small_data import write_all

Numbers = dict[str, Any]

GROUPS = Path(__file__).with_suffix(".toml")
TIMES = {"seconds"}
# Settings of all groups, which a group can override
SETTINGS = {
    "num-clients": 10,
    "num-server-rounds": 3,
    "fraction-train": 0.5,
    # Some tasks and algorithms have other defaults.
    "learning-rate": 0.01,
    "saddle-step": 0.001,
    # The reference. Clients trained together agree with it only up to rounding.
    "cohort": "off",
    "evaluate-every": 1,
    "batch-size": 20,
    "head-epochs": 2,
    "finetune-epochs": 2,
    "initial-nodes": 1,
    "rounds-per-stage": "1",
    "num-sources": 3,
}
STOP_AFTER = 2
# The name of a client's file contains the run's random token after two numbers.
TOKEN = re.compile(r"\d+-\d+-\w+-(?=\d+\.safetensors$)")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("directory", type=Path)
    recorder.set_defaults(run=lambda o: record(o.directory.resolve(), o.only))
    comparer = commands.add_parser("compare")
    comparer.add_argument("old", type=Path)
    comparer.add_argument("new", type=Path)
    comparer.add_argument("--all", action="store_true", help="print all differences")
    comparer.set_defaults(run=lambda o: compare(o.old, o.new, o.only, o.all))
    for command in (recorder, comparer):
        command.add_argument("--only", default="", help="runs whose name contains this")
    options: Any = parser.parse_args()
    return int(options.run(options))


def record(directory: Path, only: str) -> int:
    """Carry out the runs, and write ``GROUP/ALGORITHM.json`` for each."""
    directory.mkdir(parents=True, exist_ok=True)
    # The guest, a third-party algorithm and task, is in a separate package.
    guest = str(Path("tests/guest").resolve())
    sys.path.append(guest)
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), guest])
    seed_noise()
    # Hide matplotlib, because plots would take most of the time.
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    console, ends = Console(file=os.fdopen(os.dup(2), "w")), Counter[int]()
    with (
        tempfile.TemporaryDirectory() as scratch,
        (directory / "log.txt").open("w") as log,
    ):
        write_all(Path(scratch))
        planned = {n: own for n, own in plan(Path(scratch)).items() if only in n}
        # The log includes the output of libraries and of Ray's workers.
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        for name, settings in track(planned.items(), "runs", console=console):
            print(f"\n=== {name}", flush=True)
            found = numbers_of_run(name, settings, Path(scratch) / "run")
            ends[found["exit"]] += 1
            if found["exit"] not in (0, 2):
                console.print(f"{name} failed; see {log.name}")
            path = directory / f"{name}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(found, indent=0))
    failed = sum(ends.values()) - ends[0] - ends[2]
    console.print(f"{ends[0]} runs, {ends[2]} refused, {failed} failed")
    return min(1, failed)


def seed_noise() -> None:
    """Seed the noise of differential privacy, which is otherwise unpredictable."""
    default_rng: Any = np.random.default_rng
    np.random.default_rng = lambda seed=0: default_rng(seed)
    secrets.randbits = lambda bits: 0


def plan(data: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of each run by its name, ``GROUP/ALGORITHM``."""
    listed = io.StringIO()
    with contextlib.redirect_stdout(listed):
        simulate(["--list"])
    every = re.findall(r"^algorithm +(\S+)", listed.getvalue(), re.MULTILINE)
    runs = {}
    groups = tomllib.loads(GROUPS.read_text().replace("DATA", str(data)))
    for group, settings in groups.items():
        for name in settings.pop("algorithms"):
            for algorithm in every if name == "all" else [name]:
                runs[f"{group}/{algorithm}"] = {**SETTINGS, **settings}
    return runs


def numbers_of_run(name: str, settings: Mapping[str, Any], output: Path) -> Numbers:
    """Carry out a run; return its exit code and, if it succeeds, its numbers."""
    config = dict(settings)
    algorithm = name.rpartition("/")[2]
    backend = config.pop("backend", "inline")
    parts = [config]
    if config.pop("resumed", False):
        config |= {"checkpoint-every": 1}
        stopped = {**config, "num-server-rounds": STOP_AFTER}
        parts = [stopped, {**config, "resume": str(output)}]
    shutil.rmtree(output, ignore_errors=True)
    for part in parts:
        # JSON writes these values as TOML does.
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in part.items())
        words = [algorithm, "--backend", backend, "--output", str(output)]
        if code := simulate([*words, "--run-config", text]):
            return {"exit": code}
    (checkpoint,) = output.glob("*/checkpoint.safetensors")
    return {"exit": 0, **numbers_in(checkpoint.parent)}


def simulate(arguments: list[str]) -> int:
    """Run ``simulation.py`` in this process; return its exit code, -1 for a crash."""
    sys.argv = ["simulation.py", *arguments]
    try:
        runpy.run_path("simulation.py", run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except Exception:
        traceback.print_exc()
        return -1
    return 0


def numbers_in(directory: Path) -> Numbers:
    """Return the results of a run: ``numbers``, and hashes of ``arrays`` by file."""
    numbers: Numbers = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name in row.keys() - TIMES:
            numbers[f"round {row['round']}, {name}"] = row[name]
    clients = json.loads((directory / "clients.json").read_text())
    for client, metrics in clients.items():
        for name, value in metrics.items():
            numbers[f"client {client}, {name}"] = value
    arrays = {
        TOKEN.sub("", str(path.relative_to(directory))): {
            name: digest(array) for name, array in load_file(path).items()
        }
        for path in sorted(directory.rglob("*.safetensors"))
    }
    return {"numbers": dict(sorted(numbers.items())), "arrays": arrays}


def digest(array: np.ndarray) -> str:
    """Return a hash of an array's dtype, shape and bytes."""
    about = f"{array.dtype.str}/{array.shape}/".encode()
    return hashlib.sha256(about + array.tobytes()).hexdigest()[:16]


def compare(old: Path, new: Path, only: str, every: bool) -> int:
    """Print the differences, by default one line for each run that differs."""
    names = [str(p.relative_to(old).with_suffix("")) for p in old.glob("*/*.json")]
    names = sorted(name for name in names if only in name)
    count = 0
    for name in names:
        path = new / f"{name}.json"
        if not path.is_file():
            lines = ["it was not recorded"]
        else:
            before = json.loads((old / f"{name}.json").read_text())
            lines = list(differences(before, json.loads(path.read_text())))
        count += bool(lines)
        rest = f" (and {len(lines) - 1} more)" if len(lines) > 1 and not every else ""
        for line in lines if every else lines[:1]:
            print(f"{name}: {line}{rest}")
    print(f"{len(names)} runs, {count} differ")
    return 1 if count or not names else 0


def differences(old: Numbers, new: Numbers) -> Iterator[str]:
    """Yield a line for each difference; additions in the new run are ignored."""
    if old["exit"] != new["exit"]:
        yield f"exit code: was {old['exit']}, is {new['exit']}"
        return
    after = new.get("numbers", {})
    for name, value in old.get("numbers", {}).items():
        # NaN differs from itself, so text is compared.
        if repr(value) != repr(after.get(name)):
            yield f"{name}: was {value!r}, is {after.get(name)!r}"
    for file, arrays in old.get("arrays", {}).items():
        yield from array_differences(file, arrays, new["arrays"].get(file, {}))


def array_differences(
    file: str, old: Mapping[str, str], new: Mapping[str, str]
) -> Iterator[str]:
    """Yield a line for each array that differs or is missing, except renamed ones."""
    renamed = Counter(new[name] for name in new.keys() - old.keys())
    for name, value in old.items():
        if name in new:
            if new[name] != value:
                yield f"{file}, array {name} differs"
        elif renamed[value]:
            renamed[value] -= 1
        else:
            yield f"{file}, array {name} is missing"


if __name__ == "__main__":
    sys.exit(main())
