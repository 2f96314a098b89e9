"""Base classes of tasks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from flwr_frl.common.errors import SettingsError, require
from flwr_frl.common.run_cache import run_object
from flwr_frl.task.checks import check_head, check_model, check_part
from flwr_frl.task.devices import CPU, current, memory, seeded
from flwr_frl.task.examples import ExampleSet, Loss
from flwr_frl.task.metrics import Metric, check_metrics
from flwr_frl.task.models.frozen import new_model
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.models.weights import load_weights

# Clients' examples take at most 1/PART of the device's memory, as several Ray workers,
# each with its own copies, may share the device.
PART = 8


class ResidentExamples:
    """Examples of the latest task, on this process's device as long as they fit."""

    def __init__(self) -> None:
        self.task: BaseTask | None = None
        self.sets: dict[tuple[str, int], ExampleSet] = {}
        self.room = 0


class BaseTask(ABC):
    """A learning problem: a model, each client's examples, a loss and metrics.

    All clients start from the same model.

    Attributes
    ----------
    loss : callable
        Loss of a batch's outputs and targets: the mean over the batch.
    classes : tuple of str
        Class names in the order of the outputs; empty if targets are numbers.
    metrics : mapping of str to callable
        Metrics besides loss and accuracy.
    """

    # Reason why local training cannot be used for this task; empty if it can.
    untrainable: ClassVar[str] = ""
    # True if the model's layers can have adapters.
    adaptable: ClassVar[bool] = True
    # Number of successors with which a training example overlaps.
    overlap: int = 0
    # Names of the clients in order, if the data is split over named clients.
    client_names: tuple[str, ...] = ()
    # Numbers, means and deviations of the columns of a device's table, if those of all
    # devices together scale its inputs.
    column_statistics: Sequence[float] = ()
    # Remarks on how the task was set up, for the user.
    notes: tuple[str, ...] = ()
    # Settings without effect on this task, each with the reason.
    unused_settings: Mapping[str, str] = MappingProxyType({})
    metrics: Mapping[str, Metric] = MappingProxyType({})
    loss: Loss
    classes: tuple[str, ...]
    # True if some training examples were set aside for validation.
    held_out: bool = False

    @abstractmethod
    def initial_model(self) -> SplitModel:
        """Return a new model, the same for every client and every call."""

    @abstractmethod
    def train_examples(self, client: int) -> ExampleSet:
        """Return the training examples of a client, whose index starts at 0."""

    @abstractmethod
    def test_examples(self, client: int) -> ExampleSet:
        """Return a client's test examples."""

    def resident(self, part: Literal["train", "test"], client: int) -> ExampleSet:
        """Return a client's training or test examples, on the device if they fit.

        Parameters
        ----------
        part : {"train", "test"}
            Which examples.
        client : int
            Index of the client, as in `train_examples`.

        Returns
        -------
        ExampleSet
            With batches on the device of this process. All clients' examples together
            take at most an eighth of its memory; further ones stay where they are, and
            their batches are moved one by one.
        """
        read = self.train_examples if part == "train" else self.test_examples
        if current() == CPU:
            return read(client)
        held = run_object(ResidentExamples)
        if held.task is not self:
            held.task, held.sets, held.room = self, {}, memory() // PART
        key = part, client
        if key not in held.sets:
            examples = read(client)
            if examples.num_bytes > held.room:
                return examples.on(current())
            held.room -= examples.num_bytes
            held.sets[key] = examples.moved(current())
        return held.sets[key]

    @cached_property
    def _initial(self) -> tuple[SplitModel, dict[str, Tensor]]:
        """Initial model and a copy of its state, cached, as initialising takes time."""
        model = new_model(self)
        check_model(model)
        return model, deepcopy(model.state_dict())

    @cached_property
    def scratch_model(self) -> SplitModel:
        """Model that all clients of a process share; its content is arbitrary.

        Raises
        ------
        SettingsError
            If the initial model has only frozen parameters, or if its state dict
            contains uninitialised, 16-bit or non-finite values.
        """
        return self._initial[0]

    @cached_property
    def initial_state(self) -> dict[str, Tensor]:
        """State dict of the common initial model. Treat it as read-only."""
        return self._initial[1]

    def forget_model(self) -> None:
        """Build the model anew when it is used next."""
        for name in ("_initial", "scratch_model", "initial_state"):
            vars(self).pop(name, None)

    def check(self, client: int) -> None:
        """Try the model, the loss and the metrics on a client's first examples.

        Examples like those of a client that has been tried are not tried again.
        """
        for part in ("train", "test"):
            try:
                examples = getattr(self, f"{part}_examples")(client)
                allowed = "an ExampleSet (ExampleSet.from_dataset converts a Dataset)"
                is_set = isinstance(examples, ExampleSet)
                require(is_set, "the value", examples, allowed, "settings")
                if len(examples) > 0:
                    check_part(self, part, examples)
            except SettingsError as error:
                name = self.client_names[client] if self.client_names else client
                line = f"{part} examples of client {name}: {error}"
                raise SettingsError(line, error.code) from error

    @cached_property
    def accepted_forms(self) -> dict[Hashable, int]:
        """Forms of tried examples, each with its number of classes, 0 for numbers."""
        return {}

    def check_model(self, examples: ExampleSet) -> None:  # noqa: B027
        """Check the model on a client's examples, before it is tried on them."""

    def read(self, line: str) -> Tensor:
        """Return the comma-separated numbers of a line, as float32."""
        try:
            return torch.tensor([float(cell) for cell in line.split(",")])
        except ValueError as error:
            raise SettingsError(f"{error}; expected numbers and commas") from None


