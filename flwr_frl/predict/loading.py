"""Load a trained model from an exported file or from a run."""

import copy
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError

from flwr_frl.clients.algorithms import client_class, complete
from flwr_frl.clients.base import Client, deployed_groups, digest
from flwr_frl.clients.device.account import PrivateTraining, check_account
from flwr_frl.clients.device.card import CARD, CLASSES, ImageCard, algorithm_of
from flwr_frl.clients.device.conversions import Tensors, under
from flwr_frl.clients.device.parameter_groups import HEAD, initial_arrays
from flwr_frl.clients.device.setup import seed_torch
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.device.state_file import (
    quoted,
    read_checked,
    state_directory,
    versions_in,
)
from flwr_frl.clients.device.state_file import (
    usable as usable_versions,
)
from flwr_frl.common import checkpoint
from flwr_frl.common.files import refuse_links
from flwr_frl.common.messages import FROZEN_DIGEST, SERVER_ROUND
from flwr_frl.common.settings import (
    Setting,
    Settings,
    SettingsError,
    build,
    error_line,
    is_path,
    require,
    unknown,
)
from flwr_frl.predict.file_settings import (
    FileSettings,
    errors_of,
    named_settings,
    usable,
)
from flwr_frl.predict.predictor import TASK, FilePath, Predictor, check_arrays
from flwr_frl.task.base import Task
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.fingerprint import check_examples
from flwr_frl.task.held_out import changed
from flwr_frl.task.models import without_memory
from flwr_frl.task.models.frozen import frozen_tensors, new_model
from flwr_frl.task.models.weights import FORMAT, read_safetensors
from flwr_frl.task.tasks import build_task, reads_data_dir
from flwr_frl.task.training.privacy import ExamplePrivacy

# Names of simulated clients; no device has one.
SIMULATED = re.compile("[0-9]{6,}")
# Values of a model that a file of arrays may lack; 256 MiB of float32.
MAX_MISSING_VALUES = 2**26


def load_model(path: FilePath, **settings: Setting | Path) -> Predictor:
    """Load a model that `Predictor.export` has written.

    Parameters
    ----------
    path : path
        The ``.safetensors`` file.
    **settings
        Settings that the file alone cannot set, with ``_`` in place of ``-``: ``task``
        if the file names an import path or a task that downloads its data, and
        ``data_dir`` if the task reads a folder. A file alone never causes code to run,
        a path to be read or a host to be contacted. Built-in image models need none.

    Returns
    -------
    Predictor
        The model.

    Raises
    ------
    SettingsError
        If the file is missing, damaged or of another kind.
    """
    path = Path(path)
    try:
        metadata, arrays = read_safetensors(path)
    # A damaged file raises exceptions of many types.
    except Exception as error:
        raise SettingsError(
            f"model {str(path)!r} cannot be read: {error_line(error)}", "model"
        ) from None
    valid = metadata.get("format") == FORMAT
    require(valid, "model", str(path), "a file that --export has written")
    with errors_of(path):
        written: Settings = {}
        if CARD in metadata:
            task: Task = ImageCard.read(metadata[CARD]).task()
        else:
            try:
                kind = TypeAdapter(dict[str, Setting])
                in_file = kind.validate_json(metadata.get(TASK, ""))
            except ValidationError:
                message = "the description of the model is damaged"
                raise SettingsError(message, "damaged-card") from None
            files = usable(in_file, named_settings(settings))
            files.need_task()
            written = files.settings
            task = build_task(written, max(0, int(written["num-clients"])))
        check_size(task, arrays, written)
        model = new_model(task)
        state = {**model.state_dict(), **frozen_tensors(model)}
        check_arrays(state, arrays)
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(arrays[name])
        return Predictor(model, task, written)


