"""Local training of a part of a split model, and its evaluation.

`train` and `gradient` make a call, for one client or, if clients train together
(`flwr_frl.task.training.cohort`), for several with equal calls at once. A client with a
custom step uses `flwr_frl.task.training.sgd` directly.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from flwr_frl.common.errors import TrainingDivergedError
from flwr_frl.common.settings import is_path
from flwr_frl.task.devices import RngContext, current, differentiable
from flwr_frl.task.examples import EVALUATION_BATCH, ExampleSet, Loss, are_classes
from flwr_frl.task.models.split_model import LARGE, Part, SplitModel
from flwr_frl.task.training.captured import captured
from flwr_frl.task.training.cohort import make
from flwr_frl.task.training.sgd import (
    SGD,
    Regularizer,
    diverged,
    freeze,
    run_epochs,
    trainable_examples,
)
from flwr_frl.task.training.stacked import (
    Objective,
    PooledExamples,
    StackedOptimizer,
    is_known,
    pooled,
    stacked,
    stacked_epochs,
    structure,
    tensors_of,
)

# Largest number of values of an input whose convolutions are faster together on a CPU
# (``benchmarks/results/cohort.md``).
MOST_PIXELS = 256
# Fewest clients that are faster together: for models that are stacked layer by layer,
# and for others, which `torch.func.vmap` maps.
FEWEST_IN_LAYERS, FEWEST = 3, 6


def fewest(model: SplitModel, input_size: int, only_head: bool = False) -> int | None:
    """Return the least number of models that are faster together than one by one.

    None if training together is never faster. On a GPU it is two, because the batch of
    one client does not use the whole GPU. On a CPU, large models are never faster
    together, and neither are convolutions of inputs with more than `MOST_PIXELS`
    values.

    Parameters
    ----------
    model : SplitModel
        Any of the models.
    input_size : int
        Number of values of one input.
    only_head : bool, default False
        Only heads are trained, on features.
    """
    if current().type != "cpu":
        return 2
    if only_head:
        is_large = sum(p.numel() for p in model.head.parameters()) > LARGE
        is_layered = model.has_layered_head
    else:
        convolves = any(isinstance(module, _ConvNd) for module in model.modules())
        is_large = model.is_large or (convolves and input_size > MOST_PIXELS)
        is_layered = model.is_layered
    if is_large:
        return None
    return FEWEST_IN_LAYERS if is_layered else FEWEST


@dataclass(frozen=True)
class TrainCall:
    """The arguments of `local_training.train`."""

    model: SplitModel
    part: Part
    examples: ExampleSet
    loss: Loss
    epochs: int
    sgd: SGD
    regularizer: Regularizer | None
    correction: Mapping[str, Tensor] | None

    @cached_property
    def key(self) -> Hashable:
        """Equal for calls with equal models, hyper-parameters and shapes of examples.

        None if the call must be made alone. Raises `TypeError` for a regularizer with a
        part that is neither a tensor nor hashable. Functions are equal only if they are
        the same object.
        """
        examples = self.examples
        if is_path(self.sgd.optimizer_) or len(examples) == 0:
            return None
        if not self.model.can_be_stacked(self._trial_inputs):
            return None
        return (
            self.epochs,
            self.sgd,
            type(self),
            self.model.kind,
            self.part,
            self.loss,
            structure(self.regularizer),
            structure(self.correction),
            examples.form,
        )

    @property
    def fewest(self) -> int | None:
        """See the function `fewest`."""
        input_size = self.examples.inputs.shape[1:].numel()
        return fewest(self.model, input_size, only_head=self.has_features)

    @property
    def has_features(self) -> bool:
        """True if the representation's features are computed once for all epochs."""
        if self.part != "head" or self.examples.augment:
            return False
        # Training a shared parameter changes the features.
        if self.model.is_tied:
            return False
        return self.model.observed(self._trial_inputs).has_fixed_features

    def _trial_inputs(self) -> Tensor:
        return self.examples.on(current()).first(2)

    def prepared(self) -> ExampleSet:
        """Freeze the model, and return the examples to train on, or their features."""
        freeze(self.model, self.part)
        examples = self.examples
        if self.epochs:
            examples = trainable_examples(self.model, examples, self.sgd)
        if self.has_features:
            return features_of(self.model, examples, self.sgd)
        return examples

    def alone(self) -> float:
        """Train one client's model, and return its mean loss over the last epoch."""
        if not self.epochs:
            return 0.0
        model, sgd = self.model, self.sgd
        examples, module = self.prepared(), model.part(self.part)
        forward = nn.Identity() if self.has_features else model.representation
        optimizer = sgd.optimizer(module)
        terms, parameters = self.correction or {}, model.structure.parameters
        corrected = [n for n, p in parameters.items() if n in terms and p.requires_grad]

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            optimizer.zero_grad()
            with sgd.autocast():
                features = forward(inputs)
                value = self.loss(model.head(features), targets)
                objective = value
                if self.regularizer is not None:
                    objective = value + self.regularizer(features, targets, model)
            if objective.requires_grad:  # A representation may have no parameters.
                objective.backward()  # type: ignore[no-untyped-call]
            for name in corrected:
                if (slope := parameters[name].grad) is not None:
                    slope += terms[name]
            optimizer.step()
            return value.detach()

        batches = partial(examples.batches, sgd.batch_size, shuffle=True)
        return run_epochs(step, batches, self.epochs, sgd)

    @staticmethod
    def together(
        calls: Sequence["TrainCall"], streams: Sequence[RngContext]
    ) -> list[float | TrainingDivergedError]:
        """Train several clients' models at once; see `cohort.Call.together`."""
        examples = [call.prepared() for call in calls]
        constants = [tensors_of(call.regularizer) for call in calls]
        state = stacked([call.model.tensors for call in calls])
        means = calls[0].on_rows(
            state,
            examples,
            [torch.stack(each) for each in zip(*constants, strict=True)],
            stacked([call.correction or {} for call in calls]),
            streams,
        )
        with torch.no_grad():
            for i, call in enumerate(calls):
                for name, tensor in call.model.tensors.items():
                    tensor.copy_(state[name][i])
        return means

    def on_rows(
        self,
        state: dict[str, Tensor],
        examples: Sequence[ExampleSet],
        constants: list[Tensor],
        correction: dict[str, Tensor],
        streams: Sequence[RngContext],
    ) -> list[float | TrainingDivergedError]:
        """Train several models, which are rows of stacked tensors, as this call does.

        Parameters
        ----------
        state : dict of str to Tensor
            The models' stacked tensors, which are changed in place. This call's own
            model is frozen, but not changed.
        examples : sequence of ExampleSet
            The examples, or the features, that each model trains on.
        constants : list of Tensor
            The stacked tensors of the regularizers.
        correction : dict of str to Tensor
            The stacked corrections.
        streams : sequence of RngContext
            The random numbers of each client.

        Returns
        -------
        list
            The mean loss over the last epoch, or the error, of each model.
        """
        # The largest sets first, so that the models of each step are a slice.
        order = sorted(range(len(examples)), key=lambda i: -len(examples[i]))
        given = state
        if order != sorted(order):
            place = torch.tensor(order).to(examples[0].device)
            state = {name: tensor[place] for name, tensor in state.items()}
            constants = [tensor[place] for tensor in constants]
            correction = {name: tensor[place] for name, tensor in correction.items()}
            examples = [examples[i] for i in order]
            streams = [streams[i] for i in order]
        sgd = self.sgd
        objective = Objective(
            self.model, self.loss, self.regularizer, self.has_features
        )
        training = captured(
            StackedOptimizer(objective, state, constants, correction, sgd),
            # Steps are the same for any number of epochs.
            cast(tuple[Hashable, ...], self.key)[2:],
        )
        own = not self.has_features
        pool = pooled(tuple(examples)) if own else PooledExamples(examples)
        # cross_entropy is not a mean over the examples if it ignores some targets.
        pads = objective.can_be_padded and not pool.has_ignored
        epochs = stacked_epochs(pool, self.epochs, sgd.batch_size, streams, pads)
        # The sums stay on the device until the end, so that no epoch waits for a GPU.
        sums = torch.zeros(
            max(1, self.epochs), 2, len(examples), device=examples[0].device
        )
        for of_epoch, batches in zip(sums, epochs, strict=False):
            for each in batches:
                training.run(each, of_epoch)
        if training.state is not state:
            for name, tensor in state.items():
                tensor.copy_(training.state[name])
        if state is not given:
            for name, tensor in given.items():
                tensor[place] = state[name]
        means = (sums[:, 0] / sums[:, 1].clamp(min=1)).T.tolist()
        results = {i: self._result(mean) for i, mean in zip(order, means, strict=True)}
        return [results[i] for i in sorted(results)]

    def _result(self, means: Sequence[float]) -> float | TrainingDivergedError:
        """Return the last of the means of one client's epochs, or its error."""
        for epoch, mean in enumerate(means):
            if not math.isfinite(mean):
                return diverged(mean, epoch, self.sgd)
        return means[-1]


