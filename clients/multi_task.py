"""Decentralised multi-task optimisation (Singh, UCLA 2024, chapter 4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from logging import WARNING
from typing import Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from flwr.common import NDArrays, log

from flwr_frl.clients.base import Client, Config, Evaluation, Reply
from flwr_frl.clients.device.conversions import to_numpy, to_tensors
from flwr_frl.clients.device.parameter_groups import HEAD, WHOLE, personal_arrays
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.device.traits import TaskOf
from flwr_frl.clients.gossip.flat import FlatParameters
from flwr_frl.clients.gossip.inbox import Inbox, neighbours_of
from flwr_frl.clients.gossip.model_problem import ModelProblem, head_entries, load
from flwr_frl.clients.gossip.relayed import (
    LARGEST_ENTRY,
    check_state,
    message_properties,
    sender_label,
)
from flwr_frl.clients.gossip.sketch import SMALLEST_SKETCHED, sketch
from flwr_frl.common.messages import SERVER_ROUND
from flwr_frl.common.run_cache import run_cache
from flwr_frl.common.settings import SettingsError, setting
from flwr_frl.task.base import Task
from flwr_frl.task.compression.per_tensor import (
    CompressionSettings,
    Identity,
    from_settings,
)
from flwr_frl.task.resident import train_examples
from flwr_frl.task.saddle_point.algorithm import (
    SaddlePoint,
    State,
    decode,
    exchange_stream,
)
from flwr_frl.task.saddle_point.noise import Noise
from flwr_frl.task.saddle_point.problems import KnownProblem, Proximity
from flwr_frl.task.saddle_point.sets import Ball, ConvexSet, Everywhere
from flwr_frl.task.saddle_point.settings import SaddlePointSettings
from flwr_frl.task.tasks.multi_task import MultiTaskSetup
from flwr_frl.task.training import TrainingDivergedError


@dataclass(frozen=True)
class SyntheticMultiTaskSettings(SaddlePointSettings, CompressionSettings):
    """Settings of multi-task optimisation on the chapter's problems."""

    def __post_init__(self) -> None:
        """Check the ranges, also in combination with the problems' default X."""
        super().__post_init__()
        self.feasible(Ball())


@dataclass(frozen=True)
class MultiTaskSettings(SaddlePointSettings, CompressionSettings):
    """Settings of multi-task optimisation on a task's own model and examples.

    Parameters
    ----------
    constraint_bound : float, default 1
        b in the constraint ‖θ_i − θ_j‖² ≤ b between neighbours.
    constrained_part : {"all", "head"}, default "all"
        Parameters θ_i that are constrained: all parameters of a node's model, or those
        of its head. Only these are sent to the neighbours.
    batch_size : int, default 10
        Examples per step.
    averaged_output : bool, default False
        Use the mean of the parameters of all iterations as a node's model, as in the
        theory, instead of the last ones.
    """

    constraint_bound: float = setting(1.0, ge=0)
    constrained_part: Literal["all", "head"] = setting("all")
    batch_size: int = setting(10, ge=1)
    averaged_output: bool = setting(False)