def load_run(
    path: FilePath,
    client: str = "",
    state_dir: FilePath = "",
    **settings: Setting | Path,
) -> Predictor:
    """Load a client's model from a run: shared and personal arrays combined.

    Parameters
    ----------
    path : path
        The server's checkpoint, or the folder that contains it, ``DIR/ALGORITHM``.
    client : str, default ""
        Name of the client; not needed if clients have no personal arrays.
    state_dir : path, default ""
        ``state-dir`` of a device; by default the folder beside the checkpoint in which
        a simulation keeps its clients' states.
    **settings
        Settings that the file alone cannot set, with ``_`` in place of ``-``, as for
        `load_model`: ``task`` and ``algorithm`` if they are import paths, and
        ``data_dir`` if the model depends on the client's data, such as the fine-tuned
        one of ``-ft``, FedBABU and Per-FedAvg, or if no file names the classes.

    Returns
    -------
    Predictor
        The model.

    Raises
    ------
    SettingsError
        If a file is missing or damaged, the client is unknown, or the arrays do not
        fit the model.
    """
    require(isinstance(client, str), "client", client, "a string")
    run = read_run(path, named_settings(settings))
    with errors_of(run.path):
        return _load_client(run, client, str(state_dir))


def _load_client(run: "TrainedRun", client: str, state_dir: str) -> Predictor:
    # Users name a simulated client by its folder, which may be named as another client.
    names = {label: name for name, label in run.values.labels.items()}
    client = names.get(client, client)
    kind, directory = run.kind, run.directory_of(client, state_dir)
    if kind._takes is not Client._takes:
        raise SettingsError(
            f"algorithm {run.settings['algorithm']!r} leaves no model of the task's "
            "own: only its clients can combine its shared arrays",
            "algorithm",
        )
    about, personal = _personal_arrays(run, client, directory)
    if CARD in about:
        task: Task = ImageCard.read(about[CARD]).task()
        index, written = 0, run.settings
    else:
        task, index, written = run.task(client)
        classes = json.dumps(tuple(task.classes))
        wanted = about.get(CLASSES, classes)
        allowed = f"one with the classes {wanted}, for which the head is"
        require(wanted == classes, "data-dir", run.data_dir, allowed)

    def refuse(index: int) -> ExampleSet:
        raise _NeedsDataError("a model from a file has no examples")

    alone = changed(task, {"train_examples": refuse, "test_examples": refuse})
    try:
        model = run.client(alone, index, client, personal).deployed_model()
    except _NeedsDataError:
        task, index, written = run.task(client)
        run.check_examples(task, index, client)
        trainer = run.client(task, index, client, personal)
        run.prepare(trainer, client, directory)
        model = trainer.deployed_model()
        alone = changed(task, {"train_examples": refuse, "test_examples": refuse})
    # The clients of a process share the deployed model.
    return Predictor(copy.deepcopy(model).cpu(), alone, written)


class _NeedsDataError(SettingsError):
    """The deployed model depends on the client's examples."""


def _personal_arrays(
    run: "TrainedRun", client: str, directory: Path | None
) -> tuple[dict[str, str], Tensors]:
    """Return metadata and arrays of a client's newest acknowledged state file.

    Both are empty if the algorithm needs none. Unlike `PersonalState`, this function
    changes no file.
    """
    has_groups = bool(deployed_groups(run.kind))
    on_server = {name.rpartition("/")[0] for name in under("heads/", run.state)}
    names = sorted(run.values.acknowledged if has_groups else on_server)
    if not has_groups and not names:
        return {}, {}
    labels = [run.values.labels.get(name, name) for name in names]
    require(bool(client), "client-name", client, f"one of {', '.join(labels)}")
    # A newcomer has a state file even if the server stores the other clients' heads.
    if not has_groups and client in names:
        return {}, {}
    acknowledged = run.values.acknowledged.get(client, 0)
    versions = versions_in(directory)
    version = next(usable_versions(versions, run.values.run, acknowledged), None)
    if version is None:
        label = run.values.labels.get(client, client)
        if client not in run.values.acknowledged:
            raise unknown("client", label, labels)
        rounds = sorted(v.round for v in versions if v.run == run.values.run)
        raise SettingsError(
            f"client {label!r} has states of the rounds {rounds} in {str(directory)!r};"
            f" expected one of at most round {acknowledged}, the last that counted: "
            "state-dir must be that of its SuperNode, and the checkpoint the newest",
            "state-dir",
        )
    try:
        about = algorithm_of(run.kind)
        metadata, arrays = read_checked(version.path, client, None, about)
    except (SafetensorError, OSError, ValueError) as error:
        raise SettingsError(
            f"{str(version.path)!r} cannot be used: {error}", "state-dir"
        ) from None
    return metadata, {name: torch.from_numpy(array) for name, array in arrays.items()}


