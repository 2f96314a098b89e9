"""What a task is, and what tasks have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flwr_frl.task.checks import check_head, check_metrics, try_examples
from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.settings import SettingsError
from flwr_frl.task.training import Loss
from flwr_frl.task.weights import load_weights

Matrix = npt.NDArray[np.float64]
# Of all outputs and targets of a client's test examples.
Metric = Callable[[Tensor, Tensor], Tensor | float]


class Task(Protocol):
    """What is learned: what every client needs to know."""

    @property
    def loss(self) -> Loss:
        """Of a batch's outputs and targets; the mean over the batch."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the outputs; none for numbers."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """What is measured besides loss and accuracy, by name."""

    @property
    def initial_state(self) -> dict[str, Tensor]:
        """State dict of the common initial model; not to be changed."""

    @property
    def scratch_model(self) -> SplitModel:
        """One model for all clients of a process, whatever its content."""

    @property
    def unused_settings(self) -> Mapping[str, str]:
        """Settings that do nothing here, by name, and why."""

    def initial_model(self) -> SplitModel:
        """Return a new model, the same for every client and every call."""

    def train_examples(self, client: int) -> ExampleSet:
        """Return a client's training examples.

        Parameters
        ----------
        client : int
            The client, from 0.

        Returns
        -------
        ExampleSet
            The examples.
        """

    def test_examples(self, client: int) -> ExampleSet:
        """Return a client's test examples, as `train_examples`."""

    def check(self, client: int) -> None:
        """Raise `SettingsError` unless a client's examples fit model, loss and metrics.

        Called once for every client, before the first round.
        """

    def read(self, line: str) -> Tensor:
        """Return one example's inputs from a line of a file, for predictions."""


class BaseTask(ABC):
    """A task whose clients all start from the same model."""

    # Why local training has nothing to train on, where it has not.
    untrainable: ClassVar[str] = ""
    # With how many of its successors a training example has parts in common.
    overlap: int = 0
    # Names of the clients, in their order, where the data is split over named ones.
    client_names: tuple[str, ...] = ()
    # What a user should know of how the task was set up.
    notes: tuple[str, ...] = ()
    metrics: Mapping[str, Metric] = MappingProxyType({})

    @property
    def unused_settings(self) -> Mapping[str, str]:
        """Settings that do nothing here, by name, and why."""
        return {}

    @abstractmethod
    def initial_model(self) -> SplitModel:
        """Return a new model, the same for every client and every call."""

    @cached_property
    def scratch_model(self) -> SplitModel:
        """One model for all clients of a process, whatever its content.

        A `SettingsError` is raised where the initial one has parameters that are
        frozen, as a part of a model learns as a whole, without a shape, or of 16 bits,
        or has numbers that are not finite.
        """
        model = self.initial_model()
        frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
        if frozen:
            raise SettingsError(
                f"the model's {frozen[0]!r} does not require a gradient; a part of a "
                "model learns as a whole: what never learns must be a buffer, and with "
                "representation-epochs=0 the representation stays"
            )
        for name, value in model.state_dict().items():
            if is_lazy(value):
                raise SettingsError(
                    f"the model's {name!r} has no shape yet; a lazy module must be "
                    "given its number of inputs, or be tried on an example by model()"
                )
            if value.dtype in (torch.float16, torch.bfloat16):
                kind = str(value.dtype).removeprefix("torch.")
                raise SettingsError(
                    f"the model's {name!r} is {kind}; it must be float32: training "
                    "computes in 16 bits with bfloat16=true"
                )
            if not value.isfinite().all():
                raise SettingsError(
                    f"the model's {name!r} is not finite; what never changes, a mask "
                    "of -inf say, must be a buffer with persistent=False"
                )
        return model

    @cached_property
    def initial_state(self) -> dict[str, Tensor]:
        """State dict of the common initial model; not to be changed."""
        return self.initial_model().state_dict()

    def check(self, client: int) -> None:
        """Try the model, the loss and the metrics on a client's first examples.

        See `try_examples`.
        """
        for part in ("train", "test"):
            examples = getattr(self, f"{part}_examples")(client)
            if not isinstance(examples, ExampleSet):
                raise SettingsError(
                    f"the {part} examples are a {type(examples).__name__}; they must "
                    "be an ExampleSet, as ExampleSet.from_dataset makes of a Dataset "
                    "(of a DataLoader: of its dataset)"
                )
            if len(examples) == 0:
                continue
            try:
                try_examples(cast(Task, self), examples)
            except SettingsError as error:
                raise SettingsError(f"{part} examples: {error}") from error

    def read(self, line: str) -> Tensor:
        """Return the numbers of a line, with commas between them, as float32."""
        try:
            return torch.tensor([float(cell) for cell in line.split(",")])
        except ValueError as error:
            raise SettingsError(f"{error}; it must be numbers and commas") from None