@torch.no_grad()
def features_of(model: SplitModel, examples: ExampleSet, sgd: SGD) -> ExampleSet:
    """Return the examples with features, computed in the model's mode, as inputs."""
    size, features, targets = EVALUATION_BATCH, list[Tensor](), list[Tensor]()
    batches = examples.batches(size)
    # Takes less time for the examples of most clients.
    if len(examples) <= size:
        batches = iter([(examples.first(size), examples.targets.to(examples.device))])
    with sgd.autocast():
        for inputs, target in batches:
            feature = model.representation(inputs)
            # bfloat16 becomes float32.
            precise = torch.promote_types(feature.dtype, torch.float32)
            features.append(feature.to(precise))
            targets.append(target)
    drop = examples.drop_single
    return ExampleSet(torch.cat(features), torch.cat(targets), drop_single=drop)


def features_of_all(
    model: SplitModel, sets: Sequence[ExampleSet], sgd: SGD
) -> list[ExampleSet] | None:
    """Return several sets as `features_of` does, but at once.

    None if they are too large to pool, or if the features of an example may depend on
    others, as in a user's module.
    """
    pool = pooled(tuple(sets))
    together = pool.as_one()
    if together is None or not is_known(model.representation.modules()):
        return None
    features = features_of(model, together, sgd)
    inputs, targets = features.inputs, features.targets
    parts = torch.split(inputs, pool.sizes), torch.split(targets, pool.sizes)
    return [
        ExampleSet(x, y, drop_single=each.drop_single)
        for x, y, each in zip(*parts, sets, strict=True)
    ]


