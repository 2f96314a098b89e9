"""Load the model of a client from the files of a run, or fit one to a new device."""

import copy
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context, RecordDict
from pydantic import BaseModel, Field
from safetensors import SafetensorError

from flwr_frl.clients.algorithms import client_class, complete, takes_newcomers
from flwr_frl.clients.base import Client, deployed_groups, digest
from flwr_frl.clients.device.account import PrivateTraining, check_account
from flwr_frl.clients.device.card import (
    CARD,
    CLASSES,
    ImageCard,
    about_state,
    algorithm_of,
)
from flwr_frl.clients.device.conversions import Tensors, under
from flwr_frl.clients.device.parameter_groups import (
    HEAD,
    initial_arrays,
    personal_arrays,
)
from flwr_frl.clients.device.setup import seed_torch
from flwr_frl.clients.device.state import (
    PersonalState,
    read_checked,
    state_directory,
    usable,
    versions_in,
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
    require,
    unknown,
)
from flwr_frl.predict.file_settings import FileSettings
from flwr_frl.predict.predictor import (
    FilePath,
    Predictor,
    check_arrays,
    check_size,
)
from flwr_frl.task.base import Task
from flwr_frl.task.devices import use
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.fingerprint import check_examples
from flwr_frl.task.held_out import changed
from flwr_frl.task.tasks import build_task, reads_data_dir
from flwr_frl.task.training.privacy import ExamplePrivacy

# Names of simulated clients; no device has one.
SIMULATED = re.compile("[0-9]{6,}")
# Run name in the state file of a personalised device. For predictions it is an earlier
# run, whose state the device's first training replaces.
PERSONALIZED = "personalized"


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
    run = read_run(path, settings)
    # Users name a simulated client by its folder, which may be named as another client.
    names = {label: name for name, label in run.values.labels.items()}
    client = names.get(client, client)
    directory = run.directory_of(client, str(state_dir))
    about, personal = _personal_arrays(run, client, directory)
    task: Task
    if CARD in about:
        task, index = ImageCard.read(about[CARD]).task(), 0
    else:
        task, index = run.task(client)
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
        task, index = run.task(client)
        run.check_examples(task, index, client)
        trainer = run.client(task, index, client, personal)
        run.prepare(trainer, client, directory)
        model = trainer.deployed_model()
    # The clients of a process share the deployed model.
    return Predictor(copy.deepcopy(model).cpu(), alone, run.settings_of(client))


class _NeedsDataError(SettingsError):
    """The deployed model depends on the client's examples."""


