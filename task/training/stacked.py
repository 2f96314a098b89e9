"""Several models as one: tensors with a leading dimension for the models.

`stacked_epochs` stacks the batches of several clients, `Objective` computes losses and
gradients of stacked models, and `StackedOptimizer` trains them with the arithmetic of
torch's optimisers.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from flwr_frl.common.run_cache import run_cache
from flwr_frl.task.devices import RngContext
from flwr_frl.task.examples import Batch, Crops, ExampleSet, cropped
from flwr_frl.task.models.layers import applied, mean_losses
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.training.sgd import SGD, Proximal
from flwr_frl.task.training.trainer import clip_stacked
from flwr_frl.task.types import Loss

Tensors = dict[str, Tensor]
# Losses that are means over the examples.
MEANS = (nn.functional.cross_entropy, nn.functional.mse_loss)
# torch's defaults for Adam.
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
# Pooled inputs are copied if they have at most this many bytes.
POOLED_BYTES = 2**26


class StackedBatch(NamedTuple):
    """One batch of each of several clients.

    Parameters
    ----------
    inputs, targets : Tensor, shape (members, batch, ...)
        The examples.
    members : Tensor or None
        Indices of the clients, int64 on the CPU; None for all.
    weights : Tensor, shape (members, batch), or None
        1 for examples and 0 for padding; None without padding.
    """

    inputs: Tensor
    targets: Tensor
    members: Tensor | None
    weights: Tensor | None = None

    @property
    def counts(self) -> Tensor | int:
        """Number of each client's examples."""
        size: int = self.targets.shape[1]
        return size if self.weights is None else self.weights.sum(1)


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
        counts = torch.tensor(self.sizes)
        self._starts = (counts.cumsum(0) - counts)[:, None]
        self._targets = torch.cat([each.targets for each in sets])

    @cached_property
    def has_ignored(self) -> bool:
        """True if cross-entropy ignores some of the targets."""
        floats = self._targets.is_floating_point()
        return not floats and int(self._targets.min()) < 0

    @cached_property
    def _inputs(self) -> Tensor | None:
        if sum(each.num_bytes for each in self.sets) > POOLED_BYTES:
            return None
        rows = [slice(None) if each.rows is None else each.rows for each in self.sets]
        pairs = zip(self.sets, rows, strict=True)
        return torch.cat([each.inputs[r] for each, r in pairs])

    def take(self, clients: Tensor, rows: Tensor, crops: Crops = ()) -> Batch:
        """Return examples of some clients, prepared as in `ExampleSet.batches`.

        Parameters
        ----------
        clients : Tensor, shape (clients,)
            Their places among the sets, int64.
        rows : Tensor, shape (clients, count)
            The examples of each client, int64.
        crops : tuple of Tensor, shape (clients, count, 1), optional
            Random numbers of `cropped` for each of them.

        Returns
        -------
        tuple of Tensor, shape (clients, count, ...)
            Inputs and targets.
        """
        first = self.sets[0]
        places = (rows + self._starts[clients]).flatten()
        if self._inputs is None:
            sets = [self.sets[i] for i in clients.tolist()]
            chosen = [
                each.inputs[r if each.rows is None else each.rows[r]]
                for each, r in zip(sets, rows, strict=True)
            ]
            inputs = torch.cat(chosen)
        else:
            # Takes a quarter of the time of indexing.
            inputs = self._inputs.index_select(0, places.to(self._inputs.device))
        inputs = inputs.to(first.place)
        if crops:
            inputs = cropped(inputs, *(each.flatten(0, 1) for each in crops))
        x = first.normalised(inputs)
        targets = self._targets.index_select(0, places.to(self._targets.device))
        y = targets.to(first.place)
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
    """Yield each epoch's batches, stacked for one step of all models.

    An epoch has all examples once, each client's in its own order.

    Parameters
    ----------
    pool : PooledExamples
        The examples of each client.
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
    # The example that is left out is drawn, too.
    counts = torch.tensor(
        [
            n - (each.drop_single and n % batch_size == 1)
            for n, each in zip(pool.sizes, pool.sets, strict=True)
        ]
    )
    longest = int(counts.max())
    # First example, size and clients of each batch of an epoch. Indices stay on the
    # CPU, so that no step waits for a GPU.
    steps = [
        (start, size, members)
        for start in range(0, longest, batch_size)
        for size, members in _groups(counts - start, batch_size, pads)
    ]

    def batch(columns: list[Tensor], start: int, size: int, members: Tensor) -> Any:
        rows, *crops = (each[members, start : start + size] for each in columns)
        x, y = pool.take(members, rows, tuple(crops))
        weights = None
        if pads:
            x, left = x.contiguous(), counts[members] - start
            weights = (torch.arange(size) < left[:, None]).float().to(x.device)
        everyone = len(members) == len(counts)
        return StackedBatch(x, y, None if everyone else members, weights)

    padded = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    for of_epoch in zip(*drawn, strict=True):
        order, *crops = map(padded, zip(*of_epoch, strict=True))
        order = nn.functional.pad(order, (0, -longest % batch_size))
        yield (batch([order, *crops], *step) for step in steps)


def _groups(left: Tensor, batch_size: int, pads: bool) -> Iterator[tuple[int, Tensor]]:
    """Yield sizes of batches, and the clients that have so many examples left."""
    sizes = left.clamp(0, batch_size)
    if pads:
        sizes = (sizes > 0) * batch_size
    for size in sorted({*sizes.tolist()} - {0}):
        yield size, (sizes == size).nonzero().flatten()


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
        plain = self.regularizer is None or type(self.regularizer) is Proximal
        return plain and self.is_layered and self.loss in MEANS

    def _together(
        self, state: Tensors, batch: Sequence[Tensor], constants: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the models' objectives and their losses alone, of shape (models,).

        See `gradients` for the parameters.
        """
        if self.is_layered:
            return self._layer_by_layer(state, constants, *batch)
        if batch[0].device.type != "cpu":
            # `vmap` cannot map CUDA's batch norms of channels-last images, which
            # channels-last weights return, too.
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


