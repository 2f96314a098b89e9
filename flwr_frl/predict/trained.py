"""Read a server's checkpoint: settings, shared arrays and the trained clients."""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from flwr.app import Context, RecordDict
from safetensors import SafetensorError

from flwr_frl.clients.algorithms import check_named, complete
from flwr_frl.clients.base import Client, digest
from flwr_frl.clients.device.account import PrivateTraining, check_account
from flwr_frl.clients.device.card import ImageModel, ModelCard
from flwr_frl.clients.device.conversions import Tensors
from flwr_frl.clients.device.file_settings import Followed, followed
from flwr_frl.clients.device.parameter_groups import HEAD
from flwr_frl.clients.device.setup import seed_torch
from flwr_frl.clients.device.state_file import quoted, state_directory
from flwr_frl.common.checkpoint import FILE, read
from flwr_frl.common.messages import EXAMPLES, FROZEN_DIGEST, SERVER_ROUND
from flwr_frl.common.sealed import ChecksumError
from flwr_frl.common.settings import Settings, SettingsError, build
from flwr_frl.task.base import Task
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.fingerprint import check_examples
from flwr_frl.task.held_out import EvaluationSettings, changed, with_evaluation
from flwr_frl.task.models.weights import read_safetensors
from flwr_frl.task.tasks import build_task, reads_data_dir
from flwr_frl.task.tasks.image import default_model
from flwr_frl.task.training.privacy import ExamplePrivacy

# Exceptions raised by reading a file that is not a checkpoint.
WRONG_FORMAT = (
    *(LookupError, TypeError, ValueError, AttributeError),
    *(ArithmeticError, RecursionError),
)


class TrainedRun(NamedTuple):
    """A run's checkpoint.

    Parameters
    ----------
    path : Path
        The file.
    settings : mapping
        All settings that may be used, complete with defaults.
    followed : Followed
        The file's settings, separated into usable and withheld ones.
    data_dir : str
        ``data-dir`` in the file; only for comparison, never read.
    acknowledged : dict of str to int
        Last round of each client that has trained.
    token : str
        Unique name of the run.
    labels : dict of str to str
        Folder names of simulated clients, by client name.
    examples : dict of str to str
        Fingerprints of simulated clients' examples, by client name.
    server_round : int
        Last round.
    classes : str
        Digest of the class names; empty if unknown.
    frozen : str
        Digest of the frozen part of the model's shared groups; empty for none.
    arrays : dict of str to Tensor
        Shared arrays.
    state : dict of str to Tensor
        Arrays of the strategy's state.
    """

    path: Path
    settings: Settings
    followed: Followed
    data_dir: str
    acknowledged: dict[str, int]
    token: str
    labels: dict[str, str]
    examples: dict[str, str]
    server_round: int
    classes: str
    frozen: str
    arrays: Tensors
    state: Tensors

    @property
    def withheld_partition(self) -> str:
        """Import path of a custom partition that the user has not named, or ""."""
        return str(self.followed.withheld.get("partition", ""))

    def check_data(self, arrays: Tensors, without: Iterable[str] = ()) -> None:
        """Raise `SettingsError` unless the run's task may be built and read its data.

        Call it before building the task, which scales all images to the file's
        ``image-size``. That size must fit ``arrays``, those of the model. ``without``
        is as for `Followed.need_task`.
        """
        self.followed.need_task(without)
        size, task = int(self.settings["image-size"]), str(self.settings["task"])
        if size == 0 or task not in ("image-folder", "femnist"):
            return
        model = str(self.settings["model"]) or default_model(task, size, size)
        head = int(self.settings["head-layers"]), str(self.settings["model-head"])
        arrays = {n: a for n, a in arrays.items() if n.startswith("representation.")}
        # Only the images themselves reveal whether they have one channel or three.
        for channels in (1, 3):
            shape, classes = (channels, size, size), ("a", "b")
            card = ModelCard(ImageModel(model, shape, classes, (), (), *head))
            try:
                return card.check_size(arrays)
            except SettingsError as error:
                reason = error
        raise SettingsError(f"image-size is {size}, and {reason}")

    def check_classes(self, kind: type[Client], classes: Iterable[str]) -> None:
        """Raise `SettingsError` if a shared head was trained for other classes."""
        names, shared = tuple(map(str, classes)), kind.shared
        # A property depends on the client, but the server's arrays are the shared ones.
        groups = shared if isinstance(shared, tuple) else tuple(self.arrays)
        shares_head = any(name.startswith(HEAD) for name in groups)
        if shares_head and self.classes not in ("", digest(names)):
            raise SettingsError(
                f"data-dir {self.settings['data-dir']!r} has the classes "
                f"{', '.join(names)}; they must be those of the training, whose head "
                "is shared"
            )

    def check_frozen(self, client: Client) -> None:
        """Raise `SettingsError` if a client's frozen part differs from the training's.

        The checkpoint contains only its digest.
        """
        frozen = client._about_frozen().get(FROZEN_DIGEST, "")
        if self.frozen and frozen != self.frozen:
            raise SettingsError(
                f"the model of task {self.settings['task']!r} has another frozen part "
                "than in the training; name the settings that it was built with, such "
                "as weights"
            )

    def with_same_examples(self, task: Task) -> Task:
        """Return a simulation's task that refuses to read other examples.

        Reading examples that differ from those of the run raises `ResourceError`.
        """
        without_metrics = build(EvaluationSettings, {**self.settings, "metrics": ""})
        evaluated = with_evaluation(task, without_metrics)

        def read(part: str, client: int) -> ExampleSet:
            check_examples(evaluated, client, self.examples.get(f"{client:06d}"))
            examples: ExampleSet = getattr(task, part)(client)
            return examples

        parts = ("train_examples", "test_examples")
        return changed(task, {part: partial(read, part) for part in parts})

    def directory_of(self, client: str, state_dir: str) -> Path | None:
        """Return the folder with a client's personal state.

        ``state_dir`` is that of a device; for simulated clients it is empty.
        """
        if not state_dir:
            return self.path.parent / "clients" / quoted(client)
        node, experiment = {"state-dir": state_dir}, str(self.settings["experiment"])
        return state_directory(node, client, self.token, experiment)

    def prepare(self, client: Client, name: str, directory: Path | None) -> None:
        """Set up a client's privacy and random state as in the last evaluation."""
        context = Context(0, 0, {"client-name": name}, RecordDict(), {})
        privacy = build(ExamplePrivacy, self.settings)
        if privacy.dp_noise:
            client._private = PrivateTraining(privacy, context.state, directory)
        check_account(client._private, directory)
        seed_torch(
            context, int(self.settings["seed"]), {SERVER_ROUND: self.server_round}
        )