def _personal_arrays(
    run: "TrainedRun", client: str, directory: Path | None
) -> tuple[dict[str, str], Tensors]:
    """Return metadata and arrays of a client's newest acknowledged state file.

    Both are empty if the algorithm needs none. Unlike `PersonalState`, this function
    changes no file.
    """
    has_groups, acknowledged = bool(deployed_groups(run.kind)), run.values.acknowledged
    on_server = dict.fromkeys(name.rpartition("/")[0] for name in run.heads)
    names = acknowledged if has_groups else on_server
    # A newcomer has a state file even if the server stores the other clients' heads.
    if not names or (client in on_server and not has_groups):
        return {}, {}
    labels = sorted(run.values.labels.get(name, name) for name in names)
    require(bool(client), "client-name", client, f"one of {', '.join(labels)}")
    every, last = versions_in(directory), acknowledged.get(client, 0)
    versions = list(usable(every, run.values.run, last))
    if not versions and client not in acknowledged:
        raise unknown("client", client, labels)
    rounds = sorted(each.round for each in every if each.run == run.values.run)
    allowed = f"the folder with the state of round {last} or before, not {rounds}"
    require(len(versions) > 0, "state-dir", str(directory), allowed)
    about, path = algorithm_of(run.kind), versions[0].path
    try:
        metadata, arrays = read_checked(path, client, None, about)
    except (SafetensorError, OSError, ValueError) as error:
        message = f"state-dir: {str(path)!r} cannot be used: {error}"
        raise SettingsError(message, "state-dir") from None
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
    def heads(self) -> Tensors:
        """Each client's arrays on the server, by ``CLIENT/NAME``; most have none."""
        return under("heads/", self.state)

    @property
    def data_dir(self) -> str:
        """The folder of data that the user names; never one that only the file does."""
        return str(self.settings["data-dir"])

    def settings_of(self, client: str) -> Settings:
        """Return the settings of a client's task.

        A device trains on all data in ``data-dir``. A simulated client, or none, has
        the data of the run.
        """
        if SIMULATED.fullmatch(client) or not self.data_dir:
            return self.settings
        alone: Settings = {"validation-fraction": 0.0, "evaluate-on": "test"}
        return {**self.settings, **alone, "num-clients": 0}

    def task(self, client: str) -> tuple[Task, int]:
        """Return the task with a client's examples, and the index of the client."""
        self.files.need_task()
        settings = self.settings_of(client)
        count, name = max(0, int(settings["num-clients"])), str(settings["task"])
        index = int(client) if SIMULATED.fullmatch(client) else 0
        allowed = f"one of 000000 to {count - 1:06d}"
        require(index < max(count, 1), "client-name", client, allowed)
        task = build_task(settings, count)
        allowed = f"none with the task {name!r}, which has no data of a device"
        valid = count != 0 or reads_data_dir(task, name)
        require(valid, "data-dir", self.data_dir, allowed)
        classes = tuple(map(str, task.classes))
        # A property depends on the client, but the server's arrays are the shared ones.
        shared = self.kind.shared
        shared = shared if isinstance(shared, tuple) else tuple(self.arrays)
        shares_head = any(name.startswith(HEAD) for name in shared)
        valid = not shares_head or self.values.classes in ("", digest(classes))
        allowed = "one with the classes of the training, whose head is shared, not "
        require(valid, "data-dir", self.data_dir, allowed + ", ".join(classes))
        return task, index

    def check_examples(self, task: Task, index: int, client: str) -> None:
        """Raise `SettingsError` unless a client's examples are those of the run."""
        if SIMULATED.fullmatch(client):
            self.files.need(["partition"])
            check_examples(task, index, self.values.examples.get(client))
            return
        allowed = "a simulated client, such as 000000, or a device with its data-dir: "
        allowed += f"{self.settings['algorithm']!r} trains before its model is used"
        require(bool(client and self.data_dir), "client-name", client, allowed)

    def client(
        self, task: Task, index: int, name: str, personal: Tensors | None = None
    ) -> Client:
        """Return a client with the shared arrays and its personal ones.

        Without ``personal``, its personal arrays have their initial values.
        """
        kept = personal or {}
        arrays = self.arrays | under(f"{name}/", self.heads) | kept
        check_size(task, arrays, self.settings)
        state = PersonalState.holding({n: a.numpy() for n, a in kept.items()})
        algorithm = build(self.kind._settings_type, self.settings)
        client = self.kind(task, index, state, algorithm)
        # The checkpoint has only the digest of the frozen part.
        frozen = client._about_frozen().get(FROZEN_DIGEST, "")
        expected = self.values.model.get(FROZEN_DIGEST) or frozen
        allowed = (
            f"{expected!r}, as in the training: name its settings, such as weights"
        )
        require(frozen == expected, "the frozen part", frozen, allowed, "weights")
        shared = initial_arrays(client, client.shared)
        wanted = dict(shared)
        if personal is not None:
            wanted |= initial_arrays(client, deployed_groups(self.kind))
        # If the server stores a head for each client, a newcomer's is the initial one.
        alone = {each.rpartition("/")[2] for each in self.heads}
        arrays = {n: shared[n] for n in alone & shared.keys()} | arrays
        check_arrays(wanted, arrays)
        client._receive([arrays[n].numpy() for n in shared], {})
        return client

    def directory_of(self, client: str, state_dir: str) -> Path | None:
        """Return the folder with a client's personal state.

        ``state_dir`` is that of a device; for simulated clients it is empty.
        """
        node: Settings = {"state-dir": state_dir} if state_dir else {"partition-id": 0}
        run, experiment = self.values.run, str(self.settings["experiment"])
        states = self.path.parent / "clients"
        return state_directory(node, client, run, experiment, states)

    def prepare(self, client: Client, name: str, directory: Path | None) -> None:
        """Set up a client's privacy and random state as in the last evaluation."""
        context = Context(0, 0, {"client-name": name}, RecordDict(), {})
        privacy = build(ExamplePrivacy, self.settings)
        if privacy.dp_noise:
            client._private = PrivateTraining(privacy, context.state, directory)
        check_account(client._private, directory)
        config = {SERVER_ROUND: self.server_round}
        seed_torch(context, int(self.settings["seed"]), config)


