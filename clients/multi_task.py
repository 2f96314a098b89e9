"""Decentralised multi-task optimisation (Singh, UCLA 2024, chapter 4)."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from flwr.common import NDArrays

from flwr_frl.clients.base import Config, EvaluateResult, FitResult, TaskOf
from flwr_frl.clients.device.groups import HEAD, WHOLE, to_arrays, to_tensors
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.gossip.base import GraphClient, relayed
from flwr_frl.clients.gossip.flat import FlatParameters
from flwr_frl.common.compression import CompressionSettings, Identity
from flwr_frl.common.errors import TrainingDivergedError, require
from flwr_frl.common.messages import SERVER_ROUND
from flwr_frl.common.run_cache import run_cache
from flwr_frl.common.settings import load, number_or, setting
from flwr_frl.task import saddle_point
from flwr_frl.task.base import Task
from flwr_frl.task.examples import Batch, count_targets
from flwr_frl.task.saddle_point import Float64s, Noise, Pairs, SaddlePoint, State
from flwr_frl.task.tasks.multi_task import MultiTaskSetup, build_problem
from flwr_frl.task.training.local_training import gradient
from flwr_frl.task.training.sgd import SGD, trainable_examples

# Upper bound of δ η²: 1, with an allowance for rounding.
LARGEST_DECAY = 1 + 1e-9
# Costs, constraints and noise of a node.
Drawn = tuple[saddle_point.Problem, saddle_point.Proximity, Noise]
SYNTHETIC = {"task": ("qcqp", "multi-task-logistic")}


class MultiTaskClient(GraphClient):
    """Algorithms 2 and 3: a node that is constrained by its neighbours' parameters.

    The first message is the uncompressed starting point; each later round runs one
    iteration and sends C(x̃ − x̂). An iteration needs one message from every neighbour,
    since the dual variables of both ends of an edge must stay equal.

    The cost f_i is the loss of the task's model on a batch of the node's examples (0
    without any), and g_ij(θ_i, θ_j) = ‖θ_i − θ_j‖² − b_ij by default. All nodes start
    from the task's initial model.

    Parameters
    ----------
    saddle_step : float, default 1e-3
        Step size η of the parameters and of the dual variables.
    dual_regularizer : float or str, default "auto"
        δ, with δ η² ≤ 1 (appendix B): ``auto`` is 100, and ``theory`` is the value of
        theorem 3 or 4, which needs a bounded X and a very small step size.
    feasible_set : {"ball", "box", "simplex"}, default "ball"
        The convex set X of the parameters, for a radius r: ‖x‖ ≤ r; |x_k| ≤ r for every
        entry; or x_k ≥ 0 with Σ_k x_k = r, for sample feedback only.
    radius : float or str, default "auto"
        r. ``auto`` is 20 for the chapter's problems and 1 for a simplex, and sets no
        bound for other tasks.
    bandit_radius : float or str, default "0"
        ζ of bandit feedback (Algorithm 3); 0 means sample feedback (Algorithm 2), and
        ``theory`` is 1 / T for T rounds (theorem 4).
    bandit_direction : {"sphere", "bernoulli", "gaussian"}, default "sphere"
        Distribution of the perturbations of bandit feedback (section 4.4.1).
    seed : int, default 0
        Seed of a random start, the samples, the perturbations and random compressors.
    num_server_rounds : int, default 30
        Rounds T, for ``theory``.
    constraint : str, default "proximity"
        The constraint g_ij(θ_i, θ_j) ≤ 0 between neighbours: ``proximity`` is ‖θ_i −
        θ_j‖² ≤ b_ij. Or the import path ``package.module:Class`` of a subclass of
        `Proximity`, with the offsets −b_ij.
    constrained_part : {"all", "head"}, default "all"
        Parameters θ_i that are constrained: all parameters of a node's model, or those
        of its head. Only these are sent to the neighbours.
    batch_size : int, default 10
        Examples per step.
    """

    personal = WHOLE
    _settings_type: type = CompressionSettings
    saddle_step: float = setting(1e-3, gt=0)
    dual_regularizer: Annotated[
        float | str, number_or(("auto", "theory"), lambda delta: 0 < delta < math.inf)
    ] = setting("auto", form="auto, theory or a number above 0")
    feasible_set: saddle_point.Shape = setting("ball")
    radius: Annotated[float | str, number_or(("auto",), lambda r: 0 < r < math.inf)] = (
        setting("auto", form="auto or a number above 0")
    )
    bandit_radius: Annotated[
        float | str, number_or(("theory",), lambda zeta: 0 <= zeta < math.inf)
    ] = setting("0", form="theory or a number, at least 0")
    bandit_direction: saddle_point.Direction = setting("sphere")
    seed: int = setting(0, ge=0)
    num_server_rounds: int = setting(30, ge=1)
    constraint: str = setting(
        "proximity", form="proximity or an import path", code=True, unused_if=SYNTHETIC
    )
    constrained_part: Literal["all", "head"] = setting("all", unused_if=SYNTHETIC)
    batch_size: int = setting(10, ge=1, unused_if=SYNTHETIC)
    # Radius of X if the setting is ``auto``.
    default_radius: ClassVar[float] = math.inf
    # Least weight of a node in the mean of the costs.
    least_weight: ClassVar[int] = 0

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Any
    ) -> None:
        super().__init__(task, index, state, settings)
        # Arrays of this node's last round; empty before the first one.
        self.stored: Mapping[str, npt.NDArray[Any]] = {}
        radius, zeta = settings.radius, settings.bandit_radius
        self.shape: saddle_point.Shape = settings.feasible_set
        default = 1.0 if self.shape == "simplex" else self.default_radius
        self.set_radius = default if radius == "auto" else float(radius)
        self.zeta = 1 / settings.num_server_rounds if zeta == "theory" else float(zeta)
        # Distribution of the perturbations; none for sample feedback.
        self.direction: saddle_point.AnyDirection
        self.direction = settings.bandit_direction if self.zeta else ""
        allowed = f"below {self.set_radius:g}, the radius of the feasible set"
        require(self.zeta < self.set_radius, "bandit-radius", zeta, allowed)
        inside = not self.zeta or self.shape != "simplex"
        require(inside, "bandit-radius", zeta, "0 with feasible-set='simplex'")
        # Each dual variable makes the theorems' limits stricter.
        self.regularizer(0)

    @property
    def message_lengths(self) -> list[int]:
        """Add the length of the first message."""
        return [*super().message_lengths, Identity().num_bytes(self.dimension)]

    # The problem.

    @property
    def _exchanged_groups(self) -> tuple[str, ...]:
        return WHOLE if self.settings.constrained_part == "all" else (HEAD,)

    @property
    def message_sizes(self) -> tuple[int, ...]:
        """Number of entries of each parameter that a message contains."""
        named = zip(self.flat.names, self.flat.sizes, strict=True)
        sizes = tuple(n for name, n in named if name.startswith(self._exchanged_groups))
        part = self.settings.constrained_part
        allowed = "'all', as the head of this model has no parameters to train"
        require(len(sizes) > 0, "constrained-part", part, allowed)
        return sizes

    def problem(self, pairs: Pairs, bounds: Float64s) -> Drawn:
        """Return the costs, constraints and noise of a node with these edges."""
        problem = ModelProblem(self, int(pairs[0, 0]))
        noise = Noise(problem, self.settings.seed, self.direction, block=1)
        kind = constraint_class(self.settings.constraint)
        return problem, kind(pairs, -bounds), noise

    def initial_parameters(self) -> Float64s | None:
        """Return x̃ before the first iteration, shape (1, d), or None for random x̃."""
        return self.flat.vector.numpy(force=True)[None].astype(np.float64)

    def cost(self, algorithm: SaddlePoint, state: State, noise: Noise) -> float:
        """Return the cost that is reported, the mean loss of the iteration's batches.

        Without an iteration, it is the loss of the next one's first batch.
        """
        losses = cast(ModelProblem, algorithm.problem).losses
        if not losses:
            samples, _ = noise.at(state.iteration + 1)
            return float(algorithm.problem.value(algorithm.point(state), samples)[0])
        return float(np.mean(losses))

    def output(self, algorithm: SaddlePoint, state: State) -> Float64s:
        """Return the parameters of this node's model, shape (1, d)."""
        return algorithm.point(state)

    def tested(self, algorithm: SaddlePoint, state: State) -> EvaluateResult:
        """Test this node's model on its test examples, with the task's metrics."""
        self.attach_sketch()
        return self._test(self.model)

    # One round.

    def fit(self, parameters: NDArrays, config: Config) -> FitResult:
        """Run one iteration, but for the first round, and send one message.

        The reply has the attachment ``message`` and the metrics ``train-loss``
        (`cost`), ``refused`` and ``iterations`` (so far).
        """
        self._receive(parameters, config)
        algorithm, noise = self.prepare(config)
        seed, node = self.settings.seed, int(config["node"])
        if not self.stored:
            state = algorithm.start(seed, self.initial_parameters())
        else:
            state = State.from_arrays(self.stored)
            algorithm.receive(state, self.decoded(config, state.iteration))
            algorithm.iterate(state, *noise.at(state.iteration + 1))
            if not np.isfinite(state.raw.astype(np.float32)).all():
                raise TrainingDivergedError(
                    f"a parameter is not finite after iteration {state.iteration} with "
                    f"saddle-step {self.settings.saddle_step}; try a smaller one"
                )
        stream = saddle_point.exchange_stream(seed, node, state.iteration + 1)
        self._attachments["message"] = algorithm.send(state, self.compressor, stream)
        cost = self.cost(algorithm, state, noise)
        set_parameters(self.flat, self.output(algorithm, state))
        arrays = {**to_arrays(self.model.tensors), **state.arrays()}
        self._state.save(arrays, int(config[SERVER_ROUND]))
        examples = len(self.task.train_examples(self._index))
        counts = {"refused": self.refused, "iterations": state.iteration}
        return [], max(self.least_weight, examples), {"train-loss": cost, **counts}

    @torch.no_grad()
    def _receive(self, parameters: NDArrays, config: Config) -> None:
        """Load this node's model, which is stored with the algorithm's state."""
        stored = self._state.load() or {}
        # Nothing is reused from an earlier run, as the neighbours also start afresh.
        self.stored = stored if self._state.round else {}
        self.check_state(config)
        initial = self.task.initial_state
        model = {name: a for name, a in self.stored.items() if name in initial}
        self.received, self.saved = {}, to_tensors(model, self._device)
        self.model.load({**initial, **self.saved})

    def prepare(self, config: Config) -> tuple[SaddlePoint, Noise]:
        """Return the algorithm and the noise of this node and its neighbours."""
        others: Any = config["neighbour-nodes"]
        pairs = np.array([(config["node"], j) for j in others], np.int64)
        bounds: Any = config["constraint-bounds"]
        problem, constraint, noise = self.problem(pairs, np.array(bounds, np.float64))
        delta = self.regularizer(int(config["dual-variables"]))
        algorithm = SaddlePoint(
            *(problem, constraint, self.set_radius, self.settings.saddle_step),
            *(delta, self.zeta, problem.dimension - self.dimension, self.shape),
        )
        return algorithm, noise

    def regularizer(self, dual_variables: int) -> float:
        """Return δ; raise `SettingsError` if the settings do not allow it."""
        value, step = self.settings.dual_regularizer, self.settings.saddle_step
        if value != "theory":
            delta, allowed = 100.0 if value == "auto" else float(value), 1 / step**2
            valid = delta * step**2 <= LARGEST_DECAY
            require(valid, "dual-regularizer", value, f"at most {allowed:g}, 1 / η²")
            return delta
        radius, omega = self.set_radius, self.compressor.omega(self.dimension)
        allowed = "auto or a number, as theory needs a radius"
        require(radius < math.inf, "dual-regularizer", value, allowed)
        is_known = self.settings.constraint == "proximity"
        allowed = "auto or a number, as theory needs constraint='proximity'"
        require(is_known, "dual-regularizer", value, allowed)
        # ‖(2 (x_i − x_j), 2 (x_j − x_i))‖ for the most distant points of X.
        diameter = saddle_point.diameter(self.shape, radius, self.dimension)
        constant = saddle_point.theory_constant(
            dual_variables, 2 * math.sqrt(2) * diameter, omega, self.zeta > 0
        )
        largest = 1 / math.sqrt(constant)
        allowed = f"at most {largest:.3g} with dual-regularizer='theory'"
        require(step <= largest, "saddle-step", step, allowed)
        return saddle_point.theory_regularizer(step, constant)

    def decoded(self, config: Config, iteration: int) -> list[npt.NDArray[np.float32]]:
        """Return each neighbour's message; malformed ones count as zero."""
        compressor = Identity() if iteration == 0 else self.compressor
        malformed = torch.zeros(self.dimension)
        vectors = [
            self.decode(sender, data, compressor) for sender, _, data in relayed(config)
        ]
        return [(malformed if v is None else v).numpy(force=True) for v in vectors]

    def evaluate(self, parameters: NDArrays, config: Config) -> EvaluateResult:
        """Test this node's model, before its first iteration the initial one.

        The metrics are those of `tested`; ``constraint``, the largest g_ij at the
        node's last point; and ``iterations``.
        """
        self._receive(parameters, config)
        if not self.stored or not int(self.stored["iteration"]):
            return self._test(self.model)
        state = State.from_arrays(self.stored)
        algorithm, _ = self.prepare(config)
        loss, examples, metrics = self.tested(algorithm, state)
        metrics["constraint"] = float(algorithm.constraints(state).max())
        metrics["iterations"] = state.iteration
        return loss, examples, metrics


