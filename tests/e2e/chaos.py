"""Real devices that are killed repeatedly, and a SuperLink that is killed once.

Devices authenticate with keys and are restarted as by a service unit. They are killed
by ``kill -9`` in four phases: in training, between writing and renaming a state file,
between the rename and the reply, and between rounds.
"""

import hashlib
import json
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from command_line import run
from devices import write_folders
from federation import Federation, read_lines, wait_until
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

APP = Path(__file__).parent / "chaos_app"
CLIENTS = [f"{i:06d}" for i in range(5)]
IN_A_ROUND = ("training", "saving", "saved")
PHASES = (*IN_A_ROUND, "between rounds")
# Seconds between two starts of a SuperNode. The first start is usually refused, as the
# SuperLink ends the old session when it has missed heartbeats for 30 to 60 s.
RESTART = 30.0
# Rounds that are enough for a wave: the remaining device continues, at a few seconds
# per round, until the killed devices are accepted again.
WAVE = 12
CLASSES, TRAIN, TEST = 10, 10, 10
with (APP / "pyproject.toml").open("rb") as file:
    SETTINGS = tomllib.load(file)["tool"]["flwr"]["app"]["config"]


def plan(kills: int, seed: int) -> list[list[tuple[str, str]]]:
    """Return waves of (device, phase); each spares one device; phases take turns."""
    rng = np.random.default_rng(seed)
    phases = rng.permutation([PHASES[i % len(PHASES)] for i in range(kills)])
    size = len(CLIENTS) - 1
    return [
        [
            (str(client), str(phase))
            for client, phase in zip(
                rng.permutation(CLIENTS), phases[i : i + size], strict=False
            )
        ]
        for i in range(0, kills, size)
    ]


@dataclass
class Kill:
    """A kill, and the time until a reply of the victim was acknowledged again."""

    who: str
    phase: str
    server_round: int
    time: float
    recovery: float | None = None


@dataclass
class Outcome:
    kills: list[Kill]
    server: Kill
    rounds: list[dict[str, object]]
    states_checked: int
    losses: list[str]
    accuracy: float
    undisturbed: float


