"""Base class of all clients, which share some of their arrays and keep the others."""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar, get_args

import torch
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.common import NDArrays
from torch import Tensor

from flwr_frl.clients.device.account import PrivateTraining
from flwr_frl.clients.device.evaluation import class_mask, evaluate_model
from flwr_frl.clients.device.groups import (
    HEAD,
    REPRESENTATION,
    WHOLE,
    Groups,
    Received,
    Shape,
    Tensors,
    check_groups,
    groups_of,
    model_arrays,
    to_arrays,
    under,
    within,
    zeros_like,
)
from flwr_frl.clients.device.groups import Arrays as Arrays
from flwr_frl.clients.device.groups import Config as Config
from flwr_frl.clients.device.groups import EvaluateResult as EvaluateResult
from flwr_frl.clients.device.groups import FitResult as FitResult
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.device.upload import Upload
from flwr_frl.common import messages as keys
from flwr_frl.common.errors import SettingsError, require
from flwr_frl.common.run_cache import run_object
from flwr_frl.common.settings import (
    Setting,
    Settings,
    defaults,
    refuse_misspelt,
    setting,
    settings_of,
    with_traits,
)
from flwr_frl.task.base import Task
from flwr_frl.task.devices import current, random_state, set_random_state
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import Part, SplitModel
from flwr_frl.task.models.frozen import (
    copy_sharing_frozen,
    frozen_digest,
    frozen_tensors,
)
from flwr_frl.task.training.cohort import make, scratch_model
from flwr_frl.task.training.local_training import TrainCall
from flwr_frl.task.training.sgd import (
    Proximal,
    Regularizer,
    TrainerSettings,
    gradient_weight,
)

# A training loss, and the arrays to send if they are not those of the model
Update = float | tuple[float, Mapping[str, Tensor]]
C = TypeVar("C", bound="Client")
# Methods that algorithms override
CLIENT_HOOKS = (
    *("deployed_model", "get_properties", "initial_group", "personalize"),
    *("statistics", "update"),
)


@dataclass(frozen=True)
class TrainingSettings(TrainerSettings):
    """Local training of a split model.

    Parameters
    ----------
    representation_epochs : int, default 1
        Epochs of the representation, or of both parts if they train together.
    newcomer_epochs : int, default 10
        Epochs in which a client that joins after training fits its personal part.
    head_epochs_before_test : int, default 0
        Epochs in which each client fits its personal head to the received
        representation before every test, and before the model is used (SRPFL, remark
        4.8). The fitted head is not kept.
    augment_head : bool, default True
        Whether images are augmented while only the head trains. If not, the features
        are computed once; a round with 10 head epochs then takes a third of the time.
    """

    representation_epochs: int = setting(1, ge=0)
    newcomer_epochs: int = setting(10, ge=0)
    head_epochs_before_test: int = setting(0, ge=0)
    augment_head: bool = setting(True)


@dataclass(frozen=True)
class ClientTraits:
    """Requirements and capabilities of a client class.

    A class inherits the traits of its first base and changes them by class keywords:
    ``class MyClient(Client, requires=(needs_classes,))``.

    Parameters
    ----------
    requires : tuple of callable, default ()
        Requirements. Each is called with the task and raises `SettingsError` if the
        task cannot be used; see `TaskOf`, `needs_classes`, `linear_head`,
        `separate_head` and `trained_representation`.
    task_settings : mapping, default {}
        Settings of the task that the algorithm requires; they replace the run's.
        ``head-layers`` only replaces 0, which leaves their number to the algorithm.
    supports_example_dp : bool, default False
        True if `Client.update` learns from examples only through `Client.train`, with
        regularizers that treat each example separately; required for ``dp-noise``. A
        subclass that overrides `Client.update` must declare it again.
    assumes_sgd : bool, default False
        True if the algorithm's equations hold for steps of plain SGD only, so that
        ``optimizer`` and ``max-gradient-norm`` must keep their defaults.
    """

    requires: tuple[Callable[[Task], None], ...] = ()
    task_settings: Mapping[str, Setting] = field(default_factory=dict)
    supports_example_dp: bool = False
    assumes_sgd: bool = False

    def check_settings(self, settings: Settings) -> None:
        """Raise `SettingsError` for settings that the algorithm does not support."""
        algorithm = settings["algorithm"]
        if not self.supports_example_dp:
            allowed = f"0 with {algorithm!r}: not all steps of training can be counted"
            noise = settings["dp-noise"]
            require(noise == 0, "dp-noise", noise, allowed)
        for name in ("optimizer", "max-gradient-norm") if self.assumes_sgd else ():
            default, value = defaults()[name], settings[name]
            allowed = f"{default} with {algorithm!r}, which assumes steps of SGD"
            require(value == default, name, value, allowed)