@dataclass(frozen=True)
class GradientCall:
    """The arguments of `local_training.gradient`."""

    model: SplitModel
    inputs: Tensor
    targets: Tensor
    loss: Loss
    sgd: SGD

    @cached_property
    def key(self) -> Hashable:
        """Equal for calls with equal models, losses and shapes of batches.

        None if the call must be made alone.
        """
        if not self.model.can_be_stacked(lambda: self.inputs[:2]):
            return None
        x, y = self.inputs, self.targets
        form = x.shape, x.dtype, y.shape, y.dtype
        modes = tuple(module.training for module in self.model.modules())
        trained = tuple(p.requires_grad for p in self.model.parameters())
        bfloat16 = self.sgd.bfloat16
        return type(self), self.model.kind, self.loss, form, bfloat16, modes, trained

    @property
    def fewest(self) -> int | None:
        """See the function `fewest`."""
        return fewest(self.model, self.inputs[:1].numel())

    def alone(self) -> Tensor:
        """Compute one client's gradient, and return the loss."""
        with differentiable(self.model):
            with self.sgd.autocast():
                loss = self.loss(self.model(self.inputs), self.targets)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().float()

    @staticmethod
    def together(
        calls: Sequence["GradientCall"], streams: Sequence[RngContext]
    ) -> list[Tensor]:
        """Compute several clients' gradients at once; see `cohort.Call.together`."""
        first = calls[0]
        state = stacked([call.model.tensors for call in calls])
        parameters = dict(first.model.named_parameters())
        trained = [name for name, p in parameters.items() if p.requires_grad]
        batch = (
            torch.stack([call.inputs for call in calls]),
            torch.stack([call.targets for call in calls]),
        )
        with differentiable(first.model), first.sgd.autocast():
            gradients, losses = Objective(first.model, first.loss).gradients(
                state, trained, batch, []
            )
        for i, call in enumerate(calls):
            for name, gradient in zip(trained, gradients, strict=True):
                parameter = call.model.tensors[name]
                if gradient is not None:
                    if parameter.grad is None:
                        # torch's fused SGD expects the memory format of the parameter.
                        parameter.grad = torch.zeros_like(parameter)
                    parameter.grad.add_(gradient[i])
            for name in state.keys() - parameters.keys():
                call.model.tensors[name].copy_(state[name][i])
        return list(losses.float().unbind())