@dataclass
class Chaos:
    """The scenario, which `run` executes."""

    federation: Federation
    kills: int
    seed: int = 0
    began: float = field(default_factory=time.monotonic)
    started: dict[str, float] = field(default_factory=dict)
    closed: dict[int, float] = field(default_factory=dict)
    acknowledged: dict[str, int] = field(default_factory=dict)
    done: list[Kill] = field(default_factory=list)
    runs: int = 0

    def __post_init__(self) -> None:
        home = self.federation.home
        self.data, self.state = home / "data", home / "state"
        self.notes, self.output = home / "notes", home / "deployed"
        # The app runs FedRep under the name `Watched`.
        self.results = self.output / "Watched"
        self.waves = plan(self.kills, self.seed)
        self.num_rounds = WAVE * (1 + len(self.waves))

    def run(self) -> Outcome:
        write_folders(self.data, len(CLIENTS), TRAIN, TEST, CLASSES, own_names=True)
        self.notes.mkdir()
        self.start_superlink()
        self.federation.register()
        self.start_run()
        self.wait(self.round_closes(), "the first round to close")
        for i, wave in enumerate(self.waves):
            # Kills of devices and of the server start when a round has just closed.
            self.strike(wave)
            self.wait(self.all_are_back, f"all devices after wave {i + 1}")
            if i == len(self.waves) // 2:
                server = self.kill_the_server(len(self.waves) - 1 - i)
        self.wait(self.run_has_ended, "the end of the run")
        self.look()
        rows = read_lines(self.results / "metrics.jsonl")
        checked, losses = self.compare_states()
        return Outcome(
            self.done,
            server,
            rows,
            checked,
            losses,
            float(str(rows[-1]["accuracy"])),
            self.undisturbed(),
        )

    def start_superlink(self) -> None:
        database = str(self.federation.home / "superlink.db")
        self.federation.start_superlink("--database", database)

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def start_run(self, resume: str = "") -> None:
        """Start a run with ``flwr run``, configured by settings only."""
        self.runs += 1
        config = f'num-server-rounds={self.num_rounds} output="{self.output}"'
        if resume:
            config += f' resume="{resume}"'
        self.federation.start(
            self.run_name, "flwr", "run", str(APP), "test", "--stream", "--run-config",
            config,
        )  # fmt: skip

    @property
    def run_name(self) -> str:
        return f"flwr-run-{self.runs}"

    def run_has_ended(self) -> bool:
        return self.federation.processes[self.run_name].poll() is not None

    # Monitoring

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        def look_and_see() -> bool:
            self.keep_alive()
            self.look()
            if condition():
                return True
            if self.run_has_ended():
                log = self.federation.home / f"{self.run_name}.log"
                raise RuntimeError(f"ended before {what}: {log.read_text()[-5000:]}")
            return False

        wait_until(look_and_see, 1200, what, every=0.3)

    def keep_alive(self) -> None:
        """Start devices that are not running, as ``Restart=always`` does."""
        for name in CLIENTS:
            process = self.federation.processes.get(name)
            runs = process is not None and process.poll() is None
            if not runs and self.seconds() - self.started.get(name, -RESTART) > RESTART:
                self.started[name] = self.seconds()
                self.federation.start_supernode(
                    name,
                    f'client-name="{name}" data-dir="{self.data / name}" '
                    f'state-dir="{self.state}" notes="{self.notes}"',
                )

    def look(self) -> None:
        """Record which round has closed, and whose replies were acknowledged."""
        path = self.results / "checkpoint.safetensors"
        try:
            with safe_open(path, framework="np") as file:
                about = json.loads(file.metadata()["run"])
        except (OSError, SafetensorError):
            return
        if about["round"] in self.closed:
            return
        self.closed[about["round"]] = self.seconds()
        self.acknowledged = about["values"]["acknowledged"]
        for kill in self.done:
            if kill.recovery is None:
                counted = self.acknowledged.get(kill.who, 0)
                if counted > kill.server_round:
                    kill.recovery = self.seconds() - kill.time

    def round_closes(self) -> Callable[[], bool]:
        before = len(self.closed)
        return lambda: len(self.closed) > before

    def all_are_back(self) -> bool:
        return all(kill.recovery is not None for kill in self.done)

    # Kills

    def strike(self, wave: Sequence[tuple[str, str]]) -> None:
        """Kill devices between rounds now, the others when they reach their phase."""
        for client, phase in wave:
            if phase in IN_A_ROUND:
                (self.notes / f"{client}-{phase}").touch()
        for client, phase in wave:
            if phase not in IN_A_ROUND:
                self.kill(client, phase)
        open_ = [(client, phase) for client, phase in wave if phase in IN_A_ROUND]

        def all_killed() -> bool:
            for client, phase in list(open_):
                reached = self.notes / f"{client}-{phase}-reached"
                if reached.exists():
                    self.kill(client, phase)
                    (self.notes / f"{client}-{phase}").unlink()
                    reached.unlink()
                    open_.remove((client, phase))
            return not open_

        self.wait(all_killed, f"{open_} to be reached")

    def kill(self, client: str, phase: str) -> None:
        self.federation.kill(client)
        self.started[client] = self.seconds()
        latest = max(self.closed)
        self.done.append(Kill(client, phase, latest, self.seconds()))

    def kill_the_server(self, waves_left: int) -> Kill:
        """Kill the SuperLink with its ServerApp in the middle of a round, and resume.

        The SuperLink restarts with the same database, so devices need no restart. The
        number of rounds is reduced to what the remaining waves need.
        """
        latest = max(self.closed)

        def somebody_trains() -> bool:
            notes = (self.notes_of(client) for client in CLIENTS)
            return any(
                note["kind"] == "kept" and note["round"] == latest + 1
                for lines in notes
                for note in lines
            )

        self.wait(somebody_trains, f"training in round {latest + 1}")
        self.federation.kill("superlink")
        death = Kill("SuperLink", "in a round", max(self.closed), self.seconds())
        self.start_superlink()
        self.num_rounds = latest + 2 + WAVE * waves_left
        self.start_run(resume=str(self.output))
        self.wait(self.round_closes(), "the resumed run's first round")
        death.recovery = self.seconds() - death.time
        return death

    # Results

    def notes_of(self, client: str) -> list[dict[str, object]]:
        return read_lines(self.notes / f"{client}.jsonl")

    def compare_states(self) -> tuple[int, list[str]]:
        """Compare the loaded states, and the last ones on disk, with the saved states.

        Return the number of comparisons, and a description of each state that is not
        the one of the last acknowledged round.
        """
        checked, losses = 0, []
        for client in CLIENTS:
            kept: dict[object, object] = {}
            loaded = 0
            for note in self.notes_of(client):
                if note["kind"] == "kept":
                    kept[note["round"]] = note["digest"]
                    continue
                # With a checkpoint in each round, acknowledged rounds never decrease.
                if int(str(note["round"])) < loaded:
                    losses.append(f"{client} goes back to round {note['round']}")
                loaded = int(str(note["round"]))
                if loaded:
                    checked += 1
                    if kept.get(loaded) != note["digest"]:
                        losses.append(f"{client} goes on from round {loaded}")
            last = self.acknowledged[client]
            checked += 1
            if self.digest_on_disk(client, last) != kept.get(last):
                losses.append(f"{client} on disk, round {last}")
        return checked, losses

    def digest_on_disk(self, client: str, server_round: int) -> str:
        content = hashlib.sha256()
        for path in self.state.glob(f"*/{client}/*-{server_round:08d}.safetensors"):
            arrays = load_file(path)
            for name in sorted(arrays):
                content.update(name.encode() + arrays[name].tobytes())
            return content.hexdigest()
        return "missing"

    def undisturbed(self) -> float:
        """Return the final accuracy of the same run in one process."""
        excluded = ("algorithm", "output", "resume")
        config = {n: v for n, v in SETTINGS.items() if n not in excluded}
        config["num-server-rounds"] = self.num_rounds
        output = self.federation.home / "undisturbed"
        settings = " ".join(f"{n}={json.dumps(v)}" for n, v in config.items())
        words = ("--data-dir", str(self.data), "--run-config", settings)
        assert run(output, "fedrep", *words) == 0
        last = read_lines(output / "fedrep" / "metrics.jsonl")[-1]
        return float(str(last["accuracy"]))