class Client(NumPyClient):
    """A client, which trains on its own data and never sends its personal groups.

    Subclasses declare their parameter groups (`flwr_frl.clients.device.groups`) and, as
    class keywords, their traits (`ClientTraits`), and define `update`. They may
    override `initial_group`, `deployed_model` and `personalize`.

    Parameters
    ----------
    task : Task
        Model, data and loss.
    index : int
        Index of this client in the task, from 0.
    state : PersonalState
        Storage of the personal groups.
    settings : object
        The settings that the class and its bases declare as fields, for most classes
        with those of `TrainingSettings`.

    Attributes
    ----------
    shared : str or tuple of str
        Groups received from the server.
    personal : str or tuple of str
        Groups that never leave the client.
    model : SplitModel
        The model. Clients of one process share it; each message overwrites all of it.
    config : dict
        Config of the message that is answered.
    received : dict of str to Tensor
        Arrays received from the server, by name, which must not be changed in place.
    saved : dict of str to Tensor
        Personal arrays, by name, which are saved after `update`; for those that are
        part of the model the values in ``model`` are saved.
    metrics : dict
        Additional metrics of the reply.

    Raises
    ------
    SettingsError
        If the task does not meet the requirements of the algorithm.
    """

    # Subclasses declare a name, ``"head"``, or several, which become prefixes.
    shared: Any = WHOLE
    personal: Any = ()
    settings: Any
    config: Config
    _settings_type: type = TrainingSettings
    _traits: ClassVar[ClientTraits] = ClientTraits()
    # Example-level privacy, set by the runtime if ``dp-noise`` is above 0.
    _private: PrivateTraining | None = None
    # Compressed uploads, set by the runtime unless ``upload-compressor`` is ``none``.
    _upload: Upload | None = None
    # Makes a call of `train`, if possible with other clients that train together.
    _make: Any = staticmethod(make)
    # Import path of the class that answers several clients of this one's class at once.
    _rows = "flwr_frl.clients.device.rows:Rows"
    # True if a device loads its own data, False for a partition of a common data set.
    _own_data = False

    def __init_subclass__(cls, **traits: Any) -> None:
        super().__init_subclass__()
        for name in {"shared", "sent", "personal"} & vars(cls).keys():
            groups = vars(cls)[name]
            # A property depends on the client.
            if isinstance(groups, str | tuple | list):
                names = (groups,) if isinstance(groups, str) else groups
                setattr(cls, name, tuple(f"{n.removesuffix('.')}." for n in names))
        refuse_misspelt(cls, CLIENT_HOOKS)
        cls._settings_type = settings_of(cls)
        parent = next(base for base in cls.__bases__ if issubclass(base, Client))
        # `supports_example_dp` describes these methods; an override declares it anew.
        names = "fit", "update", "train"
        if any(getattr(cls, name) is not getattr(parent, name) for name in names):
            traits = {"supports_example_dp": False, **traits}
        cls._traits = with_traits(cls._traits, traits)

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Any
    ) -> None:
        requires = self._traits.requires
        generic = not any(isinstance(check, TaskOf) for check in requires)
        if generic and (reason := task.untrainable):
            raise SettingsError(f"there is nothing to train on; {reason}")
        for check in requires:
            check(task)
        self.task = task
        self.settings = settings
        self.model: SplitModel = scratch_model(task)
        self.received: Tensors = {}
        self.saved: Tensors = {}
        self.metrics: Config = {}
        self._index = index
        self._state = state
        self._device = current()
        self._attachments: dict[str, bytes] = {}
        self._names: dict[Groups, list[str]] = {}
        self._proximal_weight = 0.0

    @property
    def sent(self) -> Any:
        """Groups sent to the server; by default the shared ones."""
        return self.shared

    @property
    def _exchanged_groups(self) -> Groups:
        """Groups that are received or sent; their frozen part is the same for all."""
        return (*self.shared, *self.sent)

    def initial_group(self, group: str) -> Tensors:
        """Return the initial arrays of a group beside the model.

        Parameters
        ----------
        group : str
            The group.

        Returns
        -------
        dict of str to Tensor
            By name within the group; by default the initial model. Initial values of
            the model's arrays are in ``task.initial_state``; ``model`` has those of
            another client.
        """
        return self.task.initial_state

    def _initial_arrays(self, groups: Groups) -> Tensors:
        """Return the common initial values of groups, the model's own arrays first.

        They must not be modified. They are on the CPU unless `initial_group` returns
        received arrays, which are on the training device.
        """
        kind, task = type(self), self.task
        arrays = dict(model_arrays(kind, task, groups))
        for group in groups:
            if group in WHOLE or group in groups_of(kind, task).values():
                continue
            for name, value in within(group, self.initial_group(group)).items():
                if not isinstance(value, Tensor):
                    raise SettingsError(
                        f"{kind.__name__}.initial_group returns a "
                        f"{type(value).__name__} for {name!r}; expected a tensor"
                    )
                arrays[name] = value.detach()
        return arrays

    def _current_arrays(self, groups: Groups) -> Arrays:
        """Return the arrays of groups, those of the model as they are now."""
        arrays = {**self.saved, **self.model.tensors}
        return to_arrays({name: arrays[name] for name in self._array_names(groups)})

    def _array_names(self, groups: Groups) -> list[str]:
        """Return the names of arrays of groups in the order of `_initial_arrays`."""
        if groups not in self._names:
            self._names[groups] = list(self._initial_arrays(groups))
        return self._names[groups]

    @staticmethod
    def _group_of(task: Task, name: str) -> str:
        """Return the group of one of the model's arrays, by default its part.

        Override it to group the model's arrays differently.
        """
        return name.partition(".")[0] + "."

    def _takes(self, name: str, shape: Shape, initial: Shape) -> bool:
        """Return whether an array may have another shape than its initial value.

        If the initial value has no rows, any number of rows may be received.
        """
        return initial[:1] == (0,) and shape[1:] == initial[1:]

    def _structure(self) -> list[object]:
        """Return everything that all clients of a run must have in common.

        By default these are the names, shapes and dtypes of the shared arrays and,
        if more than the representation is shared, the classes, so that outputs of
        heads, prototypes and the like have one meaning.
        """
        structure: list[object] = [
            (name, tuple(array.shape), str(array.dtype))
            for name, array in self._initial_arrays(self.shared).items()
        ]
        has_classes = any(group != REPRESENTATION for group in self.shared)
        return [*structure, self.task.classes] if has_classes else structure

    @property
    def train_examples(self) -> ExampleSet:
        """The training examples, on the device; `SettingsError` if there are none."""
        examples = self.task.resident("train", self._index)
        if len(examples) == 0:
            raise SettingsError("there are no training examples")
        return examples

    # Queries before the first round.

    def get_properties(self, config: Config) -> Config:
        """Return this client's properties, which the server queries before round 1.

        Returns
        -------
        dict
            ``num-examples`` (training), ``num-test-examples``, ``tested-model`` (see
            `deployed_kind`), and ``structure``, a digest of everything that all clients
            must have in common.
            If two structures differ, ``num-classes``, ``classes-digest`` and
            ``frozen-digest`` show whether the classes or the frozen parts of shared
            groups are the reason; without frozen parts the latter is absent.

        Raises
        ------
        SettingsError
            If the examples, the settings or the groups do not fit the model and loss.
        """
        classes = tuple(map(str, self.task.classes or ()))
        about_frozen = self._about_frozen()
        self.task.check(self._index)
        epochs, kind = getattr(self.settings, "head_epochs_before_test", 0), type(self)
        fits = HEAD in self.personal and kind.deployed_model is Client.deployed_model
        allowed = "0 for a method whose clients have no personal head to test with"
        require(fits or not epochs, "head-epochs-before-test", epochs, allowed)
        if self._private:
            self._private.check(self.task.scratch_model)
        # All models of a task have the same structure.
        check_groups(self, self.task.scratch_model)
        structure = [*self._structure(), *about_frozen.values()]
        return {
            keys.NUM_CLASSES: len(classes),
            keys.CLASSES_DIGEST: digest(classes),
            keys.STRUCTURE: digest(structure),
            **about_frozen,
            keys.NUM_EXAMPLES: len(self.task.train_examples(self._index)),
            keys.NUM_TEST_EXAMPLES: len(self.task.test_examples(self._index)),
            keys.TESTED_MODEL: deployed_kind(type(self)),
        }

    def _about_frozen(self) -> Config:
        """Return properties of the model's frozen part; empty if nothing is frozen."""
        model = self.task.scratch_model
        if not model.structure.hidden_buffers:
            return {}
        frozen = frozen_tensors(model)
        groups = {name: self._group_of(self.task, name) for name in frozen}
        common = tuple(n for n in frozen if groups[n] in self._exchanged_groups)
        return {keys.FROZEN_DIGEST: frozen_digest(model, common)}

    def get_parameters(self, config: Config) -> NDArrays:
        """Return the common initial values of the shared arrays."""
        return [array.numpy() for array in self._initial_arrays(self.shared).values()]

    # One round, and its test.

    def fit(self, parameters: NDArrays, config: Config) -> FitResult:
        """Answer a message: receive the shared arrays, `update`, save and send."""
        self._receive(parameters, config)
        result = self.update()
        loss, arrays = result if isinstance(result, tuple) else (result, None)
        return self._reply(loss, arrays)

    def _receive(self, parameters: NDArrays, config: Config) -> None:
        """Load the received and the saved arrays into the model.

        Personal arrays that have never been saved take their initial values.

        Parameters
        ----------
        parameters : list of ndarray
            The shared arrays, in the order of `_initial_arrays`.
        config : dict
            Config of the message; ``proximal-mu`` is the μ of Flower's FedProx.
        """
        self.config, self.metrics = config, {}
        # Shared by all clients of a process; `_check_changes` reports changes.
        names, received = self._array_names(self.shared), run_object(Received)
        self.received = received.tensors(names, parameters, self._device)
        personal = self._initial_arrays(self.personal)
        if self._upload:
            personal |= self._upload.initial_error(self)
        self._shapes = {name: tuple(array.shape) for name, array in personal.items()}
        loaded = self._state.load(self._shapes) or {} if personal else {}
        current = {n: torch.from_numpy(loaded[n]) for n in personal.keys() & loaded}
        # All clients of a process share the initial values: copy them.
        self.saved = {
            name: current.get(name, initial).to(self._device, copy=True)
            for name, initial in personal.items()
        }
        self.model.load({**self.task.initial_state, **self.saved, **self.received})
        self._proximal_weight = 0.0
        # Without received parameters, such as FedProto's, there is no proximal term.
        if self.received.keys() & self.model.tensors.keys():
            self._proximal_weight = float(config.get(keys.PROXIMAL_WEIGHT, 0.0))

    def _reply(
        self, loss: float, arrays: Mapping[str, Tensor] | None = None
    ) -> FitResult:
        """Save the personal arrays as the version of ``server-round``, and reply.

        Parameters
        ----------
        loss : float
            Training loss.
        arrays : mapping of str to Tensor, optional
            Arrays with those of the sent groups; by default those of the model.

        Returns
        -------
        parameters : list of ndarray
            Copies of the arrays of the sent groups.
        num_examples : int
            Number of training examples.
        metrics : dict
            ``train-loss`` and ``metrics``.
        """
        arrays = self.model.tensors if arrays is None else arrays
        names = self._array_names(self.sent)
        if missing := [name for name in names if name not in arrays]:
            raise SettingsError(
                f"{type(self).__name__}.update returns no array {missing[0]!r} to "
                f"send; its sent groups, {', '.join(map(repr, self.sent))}, must be "
                "parts of the model or be returned after the loss"
            )
        personal = self._current_arrays(self.personal)
        if self._upload:
            personal |= self._upload.compress(self, arrays)
        if personal:
            round_ = self.config.get(keys.SERVER_ROUND, self._state.round + 1)
            self._state.save(personal, int(round_))
        sent = to_arrays({name: arrays[name] for name in names}).values()
        copies = [array.copy(order="C") for array in sent]
        n = len(self.task.train_examples(self._index))
        return copies, n, {"train-loss": loss, **self.metrics}

    def _check_changes(self) -> None:
        """Raise `SettingsError` if `update` has changed received arrays in place."""
        for name, tensor in self.received.items():
            if tensor._version or tensor.requires_grad:
                raise SettingsError(
                    f"{type(self).__name__} changes self.received[{name!r}] in place, "
                    "which all clients of a process share; it must clone it first"
                )

    def update(self) -> Update:
        """Train ``model`` for one round, and return the training loss.

        Every algorithm defines it. ``model`` has the received and the saved arrays.
        Afterwards the runtime saves the personal groups and sends the groups in `sent`;
        an override may change ``saved`` and ``metrics``. It may return the loss and the
        arrays to send, by name, instead of those of ``model``.
        """
        raise SettingsError(
            f"{type(self).__name__} has no update; it must define update(self), which "
            "trains for one round and returns the training loss"
        )

    def train(
        self,
        part: Part,
        epochs: int,
        regularizer: Regularizer | None = None,
        correction: Mapping[str, Tensor] | None = None,
        examples: ExampleSet | None = None,
        learning_rate: float | None = None,
    ) -> float:
        """Train a part of the model on this client's training examples.

        Parameters
        ----------
        part : {"head", "representation", "all"}
            The part to train; the other one stays bitwise unchanged.
        epochs : int
            Passes over the examples.
        regularizer, correction
            As of `flwr_frl.task.training.local_training.train`; FedProx's proximal
            term is added.
        examples : ExampleSet, optional
            Examples to train on; by default all of this client's training examples.
        learning_rate : float, optional
            Step size; by default that of the settings.

        Returns
        -------
        float
            Mean loss over the last epoch.
        """
        examples = self.train_examples if examples is None else examples
        if part == "head" and not self.settings.augment_head:
            examples = examples.without_augmentation()
        if self._proximal_weight:
            near = Proximal(self._proximal_weight, self.received)
            regularizer = near if regularizer is None else _Sum(regularizer, near)
        loss, sgd = self.task.loss, self.settings
        if learning_rate is not None:
            sgd = replace(sgd, learning_rate=learning_rate)
        examples, terms = examples.on(self._device), (regularizer, correction)
        call = TrainCall(self.model, part, examples, loss, epochs, sgd, *terms)
        return self._private.train(call) if self._private else self._make(call)

    # For one client; `flwr_frl.clients.device.rows` replaces these for several.

    def _gradient_weight(self, epochs: int) -> float:
        """Return the total weight of the gradients of some epochs of `train`."""
        return gradient_weight(self.model, self.train_examples, epochs, self.settings)

    def _class_mask(self) -> Tensor:
        """Return the mask of the classes that this client trains on."""
        head = self.model.linear_head(type(self).__name__)
        return class_mask(self.task, self._index, head)

    def _counted(self, group: str, otherwise: Tensors | None = None) -> Tensors:
        """Return a saved group if the server's mean contains it, else other values.

        These are 0 by default. A mean does not contain the states of an earlier run.
        """
        saved = under(group, self.saved)
        if self._state.round and self.config.get(keys.IN_MEAN, True):
            return saved
        return zeros_like(saved) if otherwise is None else otherwise

    def evaluate(self, parameters: NDArrays, config: Config) -> EvaluateResult:
        """Test the deployed model.

        Parameters
        ----------
        parameters, config
            As of `fit`.

        Returns
        -------
        loss : float
            Mean loss on this client's test examples.
        num_examples : int
            Number of test examples.
        metrics : dict
            See `evaluate_model`. If a whole model is received and `deployed_model`
            returns another one, the accuracy and the custom metrics of the received
            model are added, with the suffix ``-global``.
        """
        self._receive(parameters, config)
        received = self._test(self.model)[2] if tests_received(type(self)) else {}
        loss, num_examples, metrics = self._test(self.deployed_model())
        for name in ("accuracy", *self.task.metrics):
            if name in received:
                metrics[f"{name}-global"] = received[name]
        return loss, num_examples, metrics

    def deployed_model(self) -> SplitModel:
        """Return the model that this client predicts with, and that `evaluate` tests.

        The default is ``model``: the received shared part with the saved personal part,
        whose head is first trained for ``head-epochs-before-test``. It may be called
        any number of times, and always returns the same values. An override that trains
        does so on a copy of this client (`on_copy`).
        """
        epochs = getattr(self.settings, "head_epochs_before_test", 0)
        if not epochs or not len(self.task.train_examples(self._index)):
            return self.model
        with on_copy(self) as client:
            client.train("head", epochs)
        return client.model

    def _test(self, model: SplitModel) -> EvaluateResult:
        """Test a model on this client's test examples; returns as `evaluate`."""
        return evaluate_model(self.task, self._index, model)

    def personalize(self) -> None:
        """Fit the personal groups of a client that joins after training.

        It is called with the received arrays in ``model``, and leaves the shared arrays
        unchanged. If all groups are parts of the model, the personal ones train for
        ``newcomer-epochs``. Otherwise, `fit` is called that many times with the same
        shared arrays, and its replies are discarded.
        """
        groups, epochs = deployed_groups(type(self)), self.settings.newcomer_epochs
        if groups and {*self.shared, *groups} <= {*WHOLE}:
            own = [part for part in get_args(Part) if f"{part}." in groups]
            self.train(own[0] if len(own) == 1 else "all", epochs)
        elif groups:
            names = self._array_names(self.shared)
            parameters = [self.received[name].numpy(force=True) for name in names]
            context = Context(0, 0, {}, RecordDict(), {})
            for server_round in range(1, epochs + 1):
                # A new state object loads the version of the previous round.
                self._state = PersonalState(context)
                self.fit(parameters, {keys.SERVER_ROUND: server_round})
            self._state, self._attachments = PersonalState(context), {}
            self._receive(parameters, {})


