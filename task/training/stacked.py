"""Several models as one: tensors with a leading dimension for the models.

`stacked_epochs` stacks the batches of several clients, `Objective` computes losses and
gradients of stacked models, and `StackedOptimizer` trains them with the arithmetic of
torch's optimisers.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from flwr_frl.common.run_cache import run_cache
from flwr_frl.task.devices import RngContext
from flwr_frl.task.examples import Batch, Crops, ExampleSet, Loss, cropped
from flwr_frl.task.models.layers import StackedNorms, applied, mean_losses
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.training.sgd import SGD, Proximal

Tensors = dict[str, Tensor]
# Losses that are means over the examples.
MEANS = (nn.functional.cross_entropy, nn.functional.mse_loss)
# Packages whose modules compute the same function in every call.
KNOWN = "torch", "torchvision", "flwr_frl"
# Added to a norm by which gradients are divided, as in torch.
SMALLEST_NORM = 1e-6
# torch's defaults for Adam.
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
# Pooled inputs are copied if they have at most this many bytes.
POOLED_BYTES = 2**26
# Values of inputs that are prepared at once: on a CPU as many as fit in its cache.
MOST_ON_CPU, MOST_ON_GPU = 2**16, 2**22


class StackedBatch(NamedTuple):
    """One batch of each of several clients, or such batches of successive steps.

    Parameters
    ----------
    tensors : tuple of Tensor, shape (members, batch, ...)
        Inputs, targets and, if batches are padded, weights: 1 for examples and 0 for
        padding. For several steps, steps are a further dimension in front.
    members : slice
        The clients.
    """

    tensors: tuple[Tensor, ...]
    members: slice

    @property
    def counts(self) -> Tensor | int:
        """Number of each client's examples."""
        _, targets, *weights = self.tensors
        return weights[0].sum(1) if weights else targets.shape[1]

    def steps(self) -> Iterator["StackedBatch"]:
        """Yield the batch of each step."""
        for tensors in zip(*self.tensors, strict=True):
            yield StackedBatch(tensors, self.members)


class PooledExamples:
    """Examples of several clients, from which rows of all are taken at once.

    Parameters
    ----------
    sets : sequence of ExampleSet
        The clients' examples, of one `ExampleSet.form`.
    """

    def __init__(self, sets: Sequence[ExampleSet]) -> None:
        self.sets = sets
        self.sizes = [len(each) for each in sets]
        self.place = sets[0].device
        self.input_size = sets[0].inputs.shape[1:].numel()
        # Device of the inputs, which may differ from that of the batches.
        self.device = sets[0].inputs.device
        counts = torch.tensor(self.sizes)
        self._starts = (counts.cumsum(0) - counts)[:, None].to(self.device)
        self._targets = torch.cat([each.targets for each in sets])

    @cached_property
    def has_ignored(self) -> bool:
        """True if cross-entropy ignores some of the targets."""
        return not self._targets.is_floating_point() and int(self._targets.min()) < 0

    @cached_property
    def _inputs(self) -> Tensor | None:
        if sum(each.num_bytes for each in self.sets) > POOLED_BYTES:
            return None
        rows = [slice(None) if each.rows is None else each.rows for each in self.sets]
        pairs = zip(self.sets, rows, strict=True)
        return torch.cat([each.inputs[r] for each, r in pairs])

    def as_one(self) -> ExampleSet | None:
        """Return all examples, one set after the other; None if they are too large."""
        if self._inputs is None:
            return None
        return replace(
            self.sets[0], inputs=self._inputs, targets=self._targets, rows=None
        )

    def take(self, clients: slice | Tensor, rows: Tensor, crops: Crops = ()) -> Batch:
        """Return examples of some clients, prepared as in `ExampleSet.batches`.

        Parameters
        ----------
        clients : slice or Tensor of int64
            Their places among the sets.
        rows : Tensor, shape (steps, clients, count)
            The examples of each client, int64.
        crops : tuple of Tensor, shape (steps, clients, count, 1), optional
            Random numbers of `cropped` for each of them.

        Returns
        -------
        tuple of Tensor, shape (steps, clients, count, ...)
            Inputs and targets.
        """
        places = (rows + self._starts[clients]).flatten()
        if self._inputs is None:
            sets = [self.sets[i] for i in torch.arange(len(self.sets))[clients]]
            chosen = [
                each.inputs[r if each.rows is None else each.rows[r]]
                for each, r in zip(sets, rows.unbind(1), strict=True)
            ]
            inputs = torch.stack(chosen, 1).flatten(0, 2)
        else:
            # Takes a quarter of the time of indexing.
            inputs = self._inputs.index_select(0, places)
        inputs = inputs.to(self.place)
        if crops:
            inputs = cropped(inputs, *(each.flatten(0, 2) for each in crops))
        x = self.sets[0].normalised(inputs)
        y = self._targets.index_select(0, places).to(self.place)
        return torch.unflatten(x, 0, rows.shape), torch.unflatten(y, 0, rows.shape)


