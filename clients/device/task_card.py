"""What a trained model of any task needs to be used: the task itself, made again."""

import json
from collections.abc import Mapping
from typing import Self

from torch import Tensor

from clients.device.card import ModelCard, is_built_by_name, trained
from task.base import Task
from task.models import SplitModel
from task.settings import Settings, SettingsError, declared, is_path, require
from task.tasks import build_task, task_maker


class TaskCard:
    """A task by its name and settings.

    Unlike images, other inputs do not say how they become tensors; the task does
    (`Task.read`). So the package that it comes from must be there.

    Parameters
    ----------
    settings : mapping
        ``task`` and the settings that it declares; further ones are passed over.
    num_clients : int
        For how many clients the task is made; 0 on a device with data of its own.
    """

    def __init__(self, settings: Settings, num_clients: int) -> None:
        name = str(settings["task"])
        # All arrays come from the training: there is nothing to begin with. The seed
        # fixes what is drawn at random and is in no file.
        known = {*declared(task_maker(name)), "seed"}
        own = known & settings.keys() - {"weights"}
        self.settings = {"task": name, **{n: settings[n] for n in sorted(own)}}
        self.num_clients = num_clients
        self.task: Task = build_task(self.settings, num_clients)
        self.classes = self.task.classes
        if reason := getattr(self.task, "untrainable", ""):
            raise SettingsError(f"task {name!r} has nothing to predict; {reason}")

    def metadata(self) -> dict[str, str]:
        """Return the card as a file keeps it."""
        about = {"settings": self.settings, "clients": self.num_clients}
        return {"task": json.dumps(about)}

    @classmethod
    def from_metadata(cls, about: Mapping[str, str], task: str = "") -> Self:
        """Return the card that `metadata` made; `SettingsError` for anything else.

        ``task`` is what the user says that it is; as `trusted`.
        """
        try:
            found = json.loads(about["task"])
            settings, num_clients = dict(found["settings"]), int(found["clients"])
            settings["task"] = str(settings["task"])
        except (LookupError, TypeError, ValueError) as error:
            raise SettingsError(
                f"the description of the model is damaged: {error!r}"
            ) from None
        return cls(trusted(settings, task), num_clients)

    def build(self) -> SplitModel:
        """Return a new model, untrained."""
        return self.task.initial_model()

    def classifier(self, arrays: Mapping[str, Tensor]) -> SplitModel:
        """Return the trained model in evaluation mode; as `trained`."""
        return trained(self, arrays).eval()

    def __str__(self) -> str:
        """Return what needs the arrays, as an error says it."""
        return f"task {self.settings['task']!r}"


# Of a run's settings, what is run as well where it is an import path; a model that is
# used as it was trained does not need it, so that this will do.
NOT_NEEDED: Settings = {"partition": "iid", "metrics": ""}


def trusted(settings: Settings, given: str) -> Settings:
    """Return a file's settings, without what would be run on its word alone.

    A task by an import path is imported and called, and files come from elsewhere:
    `SettingsError` unless the task is ``given``, or built in.
    """
    name = str(settings["task"])
    require(given in ("", name), "task", given, f"that of the file, {name!r}")
    if is_path(name) and not given:
        raise SettingsError(
            f"its task is {name!r}, whose code is run only where you name it, too: by "
            "--task, or task=... in Python"
        )
    idle = {n: v for n, v in NOT_NEEDED.items() if is_path(settings.get(n, ""))}
    return {**settings, **idle}


def card_of(task: Task, settings: Settings) -> ModelCard | TaskCard:
    """Return what the model of a device's task needs to be used."""
    return ModelCard.of(task) if is_built_by_name(task) else TaskCard(settings, 0)
