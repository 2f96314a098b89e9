"""Decentralised multi-task optimisation (Singh, UCLA 2024, chapter 4)."""

from collections.abc import Mapping
from logging import WARNING
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from flwr.common import NDArrays, log

from flwr_frl.clients.base import Client, Config, Evaluation, Reply
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.gossip.relayed import check_state, exchanges, message_properties
from flwr_frl.task.base import Task
from flwr_frl.task.compression.per_tensor import (
    CompressionSettings,
    Identity,
    from_settings,
)
from flwr_frl.task.messages import SERVER_ROUND
from flwr_frl.task.run_cache import run_cache
from flwr_frl.task.saddle_point.algorithm import (
    SaddlePoint,
    State,
    decode,
    exchange_stream,
)
from flwr_frl.task.saddle_point.noise import Noise
from flwr_frl.task.tasks.multi_task import DIMENSION, MultiTaskSetup

INBOX = "inbox."


class MultiTaskClient(Client, task_type=MultiTaskSetup):
    """Algorithms 2 and 3: a node whose model is constrained by its neighbours' models.

    The first message is the uncompressed starting point; each later round runs one
    iteration and sends C(x̃ − x̂). An iteration needs one message from every neighbour,
    since the dual variables of both ends of an edge must stay equal. If a neighbour is
    offline, a node saves the other messages and waits.
    """

    shared = ()
    task: MultiTaskSetup
    settings_type = CompressionSettings
    settings: CompressionSettings

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Any
    ) -> None:
        super().__init__(task, index, state, settings)
        self.compressor = from_settings(settings, (DIMENSION,))
        self.refused = 0

    def _structure(self) -> list[object]:
        """Return what must be the same for all nodes: the problem and C."""
        return [repr(self.task), repr(self.compressor)]

    def get_properties(self, config: Config) -> Config:
        """Add ``message-bytes``, ``first-message-bytes`` and C's ω."""
        return {
            **super().get_properties(config),
            **message_properties(self.compressor, DIMENSION),
            "first-message-bytes": Identity().num_bytes(DIMENSION),
        }

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Run one iteration if every neighbour's message has arrived.

        The reply has the attachment ``message``, empty while waiting, and the metrics
        ``train-loss`` (the expected cost), ``refused`` and ``iterations`` (so far).
        """
        node, algorithm, noise = self.prepare(config)
        saved = self.state.load() or {}
        check_state(self.state, config)
        if self.state.round == 0:
            # State of an earlier run; the neighbours start afresh, too.
            saved = {}
        inbox = self.collect(saved, config)
        if not saved:
            state = algorithm.start(self.task.seed)
            data = self.post(algorithm, state, node)
        else:
            state, data = State.from_arrays(saved), b""
            if all(inbox.values()):
                messages = [queue.pop(0) for queue in inbox.values()]
                self.take(algorithm, state, messages)
                algorithm.iterate(state, *noise.at(state.iteration + 1))
                data = self.post(algorithm, state, node)
        cost = float(algorithm.problem.expected(algorithm.point(state))[0])
        queues = {INBOX + n: _packed(queue) for n, queue in inbox.items() if queue}
        self.state.save({**state.arrays(), **queues}, int(config[SERVER_ROUND]))
        metrics: Config = {
            "train-loss": cost,
            "refused": self.refused,
            "iterations": state.iteration,
        }
        self.attachments["message"] = data
        return [], 1, metrics

    def post(self, algorithm: SaddlePoint, state: State, node: int) -> bytes:
        """Return this node's next message, and update its own copy (lines 2 to 5)."""
        stream = exchange_stream(self.task.seed, node, state.iteration + 1)
        return algorithm.send(state, self.compressor, stream)

    def take(
        self, algorithm: SaddlePoint, state: State, messages: list[tuple[str, bytes]]
    ) -> None:
        """Update the neighbours' copies; malformed messages count as zero.

        Parameters
        ----------
        algorithm : SaddlePoint
            The algorithm of this node.
        state : State
            The state; updated.
        messages : list of (str, bytes)
            One message from each neighbour, with its sender's name.
        """
        operator = Identity() if state.iteration == 0 else self.compressor
        zero = operator.compress(torch.zeros(DIMENSION), np.random.default_rng(0))
        valid = []
        for sender, data in messages:
            try:
                decode(operator, data, DIMENSION)
                valid.append(data)
            except ValueError as error:
                log(WARNING, "message of neighbour %s refused: %s", sender, error)
                self.refused += 1
                valid.append(zero)
        algorithm.receive(state, valid, self.compressor)

    def prepare(self, config: Config) -> tuple[int, SaddlePoint, Noise]:
        """Return this node's number in the graph, its algorithm and its noise."""
        node = int(config["node"])
        neighbours = tuple(sorted(_neighbours(config).values()))
        return node, *_prepared(self.task, node, neighbours)

    def collect(
        self, saved: Mapping[str, npt.NDArray[Any]], config: Config
    ) -> dict[str, list[tuple[str, bytes]]]:
        """Return each neighbour's unused (name, message) pairs, oldest first, by name.

        Neighbours are in the order of their numbers.
        """
        neighbours = _neighbours(config)
        inbox: dict[str, list[tuple[str, bytes]]] = {}
        for name in sorted(neighbours, key=lambda n: neighbours[n]):
            inbox[name] = [(name, m) for m in _unpacked(saved.get(INBOX + name))]
        for _, messages in exchanges(config, self.state.round):
            for message in messages:
                if message.sender in inbox:
                    inbox[message.sender].append((message.sender, message.data))
                else:
                    text = "message of %r refused: not a neighbour"
                    log(WARNING, text, message.sender)
                    self.refused += 1
        return inbox

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Evaluate the time average of the points, the algorithm's output.

        The loss is its expected cost F_i. The metrics are ``loss-point``, the expected
        cost of the last point; ``constraint``, the largest g_ij at the node's last
        point; and ``iterations``. The attachment ``duals`` contains λ_ij in float64, in
        the order of the neighbours' numbers, for the server's check.
        """
        _, algorithm, _ = self.prepare(config)
        saved = self.state.load()
        check_state(self.state, config)
        if saved is None or self.state.round == 0:
            return float("nan"), 0, {}
        state = State.from_arrays(saved)
        if state.iteration == 0:
            return float("nan"), 0, {}
        problem, point = algorithm.problem, algorithm.point(state)
        x_j = algorithm.feasible.project(state.known)
        x_i = np.repeat(point, len(x_j), axis=0)
        metrics: Config = {
            "loss-point": float(problem.expected(point)[0]),
            "constraint": float(algorithm.constraint.value(x_i, x_j).max()),
            "iterations": state.iteration,
        }
        self.attachments["duals"] = state.duals.astype("<f8").tobytes()
        return float(problem.expected(state.average)[0]), 1, metrics


@run_cache(maxsize=1024)
def _prepared(
    setup: MultiTaskSetup, node: int, neighbours: tuple[int, ...]
) -> tuple[SaddlePoint, Noise]:
    """Draw a node's costs once per process instead of once per message."""
    algorithm = setup.saddle_point([node], [(node, j) for j in neighbours])
    return algorithm, Noise(algorithm.problem, setup.seed, setup.bandit_direction)


def _neighbours(config: Config) -> dict[str, int]:
    lists = cast(dict[str, list[Any]], config)
    names, numbers = lists["neighbours"], lists["neighbour-nodes"]
    return dict(zip(names, numbers, strict=True))


def _packed(queue: list[tuple[str, bytes]]) -> npt.NDArray[np.uint8]:
    """Return messages as one array, each preceded by its length in four bytes."""
    framed = b"".join(len(m).to_bytes(4, "little") + m for _, m in queue)
    return np.frombuffer(framed, np.uint8)


def _unpacked(array: npt.NDArray[Any] | None) -> list[bytes]:
    data, messages = b"" if array is None else array.tobytes(), []
    while data:
        end = 4 + int.from_bytes(data[:4], "little")
        messages.append(data[4:end])
        data = data[end:]
    return messages
