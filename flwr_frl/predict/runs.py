"""Load a client's model from the files of a run, or fit that of a later device."""

import copy
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from flwr.app import Context, RecordDict
from pydantic import BaseModel

from flwr_frl.clients.algorithms import client_class, complete
from flwr_frl.clients.base import Client, deployed_groups, digest
from flwr_frl.clients.device.account import PrivateTraining, check_account
from flwr_frl.clients.device.card import (
    CARD,
    CLASSES,
    about_state,
    algorithm_of,
    read_card,
)
from flwr_frl.clients.device.groups import HEAD, Arrays, under
from flwr_frl.clients.device.state import (
    PersonalState,
    quoted,
    read_checked,
    state_directory,
    usable,
    versions_in,
)
from flwr_frl.common import checkpoint
from flwr_frl.common.errors import SettingsError, reading, require, unknown
from flwr_frl.common.files import refuse_links
from flwr_frl.common.messages import FROZEN_DIGEST
from flwr_frl.common.settings import Setting, Settings, build, declared, facts, is_path
from flwr_frl.predict.file_settings import UNUSED, need, separate
from flwr_frl.predict.predictor import FilePath, Predictor, check_arrays, check_size
from flwr_frl.strategies.algorithms import settings_owners, strategy_class
from flwr_frl.task.base import Task
from flwr_frl.task.devices import client_seed, seed, use
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.held_out import changed
from flwr_frl.task.names import GENERATED
from flwr_frl.task.tasks import build_task, model_settings
from flwr_frl.task.tasks.table import of_client
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
        The server's checkpoint, or the folder that contains it, ``DIR/ALGORITHM``;
        with several seeds ``DIR/seed-SEED/ALGORITHM``.
    client : str, default ""
        Name of the client; not needed if clients have no personal arrays.
    state_dir : path, default ""
        ``state-dir`` of a device; by default the folder beside the checkpoint in which
        a simulation keeps its clients' states.
    **settings
        Settings, with ``_`` in place of ``-``, that the file alone cannot set, such as
        ``task`` and ``algorithm`` if they are import paths or download data,
        ``partition``, ``weights``, and ``data_dir`` if the model depends on the
        client's data, such as the fine-tuned one of ``-ft``, FedBABU and Per-FedAvg, or
        if no file names the classes.

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
    return TrainedRun.read(path, settings).predictor(client, str(state_dir))


class _NeedsDataError(SettingsError):
    """The deployed model depends on the client's examples."""


class Values(BaseModel):
    """The strategy's values in a checkpoint, as far as they are used here."""

    run: str
    # Last round of each client that has trained.
    acknowledged: dict[str, int]
    # Folder names of simulated clients.
    labels: dict[str, str] = {}
    # Digests of the class names, and of the frozen part of the shared groups.
    classes: str = ""
    model: dict[str, Any] = {}
    # Statistics of the columns of all devices' tables
    columns: list[float] = []

    def name_of(self, client: str) -> str:
        """Return the name of a simulated client that may be named by its folder.

        The folder may have the name of another client.
        """
        return {label: n for n, label in self.labels.items()}.get(client, client)