def deployed_groups(kind: type[Client]) -> Groups:
    """Return the personal groups of a class if its deployed model contains them.

    It contains parts of the model, and other groups if the class that defines
    `Client.deployed_model` has personal groups.
    """
    groups: Groups = kind.personal
    if not {*WHOLE}.isdisjoint(groups) or kind._group_of is not Client._group_of:
        return groups
    owner = next(each for each in kind.__mro__ if "deployed_model" in vars(each))
    return groups if getattr(owner, "personal", True) else ()


def deployed_kind(kind: type[Client]) -> str:
    """Return which one of `TESTED_MODELS` clients of a class test."""
    received, partly_personal, personal, adapted = keys.TESTED_MODELS
    groups = deployed_groups(kind)
    if {*WHOLE} <= {*groups} or "model." in groups:
        return personal
    if groups:
        return partly_personal
    return received if kind.deployed_model is Client.deployed_model else adapted


def tests_received(kind: type[Client]) -> bool:
    """Return whether clients of a class test the whole model that they receive, too."""
    return (
        kind.deployed_model is not Client.deployed_model
        and isinstance(kind.shared, tuple)
        and not {*WHOLE}.isdisjoint(kind.shared)
        and {*WHOLE}.isdisjoint(kind.personal)
    )


@contextmanager
def on_copy(client: C) -> Iterator[C]:
    """Yield a copy of a client whose model and saved arrays may change.

    Afterwards, torch's random generators are in the same state as before.
    """
    copied, random = copy.copy(client), random_state()
    copied.model = copy_sharing_frozen(client.model)
    copied.saved = {name: value.clone() for name, value in client.saved.items()}
    try:
        yield copied
    finally:
        set_random_state(random)