def read_run(path: Path, named: Settings) -> TrainedRun:
    """Read a server's checkpoint.

    Parameters
    ----------
    path : Path
        The file, or the folder that contains it.
    named : mapping
        Settings that the user names, for `followed`.

    Raises
    ------
    SettingsError
        If the file is missing or damaged, or needs code that the user has not named.
    """
    # os.path, unlike Path, also accepts names that are too long.
    path = path / FILE if os.path.isdir(path) else path
    try:
        about, arrays, state = read(path)
        values, written = about["values"], dict(about["settings"])
        usable = followed(written, named)
        check_named(usable)
        return TrainedRun(
            path,
            complete(usable.settings),
            usable,
            str(written.get("data-dir", "")),
            {str(name): int(r) for name, r in values["acknowledged"].items()},
            str(values["run"]),
            {str(name): str(n) for name, n in values.get("labels", {}).items()},
            {str(name): str(f) for name, f in values.get(EXAMPLES, {}).items()},
            int(about.get("round", 1)),
            str(values.get("classes", "")),
            str(values.get("model", {}).get(FROZEN_DIGEST, "")),
            {name: torch.from_numpy(array) for name, array in arrays.items()},
            {name: torch.from_numpy(array) for name, array in state.items()},
        )
    except (SafetensorError, OSError, ChecksumError) as error:
        raise _unreadable("checkpoint", path, error) from None
    except WRONG_FORMAT as error:
        if isinstance(error, SettingsError):
            raise SettingsError(f"{str(path)!r}: {error}") from None
        raise SettingsError(
            f"checkpoint is {str(path)!r}; expected one that a run has written"
        ) from None


def read_tensors(path: Path, name: str) -> tuple[dict[str, str], Tensors]:
    """Return metadata and tensors of a safetensors file; ``name`` is for errors."""
    try:
        return read_safetensors(path)
    except (SafetensorError, OSError, ChecksumError) as error:
        raise _unreadable(name, path, error) from None


def _unreadable(name: str, path: Path, error: Exception) -> SettingsError:
    reason = str(error).splitlines()[0]
    if isinstance(error, FileNotFoundError):
        reason = "there is no such file"
        runs = sorted(str(file.parent) for file in path.parent.glob(f"*/{FILE}"))
        if path.name == FILE:
            reason += "; expected the folder of a finished run: DIR/ALGORITHM"
        if path.name == FILE and runs:
            reason += f", such as {runs[0]!r}"
    return SettingsError(f"{name} {str(path)!r} cannot be read: {reason}")


def task_of_device(settings: Settings, data_dir: str) -> Task:
    """Return the task of a device that trains on all of its data.

    Raises `SettingsError` if the task does not read ``data-dir``.
    """
    all_data: Settings = {"validation-fraction": 0.0, "evaluate-on": "test"}
    task = build_task({**settings, **all_data, "data-dir": data_dir}, 0)
    if not reads_data_dir(task, str(settings["task"])):
        raise SettingsError(
            f"data-dir is {data_dir!r}, and task {settings['task']!r} reads none: it "
            "has nothing of the device's own to fit to"
        )
    return task
