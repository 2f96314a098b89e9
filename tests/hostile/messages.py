"""Hostile messages to clients: one-line errors, no file elsewhere, no head lost."""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from mutations import Rng, content_of
from replies import CLIENTS, Outcome, adapted, settings_of
from safetensors.numpy import load_file

from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.gossip.base import LostStateError
from flwr_frl.common.errors import SettingsError, TrainingDivergedError
from flwr_frl.strategies import ALGORITHMS, build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid

# Exceptions that a client may raise, with one-line messages; error replies under Flower
EXPECTED = (SettingsError, TrainingDivergedError, LostStateError)
NODE = 2
SECONDS = 20


class Target:
    """A client that has taken part in two rounds, and the messages of the third one."""

    def __init__(self, algorithm: str, root: Path) -> None:
        self.algorithm, self.root = algorithm, root / algorithm
        self.state = self.root / "state"
        settings = settings_of(algorithm)
        self.app = make_app(settings)
        grid = InlineGrid(self.app, CLIENTS)
        for context in grid.contexts.values():
            context.node_config["state-dir"] = str(self.state)
        strategy = build_strategy(settings)
        inner = getattr(strategy, "strategy", strategy)
        inner._run.clients.run_token, inner._run.clients.checkpoints = "abc", True
        arrays = strategy.initialize(grid)
        rounds = adapted(inner, grid)
        for server_round in (1, 2):
            inner._run.clients.checkpointed = server_round - 1
            messages = list(
                strategy.configure_train(server_round, arrays, ConfigRecord(), rounds)
            )
            replies = rounds.send_and_receive(messages)
            found, _ = strategy.aggregate_train(server_round, replies)
            arrays = arrays if found is None else found
        self.contents = {
            kind: [
                message.content
                for message in getattr(strategy, f"configure_{kind}")(
                    3, arrays, ConfigRecord(), rounds
                )
                if message.metadata.dst_node_id == NODE
            ]
            for kind in ("train", "evaluate")
        }
        for kind in ("query", "query.arrays", "query.statistics"):
            about = {"config": ConfigRecord({"run": "abc"})}
            self.contents[kind] = [RecordDict({**about})]
        self.kinds = [kind for kind, found in self.contents.items() if found]
        self.config = dict(grid.contexts[NODE].node_config)
        self.pristine = self.root / "pristine"
        if self.state.exists():
            shutil.copytree(self.state, self.pristine)
        self.files = {
            path.relative_to(self.pristine): path.read_bytes()
            for path in self.pristine.rglob("*.safetensors")
        }

    def attack(self, rng: Rng, outcome: Outcome, allowed: set[Path]) -> None:
        """Try one hostile message, and record its effects."""
        outcome.tried += 1
        kind = self.kinds[int(rng.integers(len(self.kinds)))]
        try:
            content = content_of(rng, self.contents[kind][0])
            message = Message(content, NODE, kind)
        except Exception:
            # Flower's record types refuse the content.
            outcome.refused += 1
            return
        what = f"{self.algorithm}/{kind} no. {outcome.tried}"
        shutil.rmtree(self.state, ignore_errors=True)
        if self.pristine.exists():
            shutil.copytree(self.pristine, self.state)
        context = Context(1, NODE, {**self.config}, RecordDict(), {})
        try:
            with at_most(SECONDS), np.errstate(all="ignore"):
                self.app(message, context)
        except EXPECTED as error:
            outcome.refused += 1
            if "\n" in str(error):
                outcome.fell.append(f"{what} is not one line: {error}"[:300])
        except BaseException as error:
            outcome.fell.append(f"{what} raised {error!r}"[:300])
        self.look(what, content, outcome, allowed)

    def look(
        self, what: str, content: RecordDict, outcome: Outcome, allowed: set[Path]
    ) -> None:
        """Record lost and non-finite heads, and files in other places."""
        config = content.config_records.get("config", {})
        for path, data in self.files.items():
            file = self.state / path
            newest = path.name.endswith("00000002.safetensors")
            # If round 2 is trained again, its state is replaced.
            again = config.get("server-round") == 2
            if (
                newest
                and not again
                and (not file.exists() or file.read_bytes() != data)
            ):
                outcome.fell.append(f"{what} lost a head")
        for path in self.state.rglob("*.safetensors"):
            if not all(np.isfinite(a).all() for a in load_file(path).values()):
                outcome.fell.append(f"{what} left a state that is not finite")
        strangers = set(self.root.parent.iterdir()) - allowed
        if strangers or any(Path.cwd().iterdir()):
            outcome.fell.append(f"{what} wrote outside: {strangers}")


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` after this many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    former = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def run(
    messages: int, seed: int, root: Path, algorithms: Sequence[str] = tuple(ALGORITHMS)
) -> Outcome:
    """Try this many hostile messages, distributed over the algorithms."""
    outcome, rng = Outcome(), np.random.default_rng([seed, 2])
    before, empty = Path.cwd(), root / "cwd"
    empty.mkdir()
    os.chdir(empty)
    try:
        targets = [Target(algorithm, root) for algorithm in algorithms]
        allowed = {empty, *(target.root for target in targets)}
        for i in range(messages):
            targets[i % len(targets)].attack(rng, outcome, allowed)
    finally:
        os.chdir(before)
    return outcome
