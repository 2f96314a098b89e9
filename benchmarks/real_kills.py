"""Kill real processes: SuperLink, ServerApp, SuperNodes and their SuperExecs.

``python -m benchmarks.real_kills --kills N --seed S`` starts a SuperLink and three
devices with keys on loopback. During each run, processes are killed a few times with
``kill -9``; the seed chooses the processes and the moments. Killed processes are
restarted as their unit or the watchdog would do, and the run is continued with
``resume``. Killing a device also ends the run, so that its round does not close without
that device. Each run must end with the numbers, the model and the heads of an
undisturbed simulation, bit for bit.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.common import markdown, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from devices import write_folders  # noqa: E402
from federation import Federation, kill_9, read_lines, wait_until  # noqa: E402

DEVICES = ("000000", "000001", "000002")
# Algorithms with heads on the devices, heads on the server, personal models, and
# control variates
ALGORITHMS = ("fedrep", "flute", "ditto", "scaffold")
KINDS = ("SuperLink", "ServerApp", "SuperNode", "SuperExec")
CHANCES = (0.3, 0.3, 0.2, 0.2)
ROUNDS = 6
# A kill happens after at most this many further rounds and this many seconds.
MORE_ROUNDS, LATER = 2, 8.0
# Algorithms that keep state on the devices
KEEPING = ("fedrep", "ditto", "scaffold")
# Seconds between attempts to start a device; its service unit waits longer.
RESTART = 5.0
# Seconds after which a run is considered stuck
LIMIT = 900.0
CONFIG = {
    "task": "image-folder",
    "model": "digits-cnn",
    "num-clients": len(DEVICES),
    "min-available-nodes": len(DEVICES),
    "fraction-train": 1.0,
    "num-server-rounds": ROUNDS,
    "evaluate-every": 2,
    "evaluate-last": 1,
    "checkpoint-every": 1,
    "head-epochs": 1,
    "batch-size": 6,
    "learning-rate": 0.05,
    "round-timeout": 600.0,
    "augment": False,
    "cohort": "off",
}


def spelled(config: dict[str, Any]) -> str:
    """Return settings in the format of ``--run-config``."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())


def arrays_in(path: Path) -> dict[str, bytes]:
    """Return the arrays of a file as bytes, or none if there is no file."""
    if not path.is_file():
        return {}
    return {name: value.tobytes() for name, value in load_file(path).items()}


class Outcome:
    """The outcome of a run: its numbers, its model and the devices' state."""

    def __init__(self, output: Path, algorithm: str, states: Path) -> None:
        lines = read_lines(output / algorithm / "metrics.jsonl")
        self.rows = [{n: v for n, v in r.items() if n != "seconds"} for r in lines]
        self.model = arrays_in(output / algorithm / "checkpoint.safetensors")
        self.kept = {}
        for name in DEVICES:
            newest = sorted((states / name).glob("*.safetensors"))
            self.kept[name] = arrays_in(newest[-1]) if newest else {}

    def differences(self, other: "Outcome") -> list[str]:
        """Return the parts in which two runs differ."""
        found = [
            name for name in ("rows", "model") if vars(self)[name] != vars(other)[name]
        ]
        lost = [name for name in DEVICES if self.kept[name] != other.kept[name]]
        return [*found, *(f"state of {name}" for name in lost)]