@run_cache(maxsize=1)
def pooled(sets: tuple[ExampleSet, ...]) -> PooledExamples:
    """Return the pool of sets, most of which are trained on in every round."""
    return PooledExamples(sets)


def stacked_epochs(
    pool: PooledExamples,
    epochs: int,
    batch_size: int,
    streams: Sequence[RngContext],
    pads: bool,
) -> Iterator[Iterator[StackedBatch]]:
    """Yield each epoch's batches, stacked for steps of all models.

    An epoch has all examples once, each client's in its own order. Successive steps of
    the same clients are prepared at once, as many as `steps_at_once` allows.

    Parameters
    ----------
    pool : PooledExamples
        The examples of each client, of which the largest sets come first.
    epochs : int
        Number of epochs.
    batch_size : int
        Examples per batch.
    streams : sequence of RngContext
        The clients' random numbers.
    pads : bool
        Whether a smaller last batch is padded. Where clients differ in size, training
        is then up to 2.9 times as fast. Otherwise, as for models whose examples affect
        each other, there is one batch for each size of the last batches.
    """
    # All at once, as restoring a client's generators takes as long as a draw.
    drawn = []
    for examples, stream in zip(pool.sets, streams, strict=True):
        with stream:
            drawn.append([examples.drawn(batch_size) for _ in range(epochs)])
    if not epochs:
        return
    # The example that is left out is drawn, too.
    dropped = [e.drop_single and len(e) % batch_size == 1 for e in pool.sets]
    counts = torch.tensor(pool.sizes) - torch.tensor(dropped, dtype=torch.int64)
    longest = int(counts.max())
    # The draws of all epochs, (epochs, clients, places, ...). They are moved to a GPU
    # only once, as each transfer waits for the steps before it.
    columns = []
    for column in zip(*chain.from_iterable(zip(*drawn, strict=True)), strict=True):
        padded = nn.utils.rnn.pad_sequence([*column], batch_first=True)
        more = [0, 0] * (padded.ndim - 2) + [0, -longest % batch_size]
        table = torch.unflatten(nn.functional.pad(padded, more), 0, (epochs, -1))
        columns.append(table.to(pool.device))
    # First example, size and clients of each step of an epoch.
    steps = [
        (start, size, members)
        for start in range(0, longest, batch_size)
        for size, members in _groups(counts - start, batch_size, pads)
    ]
    most = steps_at_once(batch_size * len(counts) * pool.input_size, pool.device)
    plan = []
    for of_run, run in groupby(steps, key=itemgetter(1, 2)):
        starts = [start for start, *_ in run]
        plan += [(starts[i : i + most], *of_run) for i in range(0, len(starts), most)]
    # 1 for the examples of each client, and 0 for padding.
    present = (torch.arange(columns[0].shape[2]) < counts[:, None]).float()
    present = present.to(pool.place)

    def prepared(epoch: int, starts: list[int], size: int, members: slice) -> Any:
        def of_steps(values: Tensor) -> Tensor:
            values = values[members, starts[0] : starts[-1] + size]
            return torch.unflatten(values, 1, (-1, size)).transpose(0, 1)

        rows, *crops = (of_steps(each[epoch]) for each in columns)
        x, y = pool.take(members, rows, tuple(crops))
        if not pads:
            return StackedBatch((x, y), members)
        weights = of_steps(present).contiguous()
        return StackedBatch((x.contiguous(), y, weights), members)

    for epoch in range(epochs):
        yield (prepared(epoch, *each) for each in plan)