def constraint_class(name: str) -> type[saddle_point.Proximity]:
    """Return the class of the setting ``constraint``."""
    base = saddle_point.Proximity
    kind = base if name == "proximity" else load(name, "constraint")
    valid = isinstance(kind, type) and issubclass(kind, base)
    require(valid, "constraint", name, "proximity or a subclass of Proximity")
    return cast(type[saddle_point.Proximity], kind)


class SyntheticMultiTaskClient(MultiTaskClient, requires=(TaskOf(MultiTaskSetup),)):
    """A node with one of the chapter's problems; x̃ starts at random values."""

    task: MultiTaskSetup
    default_radius = 20.0
    # The problems are not given by examples.
    least_weight = 1

    def _structure(self) -> list[object]:
        """Add the problem."""
        return [repr(self.task), *super()._structure()]

    def problem(self, pairs: Pairs, bounds: Float64s) -> Drawn:
        """Return the costs, constraints and noise of a node with these edges."""
        edges = tuple(map(tuple, pairs.tolist()))
        return _drawn(self.task, edges, self.settings.seed, self.direction)

    def initial_parameters(self) -> None:
        """Return None, as x̃ is random."""

    def cost(self, algorithm: SaddlePoint, state: State, noise: Noise) -> float:
        """Return the expected cost of the point."""
        return _expected(algorithm, algorithm.point(state))

    def output(self, algorithm: SaddlePoint, state: State) -> Float64s:
        """Return the mean of the points of all iterations."""
        return state.average

    def tested(self, algorithm: SaddlePoint, state: State) -> EvaluateResult:
        """Evaluate the expected cost F_i of the time average, the algorithm's output.

        The metric ``loss-point`` is the expected cost of the last point.
        """
        last = _expected(algorithm, algorithm.point(state))
        return _expected(algorithm, state.average), 1, {"loss-point": last}