@dataclass(frozen=True, eq=False)
class ExampleTask(BaseTask):
    """A task from examples that are there: a model, data and a loss of one's own.

    Parameters
    ----------
    model : callable
        Returns a new `SplitModel`, or any other module together with ``head``; what it
        draws at random is fixed by the seed.
    train, test : sequence of ExampleSet, or mapping of str to ExampleSet
        Examples of each client, in a mapping by the clients' names. A sequence of one's
        own may read them when asked.
    loss : callable, default cross-entropy
        Of a batch's outputs and targets; the mean over the batch.
    classes : tuple of str, default ()
        Names of the classes, in the order of the outputs; none for numbers.
    seed : int, optional
        Fixes the initial model; the run's seed by default, 0 without a run.
    head : str, default ""
        Dotted name of the submodule that is the head, where the model is not split.
    weights : str, default ""
        A ``.pth`` or ``.safetensors`` file with the arrays to begin with; the head is
        left out where its shape differs.
    metrics : mapping of str to callable, default {}
        Each of all outputs and targets of a client's test examples; one number.
    reader : callable, optional
        Of a line of text; one example's inputs, for predictions. By default the line
        has numbers with commas between them.

    Raises
    ------
    SettingsError
        If the model is a module and no function, the classes are no sequence, a
        metric's name is taken, or one of the named clients has examples for training or
        testing only; later, if two calls of ``model`` return the same parameters.
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
        """Check what the model is: without one nothing can be tried."""
        if isinstance(self.model, nn.Module):
            raise SettingsError(
                f"model is a {type(self.model).__name__}; it must be a function that "
                "returns a new one"
            )
        if isinstance(self.train, Mapping) and isinstance(self.test, Mapping):
            if odd := sorted(map(str, {*self.train} ^ {*self.test})):
                raise SettingsError(
                    f"client {odd[0]!r} is in one of train and test; it must be in both"
                )
            names = tuple(self.train)
            object.__setattr__(self, "client_names", tuple(map(str, names)))
            for part, sets in (("train", self.train), ("test", self.test)):
                object.__setattr__(self, part, [sets[name] for name in names])
        for name in ("train", "test"):
            sets = getattr(self, name)
            if isinstance(sets, Mapping):
                raise SettingsError(
                    f"{name} is a mapping; train and test must both be one, or neither"
                )
            if not hasattr(sets, "__len__") or not hasattr(sets, "__getitem__"):
                raise SettingsError(
                    f"{name} is a {type(sets).__name__}; it must be a sequence of the "
                    "clients' ExampleSets, such as a list"
                )
        if not isinstance(self.classes, Sequence):
            raise SettingsError(
                f"classes is of type {type(self.classes).__name__}; it must be a tuple "
                "of the classes' names, () where targets are numbers"
            )
        check_metrics(self.metrics)

    def initial_model(self) -> SplitModel:
        """Return a new model with the seed's initial values, or those of the file."""
        module = self._new_module()
        name = type(module).__name__
        if not isinstance(module, SplitModel):
            module = SplitModel.wrap(module, self.head)
        if self.weights:
            load_weights(module, self.weights, name)
        return module

    def train_examples(self, client: int) -> ExampleSet:
        """Return a client's training examples."""
        return self._of("train", client)

    def test_examples(self, client: int) -> ExampleSet:
        """Return a client's test examples."""
        return self._of("test", client)

    def check(self, client: int) -> None:
        """Try first, of one client, whether the head is what the model applies last."""
        examples = self.train_examples(client)
        if self.head and isinstance(examples, ExampleSet) and len(examples):
            if "head" not in self._tried:
                module = self._new_module()
                if not isinstance(module, SplitModel):
                    inputs = examples.on(torch.device("cpu")).first(2)
                    check_head(module, self.head, inputs)
            self._tried.add("head")
        # The second model, after the scratch one: both must be new.
        super().check(client)
        self.initial_state  # noqa: B018

    def _new_module(self) -> nn.Module:
        """Return what `model` makes; `SettingsError` unless it is a new module."""
        with seeded(self.seed or 0):
            module = self.model()
        if not isinstance(module, nn.Module):
            raise SettingsError(
                f"model() returns a {type(module).__name__}; it must be an nn.Module"
            )
        own = {_place(p): p.detach() for p in module.parameters() if not is_lazy(p)}
        # Those of an empty tensor, or on no device, are at 0.
        if self._first.keys() & own.keys() - {0}:
            raise SettingsError(
                f"model() returns a {type(module).__name__} with parameters that it "
                "has returned before; each call must make a new one: what is made once "
                "outside would be trained by all clients at once"
            )
        if not self._first:
            self._first.update(own)
        return module

    @cached_property
    def _first(self) -> dict[int, Tensor]:
        """The first model's parameters by where they are, and held there."""
        return {}

    @cached_property
    def _tried(self) -> set[str]:
        return set()

    def _of(self, part: str, client: int) -> ExampleSet:
        sets: Sequence[ExampleSet] = getattr(self, part)
        if client >= len(sets):
            raise SettingsError(
                f"the task's {part} has examples of {len(sets)} clients; client "
                f"{client}, from 0, is one too many"
            )
        return sets[client]

    def read(self, line: str) -> Tensor:
        """Return what the own reader makes of a line."""
        return super().read(line) if self.reader is None else self.reader(line)