class _Values(BaseModel):
    """The strategy's values in a checkpoint, as far as they are used here."""

    run: str
    # Last round of each client that has trained.
    acknowledged: dict[str, int]
    # Folder names, and fingerprints of the examples, of simulated clients.
    labels: dict[str, str] = {}
    examples: dict[str, str] = Field({}, alias="examples-fingerprint")
    # Digests of the class names, and of the frozen part of the shared groups.
    classes: str = ""
    model: dict[str, Any] = {}


@dataclass(frozen=True)
class TrainedRun:
    """A run's checkpoint.

    Parameters
    ----------
    path : Path
        The file.
    files : FileSettings
        Its settings, separated into usable and withheld ones.
    settings : mapping
        All settings that may be used, complete with defaults.
    values : _Values
        Values of the strategy.
    server_round : int
        Last round.
    arrays, state : dict of str to Tensor
        Shared arrays, and those of the strategy's state.
    """

    path: Path
    files: FileSettings
    settings: Settings
    values: _Values
    server_round: int
    arrays: Tensors
    state: Tensors

    @property
    def kind(self) -> type[Client]:
        """The class of the run's clients."""
        return client_class(self.settings)

    @property
    def data_dir(self) -> str:
        """The folder of data that the user names; never one that only the file does."""
        return str(self.settings["data-dir"])

    def task(self, client: str) -> tuple[Task, int, Settings]:
        """Return the task, the index of a client, and the task's settings.

        A device has the data of ``data-dir``. A simulated client, or none, has those of
        the run.
        """
        self.files.need_task()
        num_clients, index = int(self.settings["num-clients"]), 0
        settings = dict(self.settings)
        if SIMULATED.fullmatch(client):
            index, last = int(client), f"{num_clients - 1:06d}"
            require(
                index < num_clients, "client-name", client, f"one of 000000 to {last}"
            )
        elif self.data_dir:
            # A device trains on all of its data.
            settings |= {"validation-fraction": 0.0, "evaluate-on": "test"}
            settings["num-clients"] = 0
        task = build_task(settings, int(settings["num-clients"]))
        name = str(settings["task"])
        allowed = f"none with the task {name!r}, which has no data of a device"
        valid = settings["num-clients"] != 0 or reads_data_dir(task, name)
        require(valid, "data-dir", self.data_dir, allowed)
        self._check_classes(tuple(map(str, task.classes)))
        return task, index, settings

    def _check_classes(self, classes: tuple[str, ...]) -> None:
        """Raise `SettingsError` if a shared head was trained for other classes."""
        shared = self.kind.shared
        # A property depends on the client, but the server's arrays are the shared ones.
        groups = shared if isinstance(shared, tuple) else tuple(self.arrays)
        valid = self.values.classes in ("", digest(classes))
        valid = valid or not any(name.startswith(HEAD) for name in groups)
        allowed = "one with the classes of the training, whose head is shared, not "
        require(valid, "data-dir", self.data_dir, allowed + ", ".join(classes))

    def check_examples(self, task: Task, index: int, client: str) -> None:
        """Raise `SettingsError` unless a client's examples are those of the run."""
        if SIMULATED.fullmatch(client):
            self.files.need(["partition"])
            check_examples(task, index, self.values.examples.get(client))
            return
        algorithm = self.settings["algorithm"]
        allowed = f"the device's data, on which {algorithm!r} trains before its model "
        require(bool(self.data_dir), "data-dir", "", allowed + "is used")
        require(bool(client), "client-name", client, "the device's name")

    def client(
        self, task: Task, index: int, name: str, personal: Tensors | None = None
    ) -> Client:
        """Return a client with the shared arrays and its personal ones.

        Without ``personal``, its personal arrays have their initial values.
        """
        heads, kept = under("heads/", self.state), personal or {}
        arrays = self.arrays | under(f"{name}/", heads) | kept
        check_size(task, arrays, self.settings)
        state = PersonalState.holding({n: a.numpy() for n, a in kept.items()})
        algorithm = build(self.kind.settings_type, self.settings)
        client = self.kind(task, index, state, algorithm)
        frozen = client._about_frozen().get(FROZEN_DIGEST, "")
        # The checkpoint has only the digest of the frozen part.
        if self.values.model.get(FROZEN_DIGEST, frozen) != frozen:
            raise SettingsError(
                f"the model of task {self.settings['task']!r} has another frozen part "
                "than in the training; name the settings that it was built with, such "
                "as weights",
                "weights",
            )
        shared = initial_arrays(client, client.shared)
        wanted = dict(shared)
        if personal is not None:
            wanted |= initial_arrays(client, deployed_groups(self.kind))
        # If the server stores a head for each client, a newcomer's is the initial one.
        for group_name in {n.rpartition("/")[2] for n in heads} & shared.keys():
            arrays.setdefault(group_name, shared[group_name])
        check_arrays(wanted, arrays)
        client.receive([arrays[n].numpy() for n in shared], {})
        return client

    def directory_of(self, client: str, state_dir: str) -> Path | None:
        """Return the folder with a client's personal state.

        ``state_dir`` is that of a device; for simulated clients it is empty.
        """
        if not state_dir:
            directory = self.path.parent / "clients" / quoted(client)
            refuse_links("checkpoint", directory.parent, directory)
            return directory
        experiment = str(self.settings["experiment"])
        node = {"state-dir": state_dir}
        return state_directory(node, client, self.values.run, experiment)

    def prepare(self, client: Client, name: str, directory: Path | None) -> None:
        """Set up a client's privacy and random state as in the last evaluation."""
        context = Context(0, 0, {"client-name": name}, RecordDict(), {})
        privacy = build(ExamplePrivacy, self.settings)
        if privacy.dp_noise:
            client._private = PrivateTraining(privacy, context.state, directory)
        check_account(client._private, directory)
        config = {SERVER_ROUND: self.server_round}
        seed_torch(context, int(self.settings["seed"]), config)