def steps_at_once(numbers: int, device: torch.device) -> int:
    """Return the number of steps whose inputs are prepared at once.

    Parameters
    ----------
    numbers : int
        Number of values of all clients' inputs in one step.
    device : torch.device
        Device of the inputs.
    """
    limit = MOST_ON_CPU if device.type == "cpu" else MOST_ON_GPU
    return max(1, limit // max(1, numbers))


def _groups(left: Tensor, batch_size: int, pads: bool) -> Iterator[tuple[int, slice]]:
    """Yield sizes of batches, and the clients that have so many examples left.

    ``left`` decreases, so that these clients stand one after the other.
    """
    sizes = left.clamp(0, batch_size)
    if pads:
        sizes = (sizes > 0) * batch_size
    for size in sorted({*sizes.tolist()} - {0}):
        first, last = (sizes == size).nonzero().flatten()[[0, -1]].tolist()
        yield size, slice(first, last + 1)


def is_known(modules: Iterable[nn.Module]) -> bool:
    """Return whether no code of a user is in some modules."""
    return all(
        type(module).__module__.partition(".")[0] in KNOWN
        and "forward" not in vars(module)
        for module in modules
    )


def structure(value: Any) -> Hashable:
    """Return a value that is equal for objects whose tensors can be stacked.

    Parameters
    ----------
    value : object
        A tensor, a mapping of names to tensors, a frozen dataclass of these, or
        anything hashable.

    Raises
    ------
    TypeError
        If a part of it can be neither stacked nor hashed.
    """
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if (parts := _parts(value)) is not None:
        return type(value), *((name, structure(part)) for name, part in parts.items())
    hash(value)
    return cast(Hashable, value)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in an object, in the order of `structure`."""
    if isinstance(value, Tensor):
        return [value]
    parts = _parts(value) or {}
    return [tensor for part in parts.values() for tensor in tensors_of(part)]


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a copy of an object with its tensors replaced, in the same order."""
    if isinstance(value, Tensor):
        return next(tensors)
    if (parts := _parts(value)) is None:
        return value
    new = {name: with_tensors(part, tensors) for name, part in parts.items()}
    return new if isinstance(value, Mapping) else replace(value, **new)


def _parts(value: Any) -> Mapping[str, Any] | None:
    """Return the parts of a mapping or a dataclass by name; None for other values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value if isinstance(value, Mapping) else None


def stacked(each: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """Return tensors by name, with a leading dimension for the models."""
    return {
        name: torch.stack([tensors[name].detach() for tensors in each])
        for name in each[0]
    }


class _Holder(nn.Module):
    """Calls functions that use a model, for `functional_call`."""

    def __init__(self, model: SplitModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the function's result."""
        return function(*arguments)


@dataclass(frozen=True)
class Objective:
    """The training objective: a loss of the model's outputs, and a regularizer.

    Parameters
    ----------
    model : SplitModel
        The model.
    loss : callable
        Maps outputs and targets to the mean over a batch.
    regularizer : object, optional
        Maps features, targets and the model to a value; its tensors are passed with
        each call.
    features : bool, default False
        The inputs are already the representation's features.
    """

    model: SplitModel
    loss: Loss
    regularizer: Any = None
    features: bool = False

    @property
    def is_layered(self) -> bool:
        """True if all modules that the objective applies are layers."""
        model = self.model
        return model.has_layered_head if self.features else model.is_layered

    @property
    def can_be_padded(self) -> bool:
        """True if batches may contain examples of weight 0, which affect no others.

        This requires targets of which cross-entropy ignores none.
        """
        return self._is_plain and self.is_layered

    @property
    def is_known(self) -> bool:
        """True if no code of a user computes it, which could change between calls."""
        return self._is_plain and is_known(self.model.structure.modules)

    @property
    def _is_plain(self) -> bool:
        plain = self.regularizer is None or type(self.regularizer) is Proximal
        return plain and self.loss in MEANS

    def _together(
        self, state: Tensors, batch: Sequence[Tensor], constants: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the models' objectives and their losses alone, of shape (models,).

        See `gradients` for the parameters.
        """
        if self.is_layered:
            return self._layer_by_layer(state, constants, *batch)
        if batch[0].device.type != "cpu":
            # The memory format in which GPUs were measured (benchmarks/results/gpu.md).
            batch = [tensor.contiguous() for tensor in batch]
            state = {name: tensor.contiguous() for name, tensor in state.items()}
        values: tuple[Tensor, Tensor] = self._mapped(
            self._of_one, state, constants, *batch
        )
        return values

    def _of_one(
        self, constants: list[Tensor], inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the objective and the loss alone, of one model."""
        features = inputs if self.features else self.model.representation(inputs)
        value = self.loss(self.model.head(features), targets)
        if self.regularizer is None:
            return value, value
        return value + self._regularized(constants, features, targets), value

    def _regularized(
        self, constants: list[Tensor], features: Tensor, targets: Tensor
    ) -> Tensor:
        """Return the regularizer of one model."""
        regularizer = with_tensors(self.regularizer, iter(constants))
        value: Tensor = regularizer(features, targets, self.model)
        return value

    def _mapped(
        self, function: Callable[..., Any], state: Tensors, *arguments: Any
    ) -> Any:
        """Return the results of a function that uses the model, for several models."""

        def of_one(tensors: Tensors, *arguments: Any) -> Any:
            named = {f"model.{name}": tensor for name, tensor in tensors.items()}
            return functional_call(self._holder, named, (function, *arguments))

        with StackedNorms() if self.model.structure.norms else nullcontext():
            return vmap(of_one)(state, *arguments)

    @cached_property
    def _holder(self) -> _Holder:
        return _Holder(self.model)

    def _layer_by_layer(
        self,
        state: Tensors,
        constants: list[Tensor],
        inputs: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        features, model = inputs, self.model
        if not self.features:
            features = applied(model.representation, state, "representation.", inputs)
        outputs = applied(model.head, state, "head.", features)
        value = mean_losses(self.loss, outputs, targets, weights)
        if self.regularizer is None:
            return value, value
        if type(self.regularizer) is Proximal:
            term = self._proximal(state, constants, features)
        else:
            arguments = state, constants, features, targets
            term = self._mapped(self._regularized, *arguments)
        return value + term, value

    def _proximal(
        self, state: Tensors, constants: list[Tensor], features: Tensor
    ) -> Tensor:
        """Return the models' `Proximal` terms, shape (models,)."""
        proximal = with_tensors(self.regularizer, iter(constants))
        total = features.new_zeros(len(features))
        for name, _ in self.model.named_parameters():
            if name in proximal.anchor:
                distance = state[name] - proximal.anchor[name]
                total = total + distance.square().flatten(1).sum(1)
        scaled: Tensor = proximal.weight / 2 * total
        return scaled

    def gradients(
        self,
        state: Tensors,
        names: Sequence[str],
        batch: Sequence[Tensor],
        constants: list[Tensor],
    ) -> tuple[list[Tensor | None], Tensor]:
        """Return gradients of the stacked models, and the models' losses.

        Parameters
        ----------
        state : dict of str to Tensor
            The models' stacked tensors; statistics of batch norms change in place.
        names : sequence of str
            Parameters to differentiate by.
        batch, constants
            The stacked batches, each of shape (models, batch, ...): inputs, targets
            and, if there are padded examples, weights; and the stacked tensors of the
            regularizers.

        Returns
        -------
        gradients : list of Tensor or None
            None for a parameter on which the objective does not depend.
        losses : Tensor, shape (models,)
            Without the regularizer.
        """
        state = {name: tensor.detach() for name, tensor in state.items()}
        trained = [state[name].requires_grad_() for name in names]
        objective, losses = self._together(state, batch, constants)
        if not objective.requires_grad:  # A representation may have no parameters.
            return [None for _ in names], losses
        gradients = torch.autograd.grad(objective.sum(), trained, allow_unused=True)
        return list(gradients), losses.detach()


@dataclass
class StackedOptimizer:
    """Steps of several models at once with SGD, Adam or AdamW, as in torch.

    Parameters
    ----------
    objective : Objective
        The objective; parameters of its model that require gradients are trained.
    state : dict of str to Tensor
        The models' stacked tensors, which are changed in place.
    constants : list of Tensor
        The regularizers' stacked tensors.
    correction : dict of str to Tensor
        Stacked terms that are added to gradients.
    sgd : SGD
        The optimiser and its hyper-parameters.
    """

    objective: Objective
    state: Tensors
    constants: list[Tensor]
    correction: Tensors
    sgd: SGD

    @cached_property
    def trained(self) -> list[str]:
        """Names of the trained parameters."""
        parameters = self.objective.model.structure.parameters
        return [name for name, p in parameters.items() if p.requires_grad]

    @cached_property
    def moments(self) -> dict[str, list[Tensor]]:
        """Stacked moments of the trained parameters."""
        return {n: _initial_moments(self.state[n], self.sgd) for n in self.trained}

    @property
    def all_moments(self) -> list[Tensor]:
        """The moments of all trained parameters."""
        return [moment for moments in self.moments.values() for moment in moments]

    @property
    def given(self) -> list[Tensor]:
        """All tensors that the optimiser was given."""
        return [*self.state.values(), *self.constants, *self.correction.values()]

    def run(self, batches: StackedBatch, sums: Tensor) -> None:
        """Make successive steps, and add up the losses.

        Parameters
        ----------
        batches : StackedBatch
            The batches of the steps.
        sums : Tensor, shape (2, models)
            Sums of the losses, and numbers, of the examples so far.
        """
        sums = sums[:, batches.members]
        for batch in batches.steps():
            sums[0] += self.step(batch) * batch.counts
            sums[1] += batch.counts

    def step(self, batch: StackedBatch) -> Tensor:
        """Make a step of the models that have a batch.

        Returns
        -------
        Tensor, shape (members,)
            Mean losses of the batches.
        """
        members = batch.members
        state = {name: tensor[members] for name, tensor in self.state.items()}
        with self.sgd.autocast():
            gradients, losses = self.objective.gradients(
                state,
                self.trained,
                batch.tensors,
                [constant[members] for constant in self.constants],
            )
        present: Tensors = {}
        for name, gradient in zip(self.trained, gradients, strict=True):
            if gradient is not None:
                if name in self.correction:
                    gradient = gradient + self.correction[name][members]
                present[name] = gradient
        if self.sgd.max_gradient_norm:
            present = _clipped(present, self.sgd.max_gradient_norm)
        update = _sgd_step if self.sgd.optimizer_ == "sgd" else _adam_step
        for name, gradient in present.items():
            moments = [moment[members] for moment in self.moments[name]]
            decay = 0.0 if self.sgd.is_bias(name) else self.sgd.weight_decay
            update(state[name], gradient, moments, self.sgd, decay)
        return losses


def _clipped(gradients: dict[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    """Return the gradients of several models, each model's clipped to a norm.

    Parameters
    ----------
    gradients : dict of str to Tensor, shape (models, ...)
        Gradients by the parameter's name.
    max_norm : float
        Largest norm of a model's gradient.
    """
    if not gradients:
        return gradients
    squares: Iterable[Tensor] = (
        g.flatten(1).square().sum(1) for g in gradients.values()
    )
    norms = torch.stack([*squares]).sum(0).sqrt()
    factors = (max_norm / (norms + SMALLEST_NORM)).clamp(max=1.0)
    return {
        name: gradient * factors.view(-1, *[1] * (gradient.ndim - 1))
        for name, gradient in gradients.items()
    }


def _initial_moments(parameter: Tensor, sgd: SGD) -> list[Tensor]:
    """Return the momentum of SGD, or both moments and the number of steps of Adam."""
    if sgd.optimizer_ == "sgd":
        return [torch.zeros_like(parameter)] if sgd.momentum else []
    # A model without a batch makes no step, so each model counts its own steps.
    steps = parameter.new_zeros(len(parameter))
    return [torch.zeros_like(parameter), torch.zeros_like(parameter), steps]


def _sgd_step(
    value: Tensor, gradient: Tensor, moments: list[Tensor], sgd: SGD, decay: float
) -> None:
    """Update a stacked parameter and its momentum in place."""
    if decay:
        gradient = gradient.add(value, alpha=decay)
    for momentum in moments:
        gradient = momentum.mul_(sgd.momentum).add_(gradient)
    value.sub_(gradient, alpha=sgd.learning_rate)


def _adam_step(
    value: Tensor, gradient: Tensor, moments: list[Tensor], sgd: SGD, decay: float
) -> None:
    """Update a stacked parameter and its moments in place.

    Adam (Kingma & Ba, ICLR 2015) or AdamW (Loshchilov & Hutter, ICLR 2019).
    """
    mean, square, count = moments
    if sgd.optimizer_ == "adamw":
        value.mul_(1 - sgd.learning_rate * decay)
    elif decay:
        gradient = gradient.add(value, alpha=decay)
    mean.lerp_(gradient, 1 - BETA1)
    square.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
    count += 1
    steps = count.view(-1, *[1] * (value.ndim - 1))
    # 1 − βᵗ in float32, as MPS has no float64.
    rate = sgd.learning_rate / -torch.expm1(steps * math.log(BETA1))
    root = (-torch.expm1(steps * math.log(BETA2))).sqrt()
    value.sub_(rate * mean / (square.sqrt() / root + EPSILON))
