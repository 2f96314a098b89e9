"""Requirements and capabilities of a client class, declared as one object."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from flwr_frl.common.settings import Setting, SettingsError, made_by
from flwr_frl.task.base import Task
from flwr_frl.task.tasks import TASKS


@dataclass(frozen=True)
class Traits:
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


def extend(kind: type[Any], traits: Traits, changes: dict[str, Any]) -> Traits:
    """Return the traits of a subclass.

    Parameters
    ----------
    kind : type of Client
        The subclass.
    traits : Traits
        Inherited traits.
    changes : dict
        Class keywords of the subclass.

    Raises
    ------
    SettingsError
        If a keyword is unknown.
    """
    names = [each.name for each in fields(Traits)]
    for name in changes.keys() - names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise SettingsError(
            f"{kind.__name__} has the unknown class keyword {name!r}{hint}; expected "
            f"one of {', '.join(names)}"
        )
    return replace(traits, **changes)


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
            names = [n for n, m in TASKS.items() if made_by(m) is self.kind]
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