class RegressionTask(BaseTask):
    """Linear regression y ≈ wᵀ Bᵀ x on drawn examples, for training by SGD.

    Subclasses have ``dimension``, ``rank`` and ``seed``, and write `draw`.
    """

    dimension: int
    rank: int
    seed: int
    # The draw that is the test set, and its size.
    test_draw: ClassVar[int]
    test_samples: ClassVar[int]

    @abstractmethod
    def draw(
        self, client: int, draw: int = 0, samples: int | None = None
    ) -> tuple[Matrix, Matrix]:
        """Draw examples of a client.

        Parameters
        ----------
        client : int
            The client, from 0.
        draw : int, default 0
            Which batch: the same number gives the same examples; 0 is the training set.
        samples : int, optional
            How many; as many as the client has for training by default.

        Returns
        -------
        x : ndarray, shape (samples, dimension)
            Inputs.
        y : ndarray, shape (samples,)
            Outputs.
        """

    @property
    def classes(self) -> tuple[str, ...]:
        """None: the outputs are numbers."""
        return ()

    # Of (n, 1) outputs and targets.
    loss: Loss = staticmethod(nn.functional.mse_loss)

    def initial_model(self) -> SplitModel:
        """Return Bᵀ (rank × dimension) and wᵀ as linear layers without biases."""
        with seeded(self.seed):
            return SplitModel(
                nn.Linear(self.dimension, self.rank, bias=False),
                nn.Linear(self.rank, 1, bias=False),
            )

    def train_examples(self, client: int) -> ExampleSet:
        """Return a client's draw 0."""
        return _examples(*self.draw(client))

    def test_examples(self, client: int) -> ExampleSet:
        """Return ``test_samples`` examples of a client's draw ``test_draw``."""
        return _examples(*self.draw(client, self.test_draw, self.test_samples))


def _place(tensor: Tensor) -> int:
    """Return where a tensor's memory is, whatever part of it the tensor is."""
    return tensor.untyped_storage().data_ptr()


def _examples(x: Matrix, y: Matrix) -> ExampleSet:
    return ExampleSet(torch.from_numpy(x).float(), torch.from_numpy(y[:, None]).float())