def _expected(algorithm: SaddlePoint, x: Float64s) -> float:
    problem: Any = algorithm.problem
    return float(problem.expected(x)[0])


@run_cache(maxsize=1024)
def _drawn(
    setup: MultiTaskSetup,
    edges: tuple[tuple[int, int], ...],
    seed: int,
    direction: saddle_point.AnyDirection,
) -> Drawn:
    """Return a node's problem and noise, drawn once per process, not per message."""
    nodes, pairs = edges[0][:1], np.array(edges, np.int64)
    problem, constraint = build_problem(setup.problem, nodes, pairs, setup.seed)
    return problem, constraint, Noise(problem, seed, direction)


class ModelProblem:
    """The cost f_i of one node: the mean loss of its model on a batch of its examples.

    The parameters are those of `FlatParameters`. A sample is a batch, given by the
    indices of its examples: ``batch-size`` of them, drawn without replacement, or all
    if there are fewer. Parameters are float64 outside of the model, which is float32.
    The model is in training mode from the first cost on. Its buffers, such as
    batch-norm statistics, change with every cost.

    Attributes
    ----------
    losses : list of float
        The costs so far.
    """

    def __init__(self, client: MultiTaskClient, node: int) -> None:
        self.nodes = (node,)
        self.model, self.flat, self.loss = client.model, client.flat, client.task.loss
        self.sgd = SGD(batch_size=client.settings.batch_size)
        given = client.task.resident("train", client._index).on(client._device)
        self.examples = trainable_examples(self.model, given, self.sgd)
        self.losses: list[float] = []
        self._batch: tuple[Float64s, Batch] | None = None

    @property
    def dimension(self) -> int:
        """Number of parameters d."""
        return len(self.flat.vector)

    def draw(self, row: int, generator: np.random.Generator, count: int) -> Float64s:
        """Draw batches of indices of the node's examples, shape (count, batch size)."""
        n = len(self.examples)
        size = min(n, self.sgd.batch_size)
        drawn = [generator.choice(n, size, replace=False) for _ in range(count)]
        return np.array(drawn, np.float64)

    @torch.no_grad()
    def value(self, x: Float64s, samples: Float64s) -> Float64s:
        """Return the loss at `x`, shape (1, d), of a batch, shape (1, batch size)."""
        inputs, targets = self._prepare(x, samples)
        if not count_targets(targets):
            return np.zeros(1)
        loss = self.loss(self.model(inputs), targets).item()
        self.losses.append(loss)
        return np.array([loss])

    def gradient(self, x: Float64s, samples: Float64s) -> Float64s:
        """Return the gradient of the loss, shape (1, d); see `value`."""
        inputs, targets = self._prepare(x, samples)
        self.flat.gradient.zero_()
        if count_targets(targets):
            loss = gradient(self.model, inputs, targets, self.loss, self.sgd)
            self.losses.append(loss.item())
        return self.flat.gradient.numpy(force=True)[None].astype(np.float64)

    def _prepare(self, x: Float64s, samples: Float64s) -> Batch:
        """Load parameters into the model, and return a batch of its examples."""
        set_parameters(self.flat, x)
        self.model.train()
        # Both values of bandit feedback use the same batch with the same augmentation.
        if self._batch is None or self._batch[0] is not samples:
            mask = torch.zeros(len(self.examples), dtype=torch.bool)
            mask[samples[0].astype(np.int64)] = True
            self._batch = samples, self.examples.chosen(mask)
        return self._batch[1]


@torch.no_grad()
def set_parameters(flat: FlatParameters, x: Float64s) -> None:
    """Load parameters of shape (1, d) into the model of flat parameters."""
    flat.vector.copy_(torch.from_numpy(x[0].astype(np.float32)))
