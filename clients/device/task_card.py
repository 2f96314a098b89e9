"""What a trained model of any task needs to be used: the task itself, made again."""

import copy
import json
from collections.abc import Mapping
from typing import Self

from torch import Tensor

from flwr_frl.clients.device.card import ModelCard, is_built_by_name, trained
from flwr_frl.clients.device.file_settings import LARGEST, followed
from flwr_frl.task.base import Task
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.settings import (
    Settings,
    SettingsError,
    declared,
    is_path,
    require,
    resolve,
)
from flwr_frl.task.tasks import build_task, task_maker

# Settings that a trained model does without: all its arrays come from the training.
NOT_LOADED = ("weights",)


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
        # The seed fixes what is drawn at random and is in no file.
        known = {*declared(task_maker(name)), "seed"}
        own = known & settings.keys() - {*NOT_LOADED}
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
    def from_metadata(cls, about: Mapping[str, str], named: Settings) -> Self:
        """Return the card that `metadata` made; `SettingsError` for anything else.

        ``named`` are the settings that the user names, as for `followed`.
        """
        try:
            found = json.loads(about["task"])
            settings, num_clients = dict(found["settings"]), int(found["clients"])
            settings["task"] = str(settings["task"])
        except (LookupError, TypeError, ValueError) as error:
            raise SettingsError(
                f"the description of the model is damaged: {error!r}"
            ) from None
        allowed = f"from 0 to {LARGEST:,}"
        require(0 <= num_clients <= LARGEST, "clients", num_clients, allowed)
        kept = followed(settings, named)
        kept.need_task(without=NOT_LOADED)
        checked = resolve(kept.settings, strict=False)
        card = cls({name: checked[name] for name in kept.settings}, num_clients)
        return card.split_by(str(settings.get("partition", "")))

    def split_by(self, partition: str) -> Self:
        """Return the card, which tells nobody's examples where they were split so.

        Clients have others under the partition that `followed` puts in its place; a
        device's own are split by nothing.
        """
        replaced = is_path(partition) and self.settings.get("partition") != partition
        if replaced and self.num_clients:

            def refuse(client: int) -> ExampleSet:
                raise SettingsError(unsplit(partition))

            # Others may have the same task.
            self.task = copy.copy(self.task)
            vars(self.task).update(train_examples=refuse, test_examples=refuse)
        return self

    @property
    def is_custom(self) -> bool:
        """Whether the task comes from outside of this package."""
        return is_path(self.settings["task"])

    def build(self) -> SplitModel:
        """Return a new model, untrained."""
        return self.task.initial_model()

    def classifier(self, arrays: Mapping[str, Tensor]) -> SplitModel:
        """Return the trained model in evaluation mode; as `trained`."""
        return trained(self, arrays).eval()

    def __str__(self) -> str:
        """Return what needs the arrays, as an error says it."""
        return f"task {self.settings['task']!r}"


def unsplit(partition: str) -> str:
    """Return why there are no examples of clients, and what to do about it."""
    return (
        f"its clients' examples were split by {partition!r}, whose code is run only "
        "where you name it, too: by partition=... of load_run"
    )


def card_of(task: Task, settings: Settings) -> ModelCard | TaskCard:
    """Return what the model of a device's task needs to be used."""
    return ModelCard.of(task) if is_built_by_name(task) else TaskCard(settings, 0)