class Trials:
    """Consecutive runs with kills, on one SuperLink."""

    def __init__(self, federation: Federation, seed: int) -> None:
        self.federation = federation
        self.home = federation.home
        self.rng = np.random.default_rng([seed, 4])
        # Kind of process and number of reported rounds of each kill, in order
        self.kills: list[tuple[str, int]] = []
        self.fell: list[str] = []
        # How often a SuperNode lost the SuperLink, as the watchdog detects it
        self.watched = 0
        self.undisturbed: dict[str, Outcome] = {}
        self.starts = 0
        self.began = time.monotonic()

    def run(self, kills: int) -> None:
        """Kill processes `kills` times, a few times per run, and compare outcomes."""
        write_folders(self.home / "data", len(DEVICES))
        self.start_superlink()
        self.federation.register()
        for name in DEVICES:
            self.start_device(name)
        while len(self.kills) < kills:
            algorithm = ALGORITHMS[self.starts % len(ALGORITHMS)]
            output = self.home / f"run-{self.starts}"
            self.starts += 1
            for _ in range(min(kills - len(self.kills), int(self.rng.integers(3, 6)))):
                with self.started(algorithm, output) as process:
                    self.wait(process, output / algorithm)
                    self.kill(output / algorithm)
            with self.started(algorithm, output) as process:
                try:
                    process.wait(LIMIT)
                except subprocess.TimeoutExpired:
                    self.fell.append(f"{algorithm}, {output.name}: it does not end")
                    continue
            outcome = Outcome(output, algorithm, self.home / "state" / output.name)
            for what in outcome.differences(self.alone(algorithm)):
                self.fell.append(f"{algorithm}, {output.name}: {what}")
            print(f"{len(self.kills)} kills, {len(self.fell)} fell", flush=True)

    def wait(self, process: subprocess.Popen[bytes], results: Path) -> None:
        """Wait for a moment chosen by the seed; the run may end by itself before."""
        path = results / "metrics.jsonl"
        rounds = len(read_lines(path)) + self.rng.integers(0, MORE_ROUNDS + 1)
        deadline = time.monotonic() + LIMIT
        while process.poll() is None and time.monotonic() < deadline:
            if len(read_lines(path)) >= rounds and not self.is_starting(path):
                break
            time.sleep(0.1)
        time.sleep(self.rng.uniform(0, LATER))

    def is_starting(self, path: Path) -> bool:
        """Return whether a run has not started anything that could be lost."""
        return not path.exists() and not self.federation.started_by(
            "superlink", "flwr-serverapp"
        )

    def alone(self, algorithm: str) -> Outcome:
        """Return the outcome of an undisturbed run in one process."""
        if algorithm not in self.undisturbed:
            output = self.home / "alone"
            command = [sys.executable, str(ROOT / "simulation.py"), algorithm]
            command += ["--backend", "inline", "--data-dir", str(self.home / "data")]
            command += ["--output", str(output), "--run-config", spelled(CONFIG)]
            subprocess.run(command, check=True, capture_output=True)
            states = output / algorithm / "clients"
            outcome = Outcome(output, algorithm, states)
            # Otherwise, there would be nothing to compare.
            assert len(outcome.rows) == ROUNDS
            assert outcome.model
            assert all(outcome.kept.values()) is (algorithm in KEEPING)
            self.undisturbed[algorithm] = outcome
        return self.undisturbed[algorithm]

    @contextlib.contextmanager
    def started(
        self, algorithm: str, output: Path
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start or resume a run; on exit, all of its processes are killed."""
        config = {**CONFIG, "algorithm": algorithm, "output": str(output)}
        # Name of the run's directory on the devices
        config["experiment"] = output.name
        if (output / algorithm / "checkpoint.safetensors").exists():
            config["resume"] = str(output)
        options = ("test", "--stream", "--run-config", spelled(config))
        yield self.federation.start("flwr-run", "flwr", "run", str(ROOT), *options)
        self.federation.kill("flwr-run")
        for pid in self.federation.started_by("superlink", "flwr-serverapp"):
            kill_9(pid)

    # Kills and restarts

    def kill(self, results: Path) -> None:
        """Kill a process chosen by the seed, and restart what has died."""
        kind = str(self.rng.choice(KINDS, p=CHANCES))
        device = str(self.rng.choice(DEVICES))
        apps = self.federation.started_by("superlink", "flwr-serverapp")
        if kind == "ServerApp" and not apps:
            kind = "SuperLink"
        self.kills.append((kind, len(read_lines(results / "metrics.jsonl"))))
        if kind == "SuperExec":
            for pid in self.federation.started_by(
                device, "flwr_frl.clients.device.warm"
            ):
                kill_9(pid)
        elif kind == "SuperNode":
            self.federation.kill(device)
        elif kind == "SuperLink":
            self.federation.kill("superlink")
        # A round must not close without the device that was killed.
        for pid in apps:
            kill_9(pid)
        if kind == "SuperLink":
            self.start_superlink()
        elif kind != "ServerApp":
            self.start_device(device)
        for name in DEVICES:
            if self.said(name, "Server error '", "Client error '", "Exception in thr"):
                self.watched += 1
                self.start_device(name)

    def start_superlink(self) -> None:
        """Start the SuperLink, always with the same database."""
        self.federation.start_superlink("--database", str(self.home / "superlink.db"))

    def start_device(self, name: str) -> None:
        """Start a device, repeatedly until the SuperLink accepts it.

        The SuperLink refuses the device until its previous session has ended.
        """
        deadline = time.monotonic() + 300
        while True:
            if name in self.federation.processes:
                self.federation.kill(name)
            (self.home / f"{name}.log").unlink(missing_ok=True)
            folder, state = self.home / "data" / name, self.home / "state"
            self.federation.start_supernode(
                name, f'client-name="{name}" data-dir="{folder}" state-dir="{state}"'
            )
            process = self.federation.processes[name]
            wait_until(
                lambda process=process: (
                    self.said(name, "SuperNode ID") or process.poll() is not None
                ),
                60,
                f"{name} to start",
            )
            if self.said(name, "SuperNode ID"):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} is not let in")
            time.sleep(RESTART)

    def said(self, name: str, *words: str) -> bool:
        """Return whether a device's log contains one of some texts."""
        log = (self.home / f"{name}.log").read_text(errors="replace")
        return any(word in log for word in words)


def report(trials: Trials) -> None:
    """Write ``results/real_kills``."""
    minutes = (time.monotonic() - trials.began) / 60
    when = {"before the first": (0,), "in between": range(1, ROUNDS)}
    rows = []
    for kind in KINDS:
        rounds = [n for who, n in trials.kills if who == kind]
        counts = [sum(n in some for n in rounds) for some in when.values()]
        rows.append([kind, len(rounds), *counts, len(rounds) - sum(counts)])
    fallen = {line.partition(":")[0] for line in trials.fell}
    body = (
        f"{len(trials.kills)} times `kill -9` in {trials.starts} runs of "
        f"{', '.join(ALGORITHMS)} over {ROUNDS} rounds. The federation has a "
        f"SuperLink with TLS and a database, and {len(DEVICES)} SuperNodes with "
        "keys, whose SuperExec forks. After each kill the run was ended, the killed "
        "processes were restarted, and the run was resumed (or started, if it had no "
        "checkpoint). A SuperLink is killed with its ServerApp and its SuperExec; a "
        "SuperNode with its SuperExec and ClientApp. A SuperExec is killed with its "
        "ClientApp only, and its SuperNode is then restarted, as the watchdog would "
        "do. SuperNodes that had lost the SuperLink permanently: "
        f"{trials.watched}.\n\nRuns that did not end, or that are not bit-identical "
        "to an undisturbed simulation in rows, model and states of the devices: "
        f"{len(fallen)}. This took {minutes:.0f} minutes, mostly spent waiting, "
        "because the key of a killed device is refused until the SuperLink has "
        "missed its heartbeats. The columns classify kills by the number of rounds "
        "that had been reported.\n\n"
    ) + markdown(["killed", "kills", *when, "after the last round"], rows)
    data = {"kills": trials.kills, "fell": trials.fell, "watched": trials.watched}
    write("real_kills", "Real processes that are killed", body, data)
    print("\n".join(trials.fell))


def main() -> int:
    """Run the trials and write the page; return 1 if any run failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(Path(folder) / "home", DEVICES)
        trials = Trials(federation, arguments.seed)
        try:
            trials.run(arguments.kills)
        finally:
            federation.close()
    report(trials)
    return 1 if trials.fell else 0


if __name__ == "__main__":
    sys.exit(main())
