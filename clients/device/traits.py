"""Requirements and capabilities of a client class, declared as one object."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flwr_frl.common.settings import (
    Setting,
    Settings,
    SettingsError,
    defaults,
    made_by,
    require,
)
from flwr_frl.task.base import Task
from flwr_frl.task.tasks import TASKS


@dataclass(frozen=True)
class ClientTraits:
    """Requirements and capabilities of a client class.

    A class inherits the traits of its first base and changes them by class keywords:
    ``class MyClient(Client, requires=(needs_classes,))``.

    Parameters
    ----------
    requires : tuple of callable, default ()
        Requirements. Each is called with the task and raises `SettingsError` if the
        task cannot be used; see `TaskOf`, `needs_classes`, `linear_head` and
        `separate_head`.
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

    def check(self, task: Task) -> None:
        """Raise `SettingsError` if the task does not meet the requirements."""
        generic = not any(isinstance(check, TaskOf) for check in self.requires)
        if generic and (reason := task.untrainable):
            raise SettingsError(f"there is nothing to train on; {reason}")
        for check in self.requires:
            check(task)

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
            kinds = ((n, made_by(m)) for n, m in TASKS.items())
            names = [
                n for n, m in kinds if isinstance(m, type) and issubclass(m, self.kind)
            ]
            example = f", as of {' or '.join(names)}" if names else ""
            raise SettingsError(f"it needs a {self.kind.__name__}{example}")
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
        layer = task.scratch_model.linear_head(algorithm)
        if bias and layer.bias is None:
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