def train(
    model: SplitModel,
    part: Part,
    examples: ExampleSet,
    loss: Loss,
    epochs: int,
    sgd: SGD,
    regularizer: Regularizer | None = None,
    correction: Mapping[str, Tensor] | None = None,
) -> float:
    """Train a part of a model on a client's examples; the other part stays unchanged.

    If the representation is frozen and nothing random happens before the head (no
    augmentation, no dropout), its features are computed once for all epochs. A
    parameter that both parts share is trained with either of them, and then features
    are computed in each step.

    Parameters
    ----------
    model : SplitModel
        On the device of this process (`devices.current`). Only the named part is
        modified, in place.
    part : {"head", "representation", "all"}
        The part to train.
    examples : ExampleSet
        The client's training examples, on any device.
    loss : callable
        Maps a batch's outputs and targets to the mean over the batch. `loop` lists the
        batches that are skipped.
    epochs : int
        Passes over the examples; 0 does nothing.
    sgd : SGD
        The hyper-parameters.
    regularizer : callable, optional
        Maps a batch's features and targets and the model to a value added to the loss.
        Clients can train together if it is a dataclass of tensors and hashable values,
        such as `Proximal`, or the same function for all of them. Otherwise each client
        trains alone.
    correction : mapping of str to Tensor, optional
        Added to the gradients of the parameters of these names in every step.

    Returns
    -------
    float
        Mean loss over the last epoch, without the regularizer; 0 without epochs.

    Raises
    ------
    TrainingDivergedError
        If the loss is no longer finite.
    """
    examples = examples.on(current())
    terms = regularizer, correction
    call = TrainCall(model, part, examples, loss, epochs, sgd, *terms)
    return cast(float, make(call))


def gradient(
    model: SplitModel, inputs: Tensor, targets: Tensor, loss: Loss, sgd: SGD
) -> Tensor:
    """Add the gradient of a batch's loss to the gradients of all parameters.

    Parameters
    ----------
    model : SplitModel
        In training mode, with parameters that require gradients.
    inputs, targets : Tensor
        The batch.
    loss : callable
        Maps a batch's outputs and targets to the mean over the batch.
    sgd : SGD
        Determines whether the forward pass runs in bfloat16.

    Returns
    -------
    Tensor
        The loss, detached.
    """
    inputs, targets = inputs.to(current()), targets.to(current())
    return cast(Tensor, make(GradientCall(model, inputs, targets, loss, sgd)))


@torch.no_grad()
def evaluate(
    model: SplitModel, examples: ExampleSet, loss: Loss
) -> tuple[float, float]:
    """Return a model's mean loss and accuracy on a client's examples.

    Parameters
    ----------
    model : SplitModel
        The model; left in evaluation mode.
    examples : ExampleSet
        The client's test examples.
    loss : callable
        Maps a batch's outputs and targets to the mean over the batch.

    Returns
    -------
    loss : float
        Mean over the examples; NaN without examples.
    accuracy : float
        Share of targets whose class has the largest output, from 0 to 1; NaN if targets
        are not integers, the model has one output, or there are no examples.
    """
    model.eval()
    batches = examples.on(current()).batches(EVALUATION_BATCH)
    return _means(((model(inputs), targets) for inputs, targets in batches), loss)


@torch.no_grad()
def evaluate_each(
    model: SplitModel, sets: Sequence[ExampleSet], loss: Loss
) -> list[tuple[float, float]]:
    """Return the results of `evaluate` for each of several clients' examples.

    All examples form a single batch, so the model must treat them independently.
    """
    model.eval()
    here = [examples.on(current()) for examples in sets]
    inputs = [examples.first(len(examples)) for examples in here]
    outputs = model(torch.cat(inputs)).split([len(examples) for examples in here])
    pairs = zip(outputs, here, strict=True)
    return [_means([(o, e.targets.to(e.device))], loss) for o, e in pairs]


def _means(batches: Iterable[tuple[Tensor, Tensor]], loss: Loss) -> tuple[float, float]:
    """Return the mean loss and the accuracy of batches of outputs and targets."""
    total, correct, counted, classes = 0.0, 0, 0, False
    for outputs, targets in batches:
        classes = are_classes(targets, outputs.shape[1:2])
        # A sequence has a class at every position; ignored ones are negative.
        n = int((targets >= 0).sum()) if classes else len(targets)
        if n:
            total += loss(outputs, targets).item() * n
            counted += n
        if classes:
            correct += int((outputs.argmax(1) == targets).sum())
    if counted == 0:
        return float("nan"), float("nan")
    return total / counted, correct / counted if classes else float("nan")