def digest(value: object) -> str:
    """Return a short digest of a value's repr, for example of a tuple of classes."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


# Requirements on tasks, for `ClientTraits`


@dataclass(frozen=True)
class TaskOf:
    """The requirement that the task is an instance of a class.

    Parameters
    ----------
    kind : type
        The class.
    """

    kind: type

    def __call__(self, task: Task) -> None:
        """Raise `SettingsError` if the task is of another class."""
        if not isinstance(task, self.kind):
            raise SettingsError(f"it needs a {self.kind.__name__}")
        if task.held_out:
            raise SettingsError("validation-fraction must be 0: it draws its examples")


def needs_classes(task: Task) -> None:
    """Refuse tasks whose targets are not classes."""
    if not task.classes:
        raise SettingsError("it needs classes, to which its heads belong", "no-classes")


def linear_head(algorithm: str, bias: bool = False) -> Callable[[Task], None]:
    """Return the requirement that the model's head is one linear layer.

    Parameters
    ----------
    algorithm : str
        Name of the algorithm, for the error message.
    bias : bool, default False
        True if the layer must have a bias.
    """

    def check(task: Task) -> None:
        """Refuse models whose head is not one linear layer."""
        # Heads of other kinds are refused, whether a bias is needed or not.
        if task.scratch_model.linear_head(algorithm).bias is None and bias:
            text = "it needs a head with a bias; this one has none"
            raise SettingsError(text, "no-bias")

    return check


def separate_head(task: Task) -> None:
    """Refuse models whose head has a parameter of the representation.

    It would be averaged with the representation, and replaced by the client's head.
    """
    if task.scratch_model.is_tied:
        text = "it needs a head without parameters of the representation (tied weights)"
        raise SettingsError(text, "tied-head")


def trained_representation(task: Task) -> None:
    """Refuse representations without parameters, such as that of ``logistic``."""
    if not any(True for _ in task.scratch_model.representation.parameters()):
        raise SettingsError(
            "it needs a representation with parameters; this one has none, so its "
            "features are the same in all models",
            "no-features",
        )


@dataclass(frozen=True)
class _Sum:
    """The sum of two regularizers."""

    first: Regularizer
    second: Regularizer

    def __call__(self, features: Tensor, targets: Tensor, model: SplitModel) -> Tensor:
        arguments = features, targets, model
        return self.first(*arguments) + self.second(*arguments)