class MultiTaskClient(Client):
    """Algorithms 2 and 3: a node whose model is constrained by its neighbours' models.

    The cost f_i is the loss of the task's model on a batch of the node's examples (0
    without any), and g_ij(θ_i, θ_j) = ‖θ_i − θ_j‖² − b. All nodes start from the
    task's initial model.

    The first message is the uncompressed starting point; each later round runs one
    iteration and sends C(x̃ − x̂). An iteration needs one message from every neighbour,
    since the dual variables of both ends of an edge must stay equal. If a neighbour is
    offline, a node saves the other messages and waits.
    """

    shared = ()
    personal = WHOLE
    settings_type: type = MultiTaskSettings
    # X if ``radius`` is ``auto``.
    default_set: ClassVar[ConvexSet] = Everywhere()
    # Least weight of a node in the mean of the costs.
    least_weight: ClassVar[int] = 0

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Any
    ) -> None:
        super().__init__(task, index, state, settings)
        self.flat = FlatParameters.of(self.model)
        self.exchanged, sizes = self._exchanged_entries()
        self.message_dimension = sum(sizes)
        self.compressor = from_settings(settings, sizes)
        self.refused = 0
        # Arrays of this node's last round; empty before the first one.
        self.stored: Mapping[str, npt.NDArray[Any]] = {}

    def _exchanged_entries(
        self,
    ) -> tuple[npt.NDArray[np.int64] | None, tuple[int, ...]]:
        """Return the constrained entries, None for all, and their parameters' sizes."""
        settings = cast(MultiTaskSettings, self.settings)
        if settings.constrained_part == "all":
            return None, self.flat.sizes
        entries, sizes = head_entries(self.model)
        if not sizes:
            raise SettingsError(
                "constrained-part is 'head'; expected 'all', as the head of this model "
                "has no parameters to train"
            )
        return entries, sizes

    @property
    def _exchanged_groups(self) -> tuple[str, ...]:
        return WHOLE if self.exchanged is None else (HEAD,)

    def _structure(self) -> list[object]:
        """Return parameters, classes and C, which must be the same for all nodes."""
        named = self.model.named_parameters()
        shapes: list[object] = [(name, tuple(p.shape)) for name, p in named]
        messages = self.message_dimension, repr(self.compressor)
        return [*shapes, self.task.classes, *messages]

    def get_properties(self, config: Config) -> Config:
        """Add ``message-bytes``, ``first-message-bytes`` and C's ω."""
        return {
            **super().get_properties(config),
            **message_properties(self.compressor, self.message_dimension),
            "first-message-bytes": Identity().num_bytes(self.message_dimension),
        }

    # One round.

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Run one iteration if every neighbour's message has arrived.

        The reply has the attachment ``message``, empty while waiting, and the metrics
        ``train-loss`` (`cost`), ``refused`` and ``iterations`` (so far).
        """
        self.receive(parameters, config)
        check_state(self.state, config)
        node, algorithm, noise = self.prepare(config)
        inbox = Inbox.of(self.stored, config, self.state.round)
        self.refused += inbox.refused
        if not self.stored:
            state = algorithm.start(self.settings.seed, self.initial_parameters())
            data = self.post(algorithm, state, node)
        else:
            state, data = State.from_arrays(self.stored), b""
            if inbox.is_complete:
                self.take(algorithm, state, inbox.next_messages())
                self.iterate(algorithm, state, noise)
                data = self.post(algorithm, state, node)
        cost = self.cost(algorithm, state, noise)
        load(self.flat, self.output(algorithm, state))
        model = personal_arrays(self, WHOLE)
        arrays = {**model, **state.arrays(), **inbox.arrays()}
        self.state.save(arrays, int(config[SERVER_ROUND]))
        metrics: Config = {
            "train-loss": cost,
            "refused": self.refused,
            "iterations": state.iteration,
        }
        self.attachments["message"] = data
        examples = len(self.task.train_examples(self.index))
        return [], max(self.least_weight, examples), metrics

    @torch.no_grad()
    def receive(self, parameters: NDArrays, config: Config) -> None:
        """Load this node's model, which is stored with the algorithm's state."""
        stored = self.state.load() or {}
        # Nothing is reused from an earlier run, as the neighbours also start afresh.
        self.stored = stored if self.state.round else {}
        initial = self.task.initial_state
        model = {name: a for name, a in self.stored.items() if name in initial}
        self.received, self.saved = {}, to_tensors(model, self.device)
        self.model.load({**initial, **self.saved})

    def initial_parameters(self) -> npt.NDArray[np.float64] | None:
        """Return x̃ before the first iteration, shape (1, d), or None for random x̃."""
        return to_numpy(self.flat.vector)[None].astype(np.float64)

    def iterate(self, algorithm: SaddlePoint, state: State, noise: Noise) -> None:
        """Run an iteration, with further local steps if ``primal-steps`` is above 1."""
        steps = self.settings.primal_steps
        first = state.iteration * steps + 1
        algorithm.iterate(state, *noise.at(first))
        for step in range(first + 1, first + steps):
            algorithm.local_step(state, *noise.at(step))
        if not np.isfinite(state.raw.astype(np.float32)).all():
            raise TrainingDivergedError(
                f"a parameter is not finite after iteration {state.iteration} with "
                f"saddle-step {self.settings.saddle_step}; try a smaller one"
            )

    def cost(self, algorithm: SaddlePoint, state: State, noise: Noise) -> float:
        """Return the mean loss of the iteration's batches.

        Without an iteration, it is the loss of the next one's first batch.
        """
        problem = cast(ModelProblem, algorithm.problem)
        if not problem.losses:
            samples, _ = noise.at(state.iteration * self.settings.primal_steps + 1)
            return float(problem.value(algorithm.point(state), samples)[0])
        return float(np.mean(problem.losses))

    def output(self, algorithm: SaddlePoint, state: State) -> npt.NDArray[np.float64]:
        """Return the parameters of this node's model, shape (d,)."""
        settings = cast(MultiTaskSettings, self.settings)
        averaged = settings.averaged_output and state.iteration > 0
        rows = state.average if averaged else algorithm.point(state)
        output: npt.NDArray[np.float64] = rows[0]
        return output

    def post(self, algorithm: SaddlePoint, state: State, node: int) -> bytes:
        """Return this node's next message, and update its own copy (lines 2 to 5)."""
        stream = exchange_stream(self.settings.seed, node, state.iteration + 1)
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
        dimension = self.message_dimension
        zero = operator.compress(torch.zeros(dimension), np.random.default_rng(0))
        valid = []
        for sender, data in messages:
            try:
                largest = np.abs(decode(operator, data, dimension)).max()
                if largest > LARGEST_ENTRY:
                    raise ValueError(f"it has an entry above {LARGEST_ENTRY:g}")
                valid.append(data)
            except ValueError as error:
                label = sender_label(self, sender)
                log(WARNING, "message of neighbour %s refused: %s", label, error)
                self.refused += 1
                valid.append(zero)
        algorithm.receive(state, valid, self.compressor)

    def prepare(self, config: Config) -> tuple[int, SaddlePoint, Noise]:
        """Return this node's number in the graph, its algorithm and its noise."""
        node = int(config["node"])
        neighbours = tuple(sorted(neighbours_of(config).values()))
        omega = self.compressor.omega(self.message_dimension)
        variables = int(config.get("dual-variables", 0))
        settings = self.settings.resolved(self.default_set, variables, omega)
        return node, *self.prepared(settings, node, neighbours)

    def prepared(
        self, settings: Any, node: int, neighbours: tuple[int, ...]
    ) -> tuple[SaddlePoint, Noise]:
        """Return the algorithm and the noise of a node and its neighbours."""
        examples = train_examples(self.task, self.index).on(self.device)
        loss, size = self.task.loss, settings.batch_size
        problem = ModelProblem(node, self.model, examples, loss, size)
        pairs = np.array([(node, j) for j in neighbours], np.int64)
        constraint = Proximity(pairs, np.full(len(pairs), -settings.constraint_bound))
        algorithm = settings.algorithm(
            problem, constraint, pairs, self.default_set, self.exchanged
        )
        direction: Any = settings.bandit_direction if settings.zeta else ""
        return algorithm, Noise(problem, self.settings.seed, direction, block=1)

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Test this node's model, before its first iteration the initial one.

        The metrics are those of `tested`; ``constraint``, the largest g_ij at the
        node's last point; and ``iterations``. The attachment ``duals`` contains λ_ij in
        float64, in the order of the neighbours' numbers, for the server's check, and
        ``sketch`` is as in `flwr_frl.clients.gossip.base.Node.evaluate`.
        """
        self.receive(parameters, config)
        check_state(self.state, config)
        if not self.stored or not int(self.stored["iteration"]):
            return self.test(self.model)
        state = State.from_arrays(self.stored)
        _, algorithm, _ = self.prepare(config)
        loss, examples, metrics = self.tested(algorithm, state)
        metrics["constraint"] = float(algorithm.constraints(state).max())
        metrics["iterations"] = state.iteration
        self.attachments["duals"] = state.duals.astype("<f8").tobytes()
        return loss, examples, metrics

    def tested(self, algorithm: SaddlePoint, state: State) -> Evaluation:
        """Test this node's model on its test examples, with the task's metrics."""
        if not self._own_data or len(self.flat.vector) >= SMALLEST_SKETCHED:
            self.attachments["sketch"] = sketch(to_numpy(self.flat.vector)).tobytes()
        return self.test(self.model)


class SyntheticMultiTaskClient(MultiTaskClient, requires=(TaskOf(MultiTaskSetup),)):
    """A node with one of the chapter's problems; x̃ starts at random values."""

    task: MultiTaskSetup
    settings_type = SyntheticMultiTaskSettings
    default_set = Ball()
    # The problems are not given by examples.
    least_weight = 1

    def _exchanged_entries(
        self,
    ) -> tuple[npt.NDArray[np.int64] | None, tuple[int, ...]]:
        """Return None, for all entries, and the parameters' sizes."""
        return None, self.flat.sizes

    def _structure(self) -> list[object]:
        """Add the problem."""
        return [repr(self.task), *super()._structure()]

    def initial_parameters(self) -> None:
        """Return None, as x̃ is random."""

    def prepared(
        self, settings: Any, node: int, neighbours: tuple[int, ...]
    ) -> tuple[SaddlePoint, Noise]:
        """Return the algorithm and the noise of a node and its neighbours."""
        return _prepared(self.task, settings, node, neighbours)

    def cost(self, algorithm: SaddlePoint, state: State, noise: Noise) -> float:
        """Return the expected cost of the point."""
        return _expected(algorithm, algorithm.point(state))

    def output(self, algorithm: SaddlePoint, state: State) -> npt.NDArray[np.float64]:
        """Return the mean of the points of all iterations, shape (d,)."""
        output: npt.NDArray[np.float64] = state.average[0]
        return output

    def tested(self, algorithm: SaddlePoint, state: State) -> Evaluation:
        """Evaluate the expected cost F_i of the time average, the algorithm's output.

        The metric ``loss-point`` is the expected cost of the last point.
        """
        last = _expected(algorithm, algorithm.point(state))
        return _expected(algorithm, state.average), 1, {"loss-point": last}


def _expected(algorithm: SaddlePoint, x: npt.NDArray[np.float64]) -> float:
    return float(cast(KnownProblem, algorithm.problem).expected(x)[0])


@run_cache(maxsize=1024)
def _prepared(
    setup: MultiTaskSetup,
    settings: SaddlePointSettings,
    node: int,
    neighbours: tuple[int, ...],
) -> tuple[SaddlePoint, Noise]:
    """Return a node's algorithm and noise, drawn once per process, not per message."""
    pairs = [(node, j) for j in neighbours]
    algorithm = setup.saddle_point([node], pairs, settings)
    return algorithm, Noise(algorithm.problem, settings.seed, settings.bandit_direction)