@dataclass(frozen=True, eq=False)
class ExampleTask(BaseTask):
    """A task from a custom model, examples and a loss.

    Parameters
    ----------
    model : callable
        Returns a new `SplitModel`, or any other module together with ``head``. The seed
        determines what it draws at random.
    train, test : sequence of ExampleSet, or mapping of str to ExampleSet
        Examples of each client; a mapping has the clients' names as keys. A custom
        sequence may read examples on access.
    loss : callable, default cross-entropy
        Maps a batch's outputs and targets to the mean over the batch.
    classes : tuple of str, default ()
        Class names in the order of the outputs; empty if targets are numbers.
    seed : int, optional
        Seed of the initial model; the run's seed by default, 0 without a run.
    head : str, default ""
        Dotted name of the submodule that is the head, if the model is not split; by
        default the last of the ``modules_to_save`` of a ``peft`` model.
    weights : str, default ""
        A ``.pth`` or ``.safetensors`` file with pretrained weights; a head of another
        shape keeps its initial values.
    metrics : mapping of str to callable, default {}
        Each maps all outputs and targets of a client's test examples to a number.
    reader : callable, optional
        Maps a line of text to one example's inputs, for predictions. By default, a line
        has comma-separated numbers.

    Raises
    ------
    SettingsError
        If the model is a module instead of a function, the classes are not a sequence,
        a metric's name is reserved, or a named client has only training or only test
        examples; later, if two calls of ``model`` return the same parameters.
    """

    model: Callable[[], nn.Module]
    train: Sequence[ExampleSet] | Mapping[str, ExampleSet]
    test: Sequence[ExampleSet] | Mapping[str, ExampleSet]
    loss: Loss = nn.functional.cross_entropy
    classes: tuple[str, ...] = ()
    seed: int | None = None
    head: str = ""
    weights: str = ""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    reader: Callable[[str], Tensor] | None = None

    def __post_init__(self) -> None:
        """Check types, names and lengths."""
        is_function = not isinstance(self.model, nn.Module)
        require(is_function, "model", self.model, "a function that returns a new one")
        check_metrics(self.metrics)
        if isinstance(self.train, Mapping) and isinstance(self.test, Mapping):
            unpaired = sorted(map(str, {*self.train} ^ {*self.test}))
            named = "clients in only one of train and test"
            require(not unpaired, f"the list of {named}", unpaired, "empty")
            names = tuple(self.train)
            object.__setattr__(self, "client_names", tuple(map(str, names)))
            for part, sets in (("train", self.train), ("test", self.test)):
                object.__setattr__(self, part, [sets[name] for name in names])
        for name in ("train", "test"):
            sets = getattr(self, name)
            valid = hasattr(sets, "__getitem__") and not isinstance(sets, Mapping)
            allowed = "a sequence of the clients' ExampleSets, or two mappings of them"
            require(valid, name, type(sets), allowed)

    def initial_model(self) -> SplitModel:
        """Return a new model, initialised from the seed or the weights' file."""
        with seeded(self.seed or 0):
            module = self.model()
        require(isinstance(module, nn.Module), "model()", module, "an nn.Module")
        name, model = type(module).__name__, module
        if not isinstance(model, SplitModel):
            model = SplitModel.wrap(module, self.head)
        if self.weights:
            load_weights(model, self.weights, name)
        return model

    def check_model(self, examples: ExampleSet) -> None:
        """Check that each model is a new one, and that its head is its last layer."""
        with seeded(self.seed or 0):
            module = self.model()
        first = {p.data_ptr() for p in self.scratch_model.parameters()}
        # Empty tensors, and tensors without data, are at 0.
        if first & {p.data_ptr() for p in module.parameters()} - {0}:
            raise SettingsError(
                f"model() returns a {type(module).__name__} with parameters that it "
                "has returned before; each call must make a new one, or all clients "
                "would train the same parameters"
            )
        if not isinstance(module, SplitModel):
            inputs = examples.on(CPU).first(2)
            check_head(module, self.head or self.scratch_model.head_name, inputs)

    def train_examples(self, client: int) -> ExampleSet:
        """Return a client's training examples."""
        return self._of("train", client)

    def test_examples(self, client: int) -> ExampleSet:
        """Return a client's test examples."""
        return self._of("test", client)

    def _of(self, part: str, client: int) -> ExampleSet:
        sets: Sequence[ExampleSet] = getattr(self, part)
        allowed = f"below {len(sets)}, the number that {part} has; lower num-clients"
        require(client < len(sets), "client", client, allowed, "num-clients")
        return sets[client]

    def read(self, line: str) -> Tensor:
        """Return the inputs that ``reader`` returns for a line."""
        return super().read(line) if self.reader is None else self.reader(line)


# The type of all tasks.
Task = BaseTask
