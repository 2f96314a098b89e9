"""Base class of all clients, which share some of their arrays and keep the others."""

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any, TypeVar, get_args

from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.common import NDArrays
from torch import Tensor

from flwr_frl.clients.device.account import PrivateTraining
from flwr_frl.clients.device.conversions import to_numpy
from flwr_frl.clients.device.evaluation import evaluate_model
from flwr_frl.clients.device.parameter_groups import (
    WHOLE,
    Arrays,
    Config,
    Groups,
    ParameterGroups,
    Reply,
    array_names,
    check_groups,
    initial_arrays,
)
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.device.traits import extend
from flwr_frl.common.messages import (
    CLASSES_DIGEST,
    FROZEN_BYTES,
    FROZEN_DIGEST,
    NUM_CLASSES,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    SERVER_ROUND,
    SHARED_BYTES,
    STRUCTURE,
)
from flwr_frl.common.settings import (
    SettingsError,
    extended,
    require,
    setting,
    warn_about_similar,
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
from flwr_frl.task.resident import train_examples
from flwr_frl.task.training import (
    Loss,
    Proximal,
    Regularizer,
    TrainCall,
    TrainerSettings,
    scratch_model,
    train,
)
from flwr_frl.task.training.class_weights import weighted

Evaluation = tuple[float, int, Config]
C = TypeVar("C", bound="Client")
# Methods that algorithms override
HOOKS = (
    *("deployed_model", "get_properties", "initial_group", "personalize"),
    *("statistics", "update"),
)

# The parts that `Client.train` can train, by their parameter groups.
PARTS: dict[Groups, Part] = {
    WHOLE[:1]: "representation",
    WHOLE[1:]: "head",
    WHOLE: "all",
}


@dataclass(frozen=True)
class TrainingSettings(TrainerSettings):
    """Local training of a split model.

    Parameters
    ----------
    representation_epochs : int, default 1
        Epochs of the representation, or of both parts if they train together.
    newcomer_epochs : int, default 10
        Epochs in which a client that joins after training fits its personal part.
    augment_head : bool, default True
        Whether images are augmented while only the head trains. If not, the features
        are computed once; a round with 10 head epochs then takes a third of the time.
    """

    representation_epochs: int = setting(1, ge=0)
    newcomer_epochs: int = setting(10, ge=0)
    augment_head: bool = setting(True)


class Client(ParameterGroups, NumPyClient):
    """A client, which trains on its own data and never sends its personal groups.

    Subclasses declare their parameter groups (`ParameterGroups`) and, as class
    keywords, their traits (`flwr_frl.clients.device.traits.Traits`), and define
    `update`. They may override `initial_group`, `deployed_model`, `personalize` and
    `statistics`.

    Parameters
    ----------
    task : Task
        Model, data and loss.
    index : int
        Index of this client in the task, from 0.
    state : PersonalState
        Storage of the personal groups.
    settings : object
        An instance of ``settings_type``: `TrainingSettings` with the settings that the
        class and its bases declare as fields.

    Attributes
    ----------
    device : torch.device
        Device of the model, the examples, ``received`` and ``saved``.
    model : SplitModel
        The model. Clients of one process share it; `receive` overwrites all of it.
    config : dict
        Config of the message that is answered.
    received : dict of str to Tensor
        Arrays received from the server, by name.
    saved : dict of str to Tensor
        Personal arrays, by name, as `receive` has loaded them. `save` stores them; for
        those that are part of the model it stores the values in ``model``.
    upload : dict of str to Tensor or None
        Arrays that `send` sends; None for those of ``model``.
    metrics : dict
        Additional metrics of the reply.
    attachments : dict of str to bytes
        Additional byte payloads of the reply.

    Raises
    ------
    SettingsError
        If the task does not meet the requirements of the algorithm.
    """

    settings_type: type = TrainingSettings
    settings: Any
    # Example-level privacy, set by the runtime if ``dp-noise`` is above 0.
    _private: PrivateTraining | None = None
    # True if a device loads its own data, False for a partition of a common data set.
    _own_data = False

    def __init_subclass__(cls, **traits: Any) -> None:
        super().__init_subclass__()
        warn_about_similar(cls, HOOKS)
        cls.settings_type = extended(_settings_of_bases(cls), cls)
        parent = next(base for base in cls.__bases__ if issubclass(base, Client))
        # The trait describes these methods; after an override it is declared anew.
        names = "fit", "update", "train"
        if any(getattr(cls, name) is not getattr(parent, name) for name in names):
            traits = {"supports_example_dp": False, **traits}
        cls._traits = extend(cls, cls._traits, traits)

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Any
    ) -> None:
        self._traits.check(task)
        self.task = task
        self.index = index
        self.state = state
        self.settings = settings
        self.device = current()
        self.model = scratch_model(task)
        self.received = {}
        self.saved = {}
        self.metrics = {}
        self.attachments: dict[str, bytes] = {}
        self._proximal_weight = 0.0

    @property
    def train_examples(self) -> ExampleSet:
        """The training examples, on the device; `SettingsError` if there are none."""
        examples = train_examples(self.task, self.index)
        if len(examples) == 0:
            raise SettingsError("there are no training examples")
        return examples

    @cached_property
    def training_loss(self) -> Loss:
        """The task's loss with ``class-weights``, for custom training steps as well."""
        text = getattr(self.settings, "class_weights", "none")
        if text == "none":
            return self.task.loss
        return weighted(text, self.task, train_examples(self.task, self.index))

    # Queries before the first round.

    def get_properties(self, config: Config) -> Config:
        """Return this client's properties, which the server queries before round 1.

        Returns
        -------
        dict
            ``num-examples`` (training), ``num-test-examples``, ``shared-bytes`` (size
            of the shared arrays), and ``structure``, a digest of everything that all
            clients must have in common. If two structures differ, ``num-classes``,
            ``classes-digest`` and ``frozen-digest`` show whether the classes or the
            frozen parts of shared groups are the reason. ``frozen-bytes`` is the size
            of all frozen parts. Without frozen parts both are absent.

        Raises
        ------
        SettingsError
            If the examples, the settings or the groups do not fit the model and loss.
        """
        classes = tuple(map(str, self.task.classes or ()))
        about_frozen = self._about_frozen()
        counts = example_counts(self.task, self.index)
        _ = self.training_loss  # Checks the class weights.
        if self._private:
            self._private.check(self.task.scratch_model)
        # All models of a task have the same structure.
        check_groups(self, self.task.scratch_model)
        shared = initial_arrays(self, self.shared)
        structure = self._structure()
        if about_frozen:
            structure = [*structure, about_frozen[FROZEN_DIGEST]]
        return {
            NUM_CLASSES: len(classes),
            CLASSES_DIGEST: digest(classes),
            STRUCTURE: digest(structure),
            **about_frozen,
            **counts,
            SHARED_BYTES: sum(a.nbytes for a in shared.values()),
        }

    def _about_frozen(self) -> Config:
        """Return properties of the model's frozen part; empty if nothing is frozen."""
        model = self.task.scratch_model
        if not model.structure.hidden_buffers:
            return {}
        frozen = frozen_tensors(model)
        common = tuple(n for n in frozen if self._group_of(n) in self._exchanged_groups)
        return {
            FROZEN_DIGEST: frozen_digest(model, common),
            FROZEN_BYTES: sum(tensor.nbytes for tensor in frozen.values()),
        }

    def get_parameters(self, config: Config) -> NDArrays:
        """Return the common initial values of the shared arrays."""
        return [array.numpy() for array in initial_arrays(self, self.shared).values()]

    # One round, and its test.

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Answer a message: receive the shared arrays, `update`, save and send."""
        self.receive(parameters, config)
        loss = self.update()
        if not isinstance(loss, Real):
            raise SettingsError(
                f"{type(self).__name__}.update returns {loss!r}; expected the training "
                "loss, a number"
            )
        self.save()
        return self.send(float(loss))

    def update(self) -> float:
        """Train ``model`` for one round, and return the training loss.

        Every algorithm defines it. ``model`` has the received and the saved arrays.
        Afterwards the runtime saves the personal groups and sends the shared ones; an
        override may change ``saved`` and set ``upload``, ``metrics`` and
        ``attachments``.
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
            As of `flwr_frl.task.training.train`; FedProx's proximal term is added.
        examples : ExampleSet, optional
            Examples to train on; by default all of this client's training examples.
        learning_rate : float, optional
            Step size; by default that of the settings.

        Returns
        -------
        float
            Mean loss over the last epoch.
        """
        valid = part in get_args(Part)
        require(valid, "part", part, "head, representation or all", "settings")
        examples = self.train_examples if examples is None else examples
        if part == "head" and not self.settings.augment_head:
            examples = examples.without_augmentation()
        if self._proximal_weight:
            near = Proximal(self._proximal_weight, self.received)
            regularizer = near if regularizer is None else _Sum(regularizer, near)
        loss, sgd = self.training_loss, self.settings
        if learning_rate is not None:
            sgd = replace(sgd, learning_rate=learning_rate)
        call = self.model, part, examples, loss, epochs, sgd, regularizer, correction
        if self._private:
            return self._private.train(TrainCall(*call))
        return train(*call)

    def proximal(self, features: Tensor, model: SplitModel) -> Tensor | float:
        """Return FedProx's term μ/2 ‖w − w_received‖², for a custom training step.

        It is 0 unless the server runs FedProx.
        """
        if not self._proximal_weight:
            return 0.0
        near = Proximal(self._proximal_weight, self.received)
        return near(features, None, model)

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Test the deployed model.

        Parameters
        ----------
        parameters, config
            As in `receive`.

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
        self.receive(parameters, config)
        received = self.test(self.model)[2] if tests_received(type(self)) else {}
        loss, num_examples, metrics = self.test(self.deployed_model())
        for name in ("accuracy", *self.task.metrics):
            if name in received:
                metrics[f"{name}-global"] = received[name]
        return loss, num_examples, metrics

    def deployed_model(self) -> SplitModel:
        """Return the model that this client predicts with, and that `evaluate` tests.

        The default is ``model``: the received shared part with the saved personal part.
        It may be called any number of times, and always returns the same values. An
        override that trains does so on a copy of this client (`on_copy`).
        """
        return self.model

    def test(self, model: SplitModel) -> Evaluation:
        """Test a model on this client's test examples; returns as `evaluate`."""
        return evaluate_model(self.task, self.index, model)

    def personalize(self) -> None:
        """Fit the personal groups of a client that joins after training.

        It is called after `receive`, and leaves the shared arrays unchanged. If all
        groups are parts of the model, the personal ones train for ``newcomer-epochs``.
        Otherwise, `fit` is called that many times with the same shared arrays, and its
        replies are discarded.
        """
        groups, epochs = deployed_groups(type(self)), self.settings.newcomer_epochs
        if groups and {*self.shared, *groups} <= {*WHOLE}:
            self.train(PARTS[tuple(g for g in WHOLE if g in groups)], epochs)
        elif groups:
            fit_rounds(self, epochs)


