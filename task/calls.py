"""What clients can do together: train, compute a gradient, test; alone as well."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from flwr_frl.task.cohort import RngContext, is_large
from flwr_frl.task.devices import current
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.layers import LAYERS
from flwr_frl.task.models import Part, SplitModel
from flwr_frl.task.sgd import (
    SGD,
    Loss,
    Proximal,
    Regularizer,
    TrainingDivergedError,
    can_be_left_out,
    diverged,
    freeze,
    has_ignored,
    loop,
    unchanged_where_refused,
)
from flwr_frl.task.stacked import Objective, stacked, structure, tensors_of
from flwr_frl.task.stacked_batches import FilledBatches, batches, counting
from flwr_frl.task.stacked_sgd import StackedSGD

EVALUATION_BATCH = 50
# Losses that are means over the examples.
MEANS = (nn.functional.cross_entropy, nn.functional.mse_loss)
# Modules in which the examples of a batch do not see each other, and 0 is no harm.
EXAMPLE_BY_EXAMPLE = {SplitModel, nn.Sequential, nn.LayerNorm, *LAYERS}
# Above this, on a CPU, convolutions are faster one by one (``benchmarks/cohort.py``).
MOST_PIXELS = 256
# Fewer are as fast one by one: layer by layer, and by vmap until it is recorded.
FEWEST_IN_LAYERS, FEWEST = 3, 6


def _form(examples: ExampleSet) -> Hashable:
    """Return what is equal for examples that fit into one tensor."""
    x, y = examples.inputs, examples.targets
    return x.shape[1:], x.dtype, y.shape[1:], y.dtype, examples.augment


def fewest(model: SplitModel, input_size: int) -> int | None:
    """Return how many such models are faster together than one by one, None for never.

    On a CPU they are if they are not large (`flwr_frl.task.cohort.is_large`), and where
    there are convolutions, have inputs of at most `MOST_PIXELS` numbers; and if they
    are `FEWEST_IN_LAYERS`, where they are computed layer by layer, or `FEWEST`. On a
    GPU two are: alone, one client's batch does not fill it.
    """
    if current().type != "cpu":
        return 2
    if is_large(model):
        return None
    small = input_size <= MOST_PIXELS
    if small or not any(isinstance(module, _ConvNd) for module in model.modules()):
        return FEWEST_IN_LAYERS if model.is_layered else FEWEST
    return None


@dataclass(frozen=True)
class TrainCall:
    """A call of `flwr_frl.task.training.train`, whose parameters it has."""

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
        """Equal for the same model, part, epochs, hyper-parameters and form of data.

        Raises `TypeError` for a regularizer that is no dataclass of tensors.
        """
        # Dropout would draw other numbers for a client than it does alone.
        if len(self.examples) == 0 or self.model.is_random("all", self._tried):
            return None
        if not self.model.is_plain or self.model.embeds_apart(self._tried):
            return None
        return (
            type(self),
            self.model.kind,
            self.part,
            self.epochs,
            self.sgd,
            self.loss,
            structure(self.regularizer),
            structure(self.correction),
            _form(self.examples),
        )

    @property
    def fewest(self) -> int | None:
        """As `fewest`; features are short whatever the inputs are."""
        size = 0 if self.has_features else self.examples.inputs[:1].numel()
        return fewest(self.model, size)

    @property
    def has_features(self) -> bool:
        """Whether the representation's features are computed once for all epochs."""
        frozen = self.part == "head" and not self.examples.augment
        # What learns in both parts moves the features.
        frozen = frozen and not self.model.is_tied
        return frozen and not self.model.is_random("representation", self._tried)

    def _tried(self) -> Tensor:
        return self.examples.on(current()).first(2)

    @property
    def can_be_filled(self) -> bool:
        """Whether examples that do not count may fill a batch up.

        So it is where an example has nothing to do with the others of its batch.
        """
        free = self.regularizer is None or type(self.regularizer) is Proximal
        own = self.model.head if self.has_features else self.model
        modules = all(type(m) in EXAMPLE_BY_EXAMPLE for m in own.modules())
        # What cross-entropy ignores is no part of its mean.
        targets = self.examples.targets
        ignored = not targets.is_floating_point() and int(targets.min()) < 0
        return free and self.loss in MEANS and modules and not ignored

    def alone(self) -> float:
        """Train one client."""
        model, examples, sgd = self.model, self.examples, self.sgd
        module = freeze(model, self.part)
        forward: nn.Module = model.representation
        if self.has_features:
            examples = features_of(model, examples, sgd)
            forward = nn.Identity()
        optimizer = sgd.optimizer(module)
        added = [
            (parameter, self.correction[name])
            for name, parameter in (model.named_parameters() if self.correction else ())
            if self.correction and name in self.correction and parameter.requires_grad
        ]

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
            for parameter, term in added:
                if parameter.grad is not None:
                    parameter.grad += term
            optimizer.step()
            return value.detach()

        return loop(step, examples, self.epochs, sgd)

    @staticmethod
    def together(
        calls: Sequence["TrainCall"], streams: Sequence[RngContext]
    ) -> list[float | TrainingDivergedError]:
        """Train several clients."""
        first = calls[0]
        for call in calls:
            freeze(call.model, call.part)
        examples = [call.examples for call in calls]
        if first.has_features:
            examples = [features_of(c.model, c.examples, c.sgd) for c in calls]
        each = [tensors_of(call.regularizer) for call in calls]
        training = StackedSGD(
            [call.model for call in calls],
            Objective(first.model, first.loss, first.regularizer, first.has_features),
            [torch.stack(own) for own in zip(*each, strict=True)],
            stacked([call.correction or {} for call in calls]),
            first.sgd,
            first.key,
        )
        filled = None
        if all(call.can_be_filled for call in calls):
            filled = FilledBatches(examples, first.sgd.batch_size, streams)
        # One that has nothing else is told so, alone.
        others = all(can_be_left_out(e, first.sgd) for e in examples)
        step = training.step_unless_refused if others else training.step
        device = examples[0].place
        ignoring = any(map(has_ignored, examples))
        means = torch.zeros(len(calls), device=device)
        errors: dict[int, TrainingDivergedError] = {}
        for epoch in range(first.epochs):
            total, lengths = torch.zeros(2, len(calls), device=device)
            if filled:
                for batch in filled.epoch():
                    total += training.filled_step(*batch)
                lengths += torch.tensor([len(e) for e in examples]).to(device)
            else:
                parts = batches(examples, first.sgd.batch_size, streams)
                if ignoring:
                    parts = counting(parts, len(calls))
                for inputs, targets, members in parts:
                    losses = step(inputs, targets, members)
                    if losses is None:
                        continue
                    place = slice(None) if members is None else members
                    total[place] += losses * targets.shape[1]
                    lengths[place] += targets.shape[1]
            means = total / lengths.clamp(min=1)
            for i in (~torch.isfinite(total)).nonzero().flatten().tolist():
                errors.setdefault(i, diverged(means[i].item(), epoch, first.sgd))
        training.write_back()
        return [errors.get(i, mean) for i, mean in enumerate(means.tolist())]