def read_run(path: FilePath, named: Mapping[str, object]) -> TrainedRun:
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
    allowed = "the folder of a run, DIR/ALGORITHM, or the file in it"
    require(os.path.isfile(file), "checkpoint", str(path), allowed)
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
    files = FileSettings.of(written, named)
    files.need_algorithm()
    settings = complete(files.settings)
    return TrainedRun(file, files, settings, values, server_round, shared, kept)


class Fitted(NamedTuple):
    """Result of fitting a device that arrived after the training.

    Parameters
    ----------
    path : Path
        File with the personal parameters.
    num_examples, num_test_examples : int
        Number of training and test examples.
    loss : float
        Mean loss on the test examples; NaN without any.
    metrics : dict
        Metrics on the test examples, as returned by `Client.evaluate`.
    """

    path: Path
    num_examples: int
    num_test_examples: int
    loss: float
    metrics: dict[str, Any]


def personalize(
    checkpoint: FilePath,
    data_dir: FilePath,
    client_name: str,
    state_dir: FilePath = "",
    **settings: Setting | Path,
) -> Fitted:
    """Fit, save and test a device's personal parameters.

    `load_run` uses the saved parameters. The checkpoint stays unchanged.

    Parameters
    ----------
    checkpoint : path
        The server's checkpoint, or the folder that contains it.
    data_dir : path
        The device's data.
    client_name : str
        Name of the device.
    state_dir : path, default ""
        The device's ``state-dir``; by default a folder beside the checkpoint, as in
        simulation.
    **settings
        Settings that the checkpoint alone cannot set, as for `load_run`, and
        ``device``, by default ``auto``.

    Returns
    -------
    Fitted
        Where the parameters are, and how they perform.

    Raises
    ------
    SettingsError
        If the device has already trained in the run, its data do not fit the shared
        part, or the algorithm has no personal parameters.
    """
    exists = os.path.exists(os.path.expanduser(data_dir))
    require(exists, "data-dir", str(data_dir), "a folder or file that is there")
    named = {"device": "auto", **settings, "data_dir": data_dir}
    run = read_run(checkpoint, named)
    _check_newcomer(run, client_name)
    # Personal parts that are not fitted keep their initial values.
    run.files.need(["weights"])
    # The device is set before the task is built, which allocates memory on it.
    use(str(run.settings["device"]))
    torch.set_num_threads(int(run.settings["torch-threads"]))
    task, index = run.task(client_name)
    task.check(index)
    directory = run.directory_of(client_name, str(state_dir))
    if directory is not None:
        refuse_links("checkpoint", directory.parent, directory)
    client = run.client(task, index, client_name)
    heads = {name.rpartition("/")[2] for name in run.heads}
    alone = [client._group_of(name) for name in client.received if name in heads]
    groups = (*deployed_groups(run.kind), *alone)
    allowed = "one with personal parameters; else use flwr_frl.predict --data-dir"
    require(len(groups) > 0, "algorithm", run.settings["algorithm"], allowed)
    run.prepare(client, client_name, directory)
    client.personalize()
    state = PersonalState(
        Context(0, 0, {}, RecordDict(), {}),
        directory,
        run=PERSONALIZED,
        client=client_name,
        about=about_state(task, run.kind),
    )
    saved = tuple(dict.fromkeys((*client.personal, *groups)))
    path = state.save(personal_arrays(client, saved), run.server_round)
    allowed = "a folder that can be written"
    require(path is not None, "state-dir", str(directory), allowed)
    assert path is not None
    loss, num_test_examples, metrics = client._test(client.deployed_model())
    count = len(task.train_examples(index))
    return Fitted(path, count, num_test_examples, loss, metrics)


def _check_newcomer(run: TrainedRun, name: str) -> None:
    """Raise `SettingsError` if a device cannot join the run."""
    known = name in {*run.values.acknowledged, *run.values.labels.values()}
    allowed = "that of a device that arrives after the training"
    require(not known and not SIMULATED.fullmatch(name), "client-name", name, allowed)
    allowed = "one that leaves a model for devices that come after the training"
    valid = takes_newcomers(run.settings)
    require(valid, "algorithm", run.settings["algorithm"], allowed)