def _settings_of_bases(kind: type[Client]) -> type:
    """Return a class's settings without the fields that it declares itself.

    If several bases declare settings, the class has all of them.
    """
    if "settings_type" in vars(kind):
        return kind.settings_type
    types = [base.settings_type for base in kind.__bases__ if issubclass(base, Client)]
    least = [t for t in types if sum(issubclass(other, t) for other in types) == 1]
    if len(least) <= 1:
        return (least or types)[0]
    made = type(kind.__name__, tuple(least), {"__module__": kind.__module__})
    return dataclass(frozen=True)(made)


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


def tests_received(kind: type[Client]) -> bool:
    """Return whether clients of a class test the whole model that they receive, too."""
    return (
        kind.deployed_model is not Client.deployed_model
        and isinstance(kind.shared, tuple)
        and not {*WHOLE}.isdisjoint(kind.shared)
        and {*WHOLE}.isdisjoint(kind.personal)
    )


def example_counts(task: Task, index: int) -> Config:
    """Check a client's examples, and return how many it trains on and tests with."""
    task.check(index)
    return {
        NUM_EXAMPLES: len(task.train_examples(index)),
        NUM_TEST_EXAMPLES: len(task.test_examples(index)),
    }


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


def fit_rounds(client: Client, rounds: int) -> None:
    """Call `fit` for some rounds with the same shared arrays; discard its replies."""
    names = array_names(client, client.shared)
    parameters = [to_numpy(client.received[name]) for name in names]
    context = Context(0, 0, {}, RecordDict(), {})
    for server_round in range(1, rounds + 1):
        # A new state object loads the version that the previous round has saved.
        client.state = PersonalState(context)
        client.fit(parameters, {SERVER_ROUND: server_round})
    client.state, client.attachments = PersonalState(context), {}
    client.receive(parameters, {})


def digest(value: object) -> str:
    """Return a short digest of a value's repr, for example of a tuple of classes."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Sum:
    """The sum of two regularizers."""

    first: Regularizer
    second: Regularizer

    def __call__(self, features: Tensor, targets: Tensor, model: SplitModel) -> Tensor:
        arguments = features, targets, model
        return self.first(*arguments) + self.second(*arguments)


__all__ = [
    "Arrays",
    "Client",
    "Config",
    "Evaluation",
    "Reply",
    "TrainingSettings",
    "digest",
]