@dataclass(frozen=True)
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

    def step(self, batch: StackedBatch) -> Tensor:
        """Make a step of the models that have a batch.

        Returns
        -------
        Tensor, shape (members,)
            Mean losses of the batches.
        """
        members = batch.members
        if members is not None:
            members = members.to(batch.inputs.device)
        tensors = batch.inputs, batch.targets, batch.weights

        def chosen(tensor: Tensor) -> Tensor:
            return tensor if members is None else tensor[members]

        state = {name: chosen(tensor) for name, tensor in self.state.items()}
        with self.sgd.autocast():
            gradients, losses = self.objective.gradients(
                state,
                self.trained,
                [tensor for tensor in tensors if tensor is not None],
                [chosen(constant) for constant in self.constants],
            )
        present: Tensors = {}
        for name, gradient in zip(self.trained, gradients, strict=True):
            if gradient is not None:
                if name in self.correction:
                    gradient = gradient + chosen(self.correction[name])
                present[name] = gradient
        if self.sgd.max_gradient_norm:
            present = clip_stacked(present, self.sgd.max_gradient_norm)
        update = _sgd_step if self.sgd.optimizer_ == "sgd" else _adam_step
        for name, gradient in present.items():
            moments = [chosen(moment) for moment in self.moments[name]]
            decay = 0.0 if self.sgd.is_bias(name) else self.sgd.weight_decay
            update(state[name], gradient, moments, self.sgd, decay)
            if members is not None:
                for moment, new in zip(self.moments[name], moments, strict=True):
                    moment[members] = new
        if members is not None:
            # `state` contains copies of parameters and of statistics of batch norms.
            for name, tensor in self.state.items():
                tensor[members] = state[name]
        return losses


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