@torch.no_grad()
def features_of(model: SplitModel, examples: ExampleSet, sgd: SGD) -> ExampleSet:
    """Return examples with their features as inputs, in the model's present mode."""
    features, targets = [], []
    with sgd.autocast():
        for inputs, target in examples.batches(EVALUATION_BATCH):
            found = model.representation(inputs)
            # Those of bfloat16 as float32.
            features.append(found.to(torch.promote_types(found.dtype, torch.float32)))
            targets.append(target)
    return ExampleSet(torch.cat(features), torch.cat(targets))


@dataclass(frozen=True)
class GradientCall:
    """A call of `flwr_frl.task.training.gradient`, whose parameters it has."""

    model: SplitModel
    inputs: Tensor
    targets: Tensor
    loss: Loss
    sgd: SGD

    @cached_property
    def key(self) -> Hashable:
        """Equal for the same model, loss and form of a batch."""
        drawing = self.model.is_random("all", self._tried)
        apart = self.model.embeds_apart(self._tried)
        if drawing or apart or not self.model.is_plain:
            return None
        x, y = self.inputs, self.targets
        form = x.shape, x.dtype, y.shape, y.dtype
        modes = tuple(module.training for module in self.model.modules())
        learns = tuple(p.requires_grad for p in self.model.parameters())
        bfloat16 = self.sgd.bfloat16
        return type(self), self.model.kind, self.loss, form, bfloat16, modes, learns

    @property
    def fewest(self) -> int | None:
        """As `fewest`."""
        size = self.inputs[:1].numel()
        return fewest(self.model, size)

    def _tried(self) -> Tensor:
        return self.inputs[:2]

    def alone(self) -> Tensor:
        """Compute one client's."""
        with unchanged_where_refused(len(self.inputs), self.sgd), self.sgd.autocast():
            loss = self.loss(self.model(self.inputs), self.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().float()

    @staticmethod
    def together(
        calls: Sequence["GradientCall"], streams: Sequence[RngContext]
    ) -> list[Tensor]:
        """Compute several clients'."""
        first = calls[0]
        state = stacked([call.model.tensors for call in calls])
        named = first.model.named_parameters()
        own = [name for name, parameter in named if parameter.requires_grad]
        batch = (
            torch.stack([call.inputs for call in calls]),
            torch.stack([call.targets for call in calls]),
        )
        with first.sgd.autocast():
            found, losses = Objective(first.model, first.loss).gradients(
                state, own, batch, [], first.key
            )
        for i, call in enumerate(calls):
            for name, gradient in zip(own, found, strict=True):
                parameter = call.model.tensors[name]
                if gradient is None:
                    continue
                if parameter.grad is None:
                    # torch's fused SGD takes the layouts of both to be the same.
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.add_(gradient[i])
            for name in state.keys() - {n for n, _ in first.model.named_parameters()}:
                call.model.tensors[name].copy_(state[name][i])
        return list(losses.float().unbind())


@dataclass(frozen=True)
class EvaluateCall:
    """A call of `flwr_frl.task.training.evaluate`, whose parameters it has."""

    model: SplitModel
    examples: ExampleSet
    loss: Callable[[Tensor, Tensor], Tensor]

    @cached_property
    def key(self) -> Hashable:
        """Equal for the same model, loss and form of data."""
        if len(self.examples) == 0 or not self.model.is_plain:
            return None
        return type(self), self.model.kind, self.loss, _form(self.examples)

    @property
    def fewest(self) -> int | None:
        """As `fewest`."""
        size = self.examples.inputs[:1].numel()
        return fewest(self.model, size)

    @torch.no_grad()
    def alone(self) -> tuple[float, float]:
        """Test one client's model."""
        self.model.eval()
        total, right, counted, classes = 0.0, 0, 0, False
        for inputs, targets in self.examples.batches(EVALUATION_BATCH):
            outputs = self.model(inputs)
            classes = are_classes(targets, outputs.shape[1:2])
            n = int(_counted(targets[None], classes))
            if n:
                total += self.loss(outputs, targets).item() * n
                counted += n
            if classes:
                right += int((outputs.argmax(1) == targets).sum())
        if counted == 0:
            return float("nan"), float("nan")
        return total / counted, right / counted if classes else float("nan")

    @staticmethod
    @torch.no_grad()
    def together(
        calls: Sequence["EvaluateCall"], streams: Sequence[RngContext]
    ) -> list[tuple[float, float]]:
        """Test several clients' models."""
        first = calls[0]
        for call in calls:
            call.model.eval()
        state = stacked([call.model.tensors for call in calls])
        objective = Objective(first.model, first.loss)
        examples = [call.examples for call in calls]
        total, right, counted = torch.zeros(3, len(calls), dtype=torch.float64)
        classes = False
        for inputs, targets, members in batches(examples, EVALUATION_BATCH):
            place = slice(None) if members is None else members
            own = {name: tensor[place] for name, tensor in state.items()}
            _, losses, outputs = objective.together(own, (inputs, targets), [])
            classes = are_classes(targets, outputs.shape[2:3])
            n = _counted(targets, classes)
            # Not every device has doubles; and a mean over nothing is no number.
            sums = losses.cpu().double() * n
            total[place] += sums.where(n > 0, 0)
            counted[place] += n
            if classes:
                hits = outputs.argmax(2) == targets
                right[place] += hits.flatten(1).sum(1).cpu()
        shares = right / counted if classes else torch.full_like(right, float("nan"))
        return list(zip((total / counted).tolist(), shares.tolist(), strict=True))


def _counted(targets: Tensor, classes: bool) -> Tensor:
    """Return how many targets of each client count: examples, if not classes.

    A sequence has a class at every place; what cross-entropy ignores is none.
    """
    if not classes:
        return torch.full(targets.shape[:1], targets.shape[1])
    return (targets >= 0).flatten(1).sum(1).cpu()


def are_classes(targets: Tensor, width: torch.Size) -> bool:
    """Return whether targets are classes: integers, of more than one output."""
    return not targets.is_floating_point() and width.numel() > 1