@dataclass(frozen=True)
class TrainedRun:
    """A run's checkpoint.

    Parameters
    ----------
    path : Path
        The file.
    settings : mapping
        All settings that may be used, complete with defaults.
    withheld : dict of str to setting
        Settings that only the file names, which are not used.
    values : Values
        Values of the strategy.
    server_round : int
        Last round.
    arrays, heads : dict of str to ndarray
        Shared arrays, and each client's arrays on the server, by ``CLIENT/NAME``.
    """

    path: Path
    settings: Settings
    withheld: Mapping[str, Any]
    values: Values
    server_round: int
    arrays: Arrays
    heads: Arrays

    @classmethod
    def read(cls, path: FilePath, named: Mapping[str, Any]) -> Self:
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
            If the file is missing or damaged, or needs code that the user has not
            named.
        """
        # os.path, unlike Path, also accepts names that are too long.
        file = Path(path) / checkpoint.FILE if os.path.isdir(path) else Path(path)
        allowed = "the folder of a run, DIR/ALGORITHM or DIR/seed-SEED/ALGORITHM"
        with reading(file, "checkpoint", allowed):
            about, arrays, state = checkpoint.read(file)
            values = Values.model_validate(about["values"])
            written, server_round = dict(about["settings"]), int(about.get("round", 1))
        settings, withheld = separate(written, named)
        need(withheld, ["algorithm"])
        # The algorithm looks at a task's class.
        if is_path(withheld.get("task", "")):
            need(withheld, ["task"])
        # A strategy that wraps another one names it in a setting.
        need(withheld, facts("code") & {*declared(strategy_class(settings))})
        need(withheld, declared(client_class(settings)))
        heads = under("heads/", state)
        every = complete(settings), withheld, values, server_round, arrays, heads
        return cls(file, *every)

    @property
    def kind(self) -> type[Client]:
        """The class of the run's clients."""
        return client_class(self.settings)

    def predictor(self, client: str, state_dir: str) -> Predictor:
        """Return a client's model; see `load_run`."""
        client = self.values.name_of(client)
        directory = self.directory_of(client, state_dir)
        about, personal = self.saved_arrays(client, directory)
        task: Task
        if CARD in about:
            task, index = read_card(about[CARD]).task(), 0
        else:
            task, index = self.task(client)
            classes = json.dumps(tuple(task.classes))
            wanted = about.get(CLASSES, classes)
            allowed = f"one with the classes {wanted}, for which the head is"
            require(wanted == classes, "data-dir", self.settings["data-dir"], allowed)

        def refuse(index: int) -> ExampleSet:
            raise _NeedsDataError("a model from a file has no examples")

        alone = changed(task, {"train_examples": refuse})
        try:
            model = self.client(alone, index, client, personal).deployed_model()
        except _NeedsDataError:
            data, index = self.task_of_run(client)
            trainer = self.client(data, index, client, personal)
            self.prepare(trainer, client, directory)
            model = trainer.deployed_model()
        # The clients of a process share the deployed model.
        copied = copy.deepcopy(model).cpu()
        name = self.values.labels.get(client, "")
        return Predictor(copied, of_client(task, index, name))

    def saved_arrays(
        self, client: str, directory: Path
    ) -> tuple[dict[str, str], Arrays | None]:
        """Return metadata and arrays of a client's newest acknowledged state file.

        There are none if the algorithm needs none, and for a simulated client that has
        never trained: it has its initial ones, as in the evaluations of the run. Unlike
        `PersonalState`, this method changes no file.
        """
        acknowledged = self.values.acknowledged
        on_server = dict.fromkeys(name.rpartition("/")[0] for name in self.heads)
        has_groups = bool(deployed_groups(self.kind))
        names = acknowledged if has_groups else on_server
        # A newcomer has a state file even if the server stores the other clients'
        # heads.
        if not names or (client in on_server and not has_groups):
            return {}, {}
        last = acknowledged.get(client, 0)
        versions = usable(versions_in(directory), self.values.run, last)
        if not versions and client not in acknowledged:
            if SIMULATED.fullmatch(client):
                return {}, None
            labels = (self.values.labels.get(name, name) for name in names)
            raise unknown("client", client, labels)
        allowed = f"the folder with the state of round {last} or before"
        require(len(versions) > 0, "state-dir", str(directory), allowed)
        about, path = algorithm_of(self.kind) | {"client": client}, versions[0].path
        with reading(path, "state-dir"):
            return read_checked(path, about)

    def settings_of(self, client: str) -> Settings:
        """Return the settings of a client's task.

        A device trains on all data in ``data-dir``, which the user names. A simulated
        client has the data of the run, and so has the global model of a simulation,
        whose inputs may be scaled by statistics of all clients.
        """
        names = [client] if client else self.values.acknowledged
        if all(map(SIMULATED.fullmatch, names)) or not self.settings["data-dir"]:
            return self.settings
        alone: Settings = {"evaluate-on": "test", "validation-fraction": 0.0}
        return {**self.settings, **alone, "num-clients": 0}

    def task(self, client: str) -> tuple[Task, int]:
        """Return the task with a client's examples, and the index of the client."""
        need(self.withheld, ["task"])
        settings, unused = self.settings_of(client), {*UNUSED}
        if settings["task"] in GENERATED:
            unused.add("data-dir")
        # A file has all arrays of a trained model, except for a frozen backbone.
        if settings["adapters"] == "none":
            unused.add("weights")
        read = {"num-clients", *model_settings(str(settings["task"]))}
        need(self.withheld, read - unused)
        count = max(0, int(settings["num-clients"]))
        index = int(client) if SIMULATED.fullmatch(client) else 0
        allowed = f"one of 000000 to {count - 1:06d}"
        require(index < max(count, 1), "client-name", client, allowed)
        task = build_task(settings, count, tuple(self.values.columns))
        classes = tuple(map(str, task.classes))
        names = (*self.arrays, *(name.rpartition("/")[2] for name in self.heads))
        shares_head = any(name.startswith(HEAD) for name in names)
        valid = not shares_head or self.values.classes in ("", digest(classes))
        allowed = "one with the classes of the training, whose head is shared, not "
        place = self.settings["data-dir"]
        require(valid, "data-dir", place, allowed + ", ".join(classes))
        return task, index

    def task_of_run(self, client: str) -> tuple[Task, int]:
        """Return the task and the index of a client with the examples of the run."""
        task, index = self.task(client)
        if SIMULATED.fullmatch(client):
            need(self.withheld, ["partition"])
        else:
            allowed = "a simulated client, such as 000000, or a device with its "
            allowed += "data-dir: the model is trained before it is used"
            valid = bool(client and self.settings["data-dir"])
            require(valid, "client-name", client, allowed)
        return task, index

    def client(
        self, task: Task, index: int, name: str, personal: Arrays | None = None
    ) -> Client:
        """Return a client with the shared arrays and its personal ones.

        Without ``personal``, its personal arrays have their initial values.
        """
        kept = personal or {}
        arrays = self.arrays | under(f"{name}/", self.heads) | kept
        # The user has named the code of a custom model.
        if not is_path(self.settings["task"]):
            check_size(task, arrays)
        state = PersonalState.holding(kept)
        algorithm = build(self.kind._settings_type, self.settings)
        client = self.kind(task, index, state, algorithm)
        # The checkpoint has only the digest of the frozen part.
        frozen = client._about_frozen().get(FROZEN_DIGEST, "")
        expected = self.values.model.get(FROZEN_DIGEST) or frozen
        allowed = f"{expected!r}, as in the training: name its weights"
        require(frozen == expected, "the frozen part", frozen, allowed, "weights")
        shared = client._initial_arrays(client.shared)
        wanted = dict(shared)
        if personal is not None:
            wanted |= client._initial_arrays(deployed_groups(self.kind))
        # If the server stores a head for each client, a newcomer's is the initial one.
        alone = {each.rpartition("/")[2] for each in self.heads}
        arrays = {n: shared[n].numpy() for n in alone & shared.keys()} | arrays
        check_arrays(wanted, arrays)
        client._receive([arrays[n] for n in shared], {})
        return client

    def directory_of(self, client: str, state_dir: str) -> Path:
        """Return the folder with a client's personal state.

        ``state_dir`` is that of a device; for simulated clients it is empty.
        """
        if not state_dir:
            return self.path.parent / "clients" / quoted(client)
        experiment = str(self.settings["experiment"])
        return state_directory(state_dir, client, self.values.run, experiment)

    def prepare(self, client: Client, name: str, directory: Path) -> None:
        """Set up a client's privacy and random state as in the last evaluation."""
        privacy = build(ExamplePrivacy, self.settings)
        if privacy.dp_noise:
            client._private = PrivateTraining(privacy, RecordDict(), directory)
        check_account(client._private, directory)
        seed(client_seed(int(self.settings["seed"]), name, self.server_round))


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
    named = {"device": "auto", **settings, "data_dir": data_dir}
    run = TrainedRun.read(checkpoint, named)
    known = {*run.values.acknowledged, *run.values.labels.values()}
    new = client_name not in known and not SIMULATED.fullmatch(client_name)
    allowed = "that of a device that arrives after the training"
    require(new and client_name != "", "client-name", client_name, allowed)
    # The traits of the class suffice; an instance would allocate its state.
    leaves = all(o._traits.takes_newcomers for o in settings_owners(run.settings))
    algorithm = run.settings["algorithm"]
    allowed = "one that leaves a model for devices that come after the training"
    require(leaves, "algorithm", algorithm, allowed)
    # Personal parts that are not fitted keep their initial values.
    need(run.withheld, ["weights"])
    # The device is set before the task is built, which allocates memory on it.
    use(str(run.settings["device"]))
    torch.set_num_threads(int(run.settings["torch-threads"]))
    task, index = run.task(client_name)
    task.check(index)
    directory = run.directory_of(client_name, str(state_dir))
    refuse_links("checkpoint", directory.parent, directory)
    client = run.client(task, index, client_name)
    heads = {name.rpartition("/")[2] for name in run.heads}
    alone = [client._group_of(task, name) for name in client.received if name in heads]
    groups = (*deployed_groups(run.kind), *alone)
    allowed = "one with personal parameters; else use load_run with data_dir"
    require(len(groups) > 0, "algorithm", algorithm, allowed)
    run.prepare(client, client_name, directory)
    client.personalize()
    state = PersonalState(
        Context(0, 0, {}, RecordDict(), {}),
        directory,
        run=PERSONALIZED,
        client=client_name,
        about=about_state(task, index, run.kind),
    )
    arrays = client._current_arrays(tuple(dict.fromkeys((*client.personal, *groups))))
    path = state.save(arrays, run.server_round)
    allowed = "a folder that can be written"
    require(path is not None, "state-dir", str(directory), allowed)
    assert path is not None
    loss, num_test_examples, metrics = client._test(client.deployed_model())
    count = len(task.train_examples(index))
    return Fitted(path, count, num_test_examples, loss, metrics)
