"""What all clients have in common: shared parts come and go, personal parts stay."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from flwr.client import NumPyClient
from flwr.common import NDArrays, Scalar
from torch import Tensor

from flwr_frl.clients.device.account import PrivateTraining
from flwr_frl.clients.device.evaluation import evaluate_model
from flwr_frl.clients.device.parameter_groups import Groups, Tensors, to_numpy
from flwr_frl.clients.device.personalizable import Personalizable
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.task.base import Task
from flwr_frl.task.devices import current
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.messages import (
    CLASSES_DIGEST,
    NUM_CLASSES,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    PROXIMAL_WEIGHT,
    SERVER_ROUND,
    SHARED_BYTES,
    STRUCTURE,
)
from flwr_frl.task.models import Part, SplitModel
from flwr_frl.task.resident import train_examples
from flwr_frl.task.settings import Free, Range, Settings, SettingsError, made_by
from flwr_frl.task.tasks import TASKS
from flwr_frl.task.training import (
    SGD,
    Proximal,
    Regularizer,
    TrainCall,
    scratch_model,
    train,
)

Config = dict[str, Scalar]
Reply = tuple[NDArrays, int, Config]
Evaluation = tuple[float, int, Config]
Arrays = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class TrainingSettings(SGD):
    """Local SGD of a split model.

    Parameters
    ----------
    representation_epochs : int, default 1
        Epochs of the representation, or of both parts where they train together.
    newcomer_epochs : int, default 10
        Epochs in which a client that comes after the training fits what is its own.
    augment_head : bool, default True
        Whether images are augmented while the head alone trains. Without, its features
        are computed once, and a round with 10 head epochs takes a third of the time.
    """

    representation_epochs: Annotated[int, Range("[0, inf)")] = 1
    newcomer_epochs: Annotated[int, Range("[0, inf)")] = 10
    augment_head: Annotated[bool, Free()] = True


class Client(Personalizable, NumPyClient):
    """A device: trains the shared part on its own data and keeps its personal part.

    Subclasses say which slots are shared and which are personal (`ParameterGroups`),
    and write `fit`.

    Parameters
    ----------
    task : Task
        The model, the data and the loss.
    index : int
        Which of the task's clients this is, from 0.
    state : PersonalState
        Where the personal slots are kept.
    settings : object
        A ``settings_type``.

    Attributes
    ----------
    device : torch.device
        Where model, examples, ``received`` and ``kept`` are.
    received : dict of str to Tensor
        What `receive` got from the server, by name.
    kept : dict of str to Tensor
        The personal slots: those beside the model are what `keep` keeps.
    attachments : dict of str to bytes
        What goes along with the reply besides arrays and numbers.

    Raises
    ------
    SettingsError
        If the algorithm cannot be used with the task.
    """

    settings_type: type = TrainingSettings
    # How many of a built-in model's layers are the head, where the settings say 0.
    head_layers: ClassVar[int] = 1
    # Whether the shared arrays come in the shapes that they have in this model.
    fixed_shapes: ClassVar[bool] = True
    # What the task must be.
    task_type: ClassVar[type] = object
    # Whether targets must be classes.
    needs_classes: ClassVar[bool] = False
    # Whether all that the class's own `fit` learns from examples it learns by `train`,
    # with regularizers that see each of them by itself: then it can be private.
    supports_example_dp: ClassVar[bool] = False
    # Whether what `fit` returns is a change of what was received.
    sends_changes: ClassVar[bool] = False
    # Whether the received model is tested beside the deployed one.
    also_test_global: ClassVar[bool] = False
    # Settings that a device may set for itself.
    node_settings: ClassVar[tuple[str, ...]] = (
        "data-dir",
        "cache-dir",
        "weights",
        "count-multiple",
        "device",
        "dp-noise",
        "dp-clip",
        "dp-delta",
    )
    # Whether its data are its own, and no share of a data set that all have.
    own_data = False
    # How examples are trained on with differential privacy.
    private: PrivateTraining | None = None

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Any
    ) -> None:
        self.check_task(task)
        self.task = task
        self.index = index
        self.state = state
        self.settings = settings
        self.device = current()
        # Built once a process: `receive` overwrites all of it.
        self.model = scratch_model(task)
        self.received: Tensors = {}
        self.saved: Tensors = {}
        self.attachments: dict[str, bytes] = {}
        self.proximal_weight = 0.0

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Raise `SettingsError` unless the algorithm can be used with a task."""
        if not isinstance(task, cls.task_type):
            names = [n for n, m in TASKS.items() if made_by(m) is cls.task_type]
            example = f", as of {' or '.join(names)}" if names else ""
            raise SettingsError(f"it needs a {cls.task_type.__name__}{example}")
        reason = getattr(task, "untrainable", "")
        if reason and cls.task_type is object:
            raise SettingsError(f"there is nothing to train on; {reason}")
        if cls.task_type is not object and getattr(task, "held_out", False):
            raise SettingsError("validation-fraction must be 0: it draws its examples")
        if cls.needs_classes and not task.classes:
            raise SettingsError("it needs classes, to which its heads belong")

    @classmethod
    def own_settings(cls, settings: Settings, node: Settings) -> Settings:
        """Return those settings that a client has for itself.

        Parameters
        ----------
        settings : mapping
            The run's.
        node : mapping
            The node config.
        """
        return {name: node[name] for name in cls.node_settings if name in node}

    @property
    def train_examples(self) -> ExampleSet:
        """Return this client's training examples, on the device.

        Who learns from examples asks for them here: none is a `SettingsError`. Some
        tasks have none for anybody.
        """
        examples = train_examples(self.task, self.index)
        if len(examples) == 0:
            raise SettingsError("there are no training examples")
        return examples

    @property
    def has_train_examples(self) -> bool:
        """Whether there is anything to learn from."""
        return len(self.task.train_examples(self.index)) > 0

    # Called by the server before the first round.

    def get_properties(self, config: Config) -> Config:
        """Return what the server needs to know about this client.

        Returns
        -------
        dict
            ``num-examples`` (training), ``num-test-examples``, and ``structure``: a
            digest of what must be the same for all clients. ``num-classes`` and a
            digest of the classes' names tell whether they are why it is not.
            ``shared-bytes`` is how large the shared arrays are.

        Raises
        ------
        SettingsError
            If the client's examples do not fit the task's model and loss.
        """
        self.task.check(self.index)
        if self.private:
            self.private.check(self.task.scratch_model)
        self.check_tied(self.model)
        structure = repr(self.structure()).encode()
        shared = self.initial_arrays(self.shared)
        return {
            NUM_CLASSES: len(self.task.classes or ()),
            CLASSES_DIGEST: classes_digest(self.task),
            NUM_EXAMPLES: len(self.task.train_examples(self.index)),
            NUM_TEST_EXAMPLES: len(self.task.test_examples(self.index)),
            STRUCTURE: hashlib.sha256(structure).hexdigest()[:16],
            SHARED_BYTES: sum(a.nbytes for a in shared.values()),
        }

    def get_parameters(self, config: Config) -> NDArrays:
        """Return the common initial values of ``names(shared)``, in their order."""
        return [array.numpy() for array in self.initial_arrays(self.shared).values()]

    def statistics(self, config: Config) -> Arrays:
        """Return arrays that the server asks for before the first round; none here.

        A strategy gets them by ``participants.query_arrays(grid, nodes, STATISTICS)``.
        """
        return {}

    # The steps of which `fit` and `evaluate` are made.

    def receive(self, parameters: NDArrays, config: Config) -> None:
        """Load what came from the server and what this client has kept.

        A client that has kept nothing yet begins with the common initial values.

        Parameters
        ----------
        parameters : list of ndarray
            The shared arrays, in the order of ``names(shared)``.
        config : dict
            Of the message; ``proximal-mu`` is Flower's FedProx's μ.
        """
        names = self.names(self.shared)
        received = self.tensors(dict(zip(names, parameters, strict=True)))
        # With ``transport="float16"`` they are so on the way, and only there.
        half = torch.float16
        self.received = {
            n: t.float() if t.dtype == half else t for n, t in received.items()
        }
        personal = self.initial_arrays(self.personal)
        shapes = {name: tuple(array.shape) for name, array in personal.items()}
        loaded = self.tensors(self.state.load(shapes) or {}) if personal else {}
        # Not the initial values themselves: all clients of a process share those.
        self.saved = {
            name: value.to(self.device, copy=True)
            for name, value in personal.items()
            if name not in loaded
        }
        self.saved |= loaded
        self.model.load({**self.task.initial_state, **self.saved, **self.received})
        self.proximal_weight = float(config.get(PROXIMAL_WEIGHT, 0.0))

    def train(
        self,
        part: Part,
        epochs: int,
        regularizer: Regularizer | None = None,
        correction: Mapping[str, Tensor] | None = None,
        examples: ExampleSet | None = None,
    ) -> float:
        """Train a part of the model on this client's training examples.

        Parameters
        ----------
        part : {"head", "representation", "all"}
            What is trained; the rest stays as it is to the last bit.
        epochs : int
            Passes over the examples.
        regularizer, correction
            As for `flwr_frl.task.training.train`. Where a server asks for FedProx, its
            proximal term comes on top.
        examples
            Others than all training examples: a batch of them, say.

        Returns
        -------
        float
            Mean loss over the last epoch.
        """
        if examples is None:
            examples = self.train_examples
        if part == "head" and not self.settings.augment_head:
            examples = examples.without_augmentation()
        if self.proximal_weight:
            near = Proximal(self.proximal_weight, self.received)
            regularizer = near if regularizer is None else _Sum(regularizer, near)
        model, loss, sgd = self.model, self.task.loss, self.settings
        what = model, part, examples, loss, epochs, sgd, regularizer, correction
        return self.private.train(TrainCall(*what)) if self.private else train(*what)

    def proximal(self, features: Tensor, model: SplitModel) -> Tensor | float:
        """Return μ/2 ‖w − w_received‖², for steps of one's own; 0 unless asked for."""
        if not self.proximal_weight:
            return 0.0
        near = Proximal(self.proximal_weight, self.received)
        return near(features, None, model)

    def save(self, config: Mapping[str, Scalar]) -> None:
        """Keep the personal slots as the version of ``server-round``.

        Raises `SettingsError` if something is shared and nothing was received.
        """
        self.check_received("keeps")
        kept = self.personal_arrays()
        if kept:
            self.state.save(kept, int(config.get(SERVER_ROUND, self.state.round + 1)))

    def personal_arrays(self, slots: Groups | None = None) -> Arrays:
        """Return what `keep` keeps: personal parts of the model, and ``kept``.

        A newcomer keeps its ``groups_to_fit``.
        """
        own = {**self.saved, **self.model.tensors}
        names = self.names(self.personal if slots is None else slots)
        return {n: to_numpy(own[n]) for n in names}

    def tensors(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> Tensors:
        """Return copies of arrays on the device."""
        copies = {n: torch.from_numpy(np.array(value)) for n, value in arrays.items()}
        return {name: tensor.to(self.device) for name, tensor in copies.items()}

    def send(self, loss: float) -> Reply:
        """Return the shared parts of the model as the reply of `fit`.

        Parameters
        ----------
        loss : float
            Training loss.

        Returns
        -------
        parameters : list of ndarray
            Copies, in the order of ``sent_names``.
        num_examples : int
            Number of training examples.
        metrics : dict
            ``train-loss``.
        """
        self.check_received("sends")
        return self.send_arrays(self.model.tensors, loss)

    def send_arrays(self, arrays: Mapping[str, Tensor], loss: float) -> Reply:
        """Return those of some arrays that ``sent_names`` has, as `send`."""
        self.check_sendable(arrays)
        sent = (to_numpy(arrays[name]) for name in self.sent_names)
        copies = [array.copy(order="C") for array in sent]
        n = len(self.task.train_examples(self.index))
        return copies, n, {"train-loss": loss}

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Test the model that this device would use.

        Parameters
        ----------
        parameters : list of ndarray
            The shared arrays.
        config : dict
            As for `receive`.

        Returns
        -------
        loss : float
            Mean loss on this client's test examples.
        num_examples : int
            Number of test examples.
        metrics : dict
            ``accuracy``, 0 to 1, where targets are classes; ``global-nc2`` and
            ``local-nc2`` (`flwr_frl.task.models.neural_collapse`) where the head is
            linear besides. With ``also_test_global`` also ``accuracy-global`` of the
            received model, and so of the task's own metrics.
        """
        self.receive(parameters, config)
        before = self.test(self.model)[2] if self.also_test_global else {}
        loss, num_examples, metrics = self.test(self.deployed_model())
        for name in ("accuracy", *self.task.metrics):
            if name in before:
                metrics[f"{name}-global"] = before[name]
        return loss, num_examples, metrics

    def deployed_model(self) -> SplitModel:
        """Return the model that this device uses; it is tested.

        It is asked for once after each `receive`, and may change `model` itself, which
        is no longer the received one then. Here it is the shared part with the own
        personal part.
        """
        return self.model

    def test(self, model: SplitModel) -> Evaluation:
        """Test a model on this client's test examples; as `evaluate`."""
        return evaluate_model(self.task, self.index, model)


def classes_digest(task: Task) -> str:
    """Return what tasks with the same classes, in the same order, have in common."""
    return digest_of(tuple(map(str, task.classes or ())))


def digest_of(classes: tuple[str, ...]) -> str:
    """Return what `classes_digest` returns of a task with these classes."""
    return hashlib.sha256(repr(classes).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Sum:
    """The sum of two regularizers."""

    first: Regularizer
    second: Regularizer

    def __call__(self, features: Tensor, targets: Tensor, model: SplitModel) -> Tensor:
        """Return the sum's value."""
        what = features, targets, model
        return self.first(*what) + self.second(*what)