def read_run(path: FilePath, named: Settings) -> TrainedRun:
    """Read a server's checkpoint.

    Parameters
    ----------
    path : path
        The file, or the folder that contains it.
    named : mapping
        Settings that the user names.

    Raises
    ------
    SettingsError
        If the file is missing or damaged, or needs code that the user has not named.
    """
    # os.path, unlike Path, also accepts names that are too long.
    file = Path(path) / checkpoint.FILE if os.path.isdir(path) else Path(path)
    if not os.path.isfile(file):
        runs = sorted(each.parent for each in file.parent.glob(f"*/{checkpoint.FILE}"))
        near = f", such as {str(runs[0])!r}" if runs else ""
        allowed = f"the folder of a run, DIR/ALGORITHM{near}"
        require(False, "checkpoint", str(path), allowed)
    try:
        about, arrays, state = checkpoint.read(file)
        values = _Values.model_validate(about["values"])
        written, server_round = dict(about["settings"]), int(about.get("round", 1))
        shared, kept = (
            {name: torch.from_numpy(array) for name, array in each.items()}
            for each in (arrays, state)
        )
    # A file that is damaged or of another kind raises exceptions of many types.
    except Exception as error:
        raise SettingsError(
            f"checkpoint {str(file)!r} is not that of a run: {error_line(error)}",
            "checkpoint",
        ) from None
    with errors_of(file):
        files = usable(written, named)
        files.need_algorithm()
        settings = complete(files.settings)
        return TrainedRun(file, files, settings, values, server_round, shared, kept)


def check_size(task: Task, arrays: Tensors, settings: Settings) -> None:
    """Raise `SettingsError` if a built-in model is far larger than a file's arrays.

    It allocates no memory. A custom model is built by code that the user has named.
    """
    if is_path(settings.get("task", "")):
        return
    with without_memory():
        size = sum(value.numel() for value in new_model(task).state_dict().values())
    limit = MAX_MISSING_VALUES + sum(array.numel() for array in arrays.values())
    require(size <= limit, "the model's size", size, f"at most {limit:,}, as its file")
