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
from flwr_frl.clients.gossip.relayed import check_state, exchanges
from flwr_frl.task.base import Task
from flwr_frl.task.compression.per_tensor import (
    CompressionSettings,
    Compressor,
    Identity,
    from_settings,
)
from flwr_frl.task.messages import SERVER_ROUND
from flwr_frl.task.remembered import run_cache
from flwr_frl.task.saddle_point.algorithm import SaddlePoint, decode
from flwr_frl.task.saddle_point.state import Noise, State, exchange_stream
from flwr_frl.task.tasks.multi_task import DIMENSION, MultiTaskSetup

INBOX = "inbox."


class MultiTaskClient(Client):
    """Algorithms 2 and 3: a node with its own model, tied to its neighbours' models.

    The first message is the start, uncompressed; each later round makes one iteration
    and sends C(x̃ − x̂). An iteration needs one message of every neighbour: a node whose
    neighbour is away keeps what it has got and waits, since the duals of both ends of
    an edge must go on alike.
    """

    shared = ()
    task: MultiTaskSetup
    task_type = MultiTaskSetup
    settings_type = CompressionSettings
    settings: CompressionSettings

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Any
    ) -> None:
        super().__init__(task, index, state, settings)
        self.compressor = self.make_compressor()
        self.refused = 0

    def make_compressor(self) -> Compressor:
        """Return the operator C that the settings name."""
        return from_settings(self.settings, (DIMENSION,))

    def structure(self) -> list[object]:
        """Return what must be the same for all nodes: the problem and C."""
        return [repr(self.task), repr(self.compressor)]

    def get_properties(self, config: Config) -> Config:
        """Return also ``message-bytes``, ``first-message-bytes`` and C's omegas."""
        return {
            **super().get_properties(config),
            "message-bytes": self.compressor.num_bytes(DIMENSION),
            "first-message-bytes": Identity().num_bytes(DIMENSION),
            "omega": self.compressor.omega(DIMENSION),
            "typical-omega": self.compressor.typical_omega(DIMENSION),
        }

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Make one iteration if every neighbour's message is here.

        ``message`` is attached, empty while waiting. The metrics are the expected cost
        as ``train-loss``, ``refused``, and ``iterations`` so far.
        """
        node, algorithm, noise = self.prepare(config)
        kept = self.state.load() or {}
        check_state(self.state, config)
        if self.state.round == 0:
            # What an earlier run of the experiment left: its neighbours start anew.
            kept = {}
        inbox = self.collect(kept, config)
        if not kept:
            state = algorithm.start(self.task.seed)
            data = self.post(algorithm, state, node)
        else:
            state, data = State.from_arrays(kept), b""
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
        """Return this node's next message (lines 2 to 5), and update its own copy."""
        stream = exchange_stream(self.task.seed, node, state.iteration + 1)
        return algorithm.send(state, self.compressor, stream)

    def take(
        self, algorithm: SaddlePoint, state: State, messages: list[tuple[str, bytes]]
    ) -> None:
        """Update the neighbours' copies; a malformed message changes nothing.

        ``messages`` are one of each neighbour, as (name, message).
        """
        operator = Identity() if state.iteration == 0 else self.compressor
        nothing = operator.compress(torch.zeros(DIMENSION), np.random.default_rng(0))
        usable = []
        for sender, data in messages:
            try:
                decode(operator, data, DIMENSION)
                usable.append(data)
            except ValueError as error:
                log(WARNING, "message of neighbour %s refused: %s", sender, error)
                self.refused += 1
                usable.append(nothing)
        algorithm.receive(state, usable, self.compressor)

    def prepare(self, config: Config) -> tuple[int, SaddlePoint, Noise]:
        """Return this node's number in the graph, its algorithm and its noise."""
        node = int(config["node"])
        neighbours = tuple(sorted(_neighbours(config).values()))
        return node, *_prepared(self.task, node, neighbours)

    def collect(
        self, kept: Mapping[str, npt.NDArray[Any]], config: Config
    ) -> dict[str, list[tuple[str, bytes]]]:
        """Return each neighbour's unused messages, oldest first, by its name.

        Each is (name, message); the neighbours are in the order of their numbers.
        """
        neighbours = _neighbours(config)
        inbox: dict[str, list[tuple[str, bytes]]] = {}
        for name in sorted(neighbours, key=lambda n: neighbours[n]):
            inbox[name] = [(name, m) for m in _unpacked(kept.get(INBOX + name))]
        for _, messages in exchanges(config, self.state.round):
            for message in messages:
                if message.sender in inbox:
                    inbox[message.sender].append((message.sender, message.data))
                else:
                    log(WARNING, "%r is no neighbour: message refused", message.sender)
                    self.refused += 1
        return inbox

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Test the time average of the points, the algorithm's output.

        The loss is its expected cost F_i. The metrics are ``loss-point``, the cost of
        the last point; ``constraint``, the largest g_ij of the node's points; and
        ``iterations``. ``duals`` are attached, float64 in the order of the neighbours'
        numbers, for the server's check.
        """
        _, algorithm, _ = self.prepare(config)
        kept = self.state.load()
        check_state(self.state, config)
        if kept is None or self.state.round == 0:
            return float("nan"), 0, {}
        state = State.from_arrays(kept)
        if state.iteration == 0:
            return float("nan"), 0, {}
        problem, point = algorithm.problem, algorithm.point(state)
        others = algorithm.feasible.project(state.known)
        own = np.repeat(point, len(others), axis=0)
        metrics: Config = {
            "loss-point": float(problem.expected(point)[0]),
            "constraint": float(algorithm.constraint.value(own, others).max()),
            "iterations": state.iteration,
        }
        self.attachments["duals"] = state.duals.astype("<f8").tobytes()
        return float(problem.expected(state.average)[0]), 1, metrics


@run_cache(maxsize=1024)
def _prepared(
    setup: MultiTaskSetup, node: int, neighbours: tuple[int, ...]
) -> tuple[SaddlePoint, Noise]:
    """Draw a node's costs once a process, not once a message."""
    algorithm = setup.saddle_point([node], [(node, j) for j in neighbours])
    return algorithm, Noise(algorithm.problem, setup.seed)


def _neighbours(config: Config) -> dict[str, int]:
    lists = cast(dict[str, list[Any]], config)
    names, numbers = lists["neighbours"], lists["neighbour-nodes"]
    return dict(zip(names, numbers, strict=True))


def _packed(queue: list[tuple[str, bytes]]) -> npt.NDArray[np.uint8]:
    """Return messages as one array: each with its length in four bytes before it."""
    framed = b"".join(len(m).to_bytes(4, "little") + m for _, m in queue)
    return np.frombuffer(framed, np.uint8)


def _unpacked(array: npt.NDArray[Any] | None) -> list[bytes]:
    data, messages = b"" if array is None else array.tobytes(), []
    while data:
        end = 4 + int.from_bytes(data[:4], "little")
        messages.append(data[4:end])
        data = data[end:]
    return messages
