"""Build a client from its node config and the run; report its properties."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from logging import WARNING
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
from flwr.app import Context
from flwr.common import log

from flwr_frl.clients.base import Client, Config
from flwr_frl.clients.device.account import PrivateTraining
from flwr_frl.clients.device.card import about_state
from flwr_frl.clients.device.secure import Rules
from flwr_frl.clients.device.state import PersonalState, quoted, state_directory
from flwr_frl.clients.device.upload import Upload
from flwr_frl.common import messages as keys
from flwr_frl.common.compression import NONE, UploadSettings
from flwr_frl.common.errors import SettingsError, require, unknown
from flwr_frl.common.settings import (
    Maker,
    Settings,
    checked_by,
    declared,
    defaults,
    facts,
    setting,
    version,
)
from flwr_frl.task import devices
from flwr_frl.task.base import Task
from flwr_frl.task.held_out import EvaluationSettings
from flwr_frl.task.tasks import TaskKey, built_task
from flwr_frl.task.tasks.image import ImageTask
from flwr_frl.task.training.privacy import ExamplePrivacy
from flwr_frl.task.training.sgd import TrainerSettings

# Keys of a node config besides the settings that a device may override.
OF_A_NODE = (
    *("client-name", "state-dir", "partition-id", "num-partitions"),
    *declared(Rules),
)
# Keys of the node config of simulated clients. A client with further keys may override
# settings, so it is never trained together with others.
SIMULATED = {"partition-id", "num-partitions"}
# Similarity, from 0 to 1, at which an unknown name counts as misspelled; that of
# ``device-id`` and ``device`` is lower.
NEARLY = 0.82


@dataclass(frozen=True)
class DeviceSettings(EvaluationSettings, ExamplePrivacy, UploadSettings):
    """Settings of every device, besides those of its algorithm and its task.

    Parameters
    ----------
    experiment : str, default ""
        Runs of one experiment start from each device's personal state of the last
        run. Without a name, only runs that resume a run share its states.
    torch_threads : int, default 1
        CPU threads of one client.
    cohort : str, default "auto"
        Number of clients of one process that train together, with stacked models;
        ``auto`` is up to 128 on a CPU and up to 32 elsewhere, if that is faster.
        ``off`` trains them one by one, with bitwise equal results on every backend,
        and ``1`` one by one with captured steps on a GPU.
    device : str, default "auto"
        Device to train on: ``cpu``, ``cuda`` (the first GPU), ``cuda:1``, ``mps``.
        ``auto`` is the first CUDA GPU if there is one, else the CPU. A device may
        override it.
    """

    experiment: str = setting("", form="a name", safe=True)
    torch_threads: int = setting(1, ge=1, le=1024, may_differ="always")
    cohort: Annotated[str, checked_by(lambda text: cohort_size(text) >= 1)] = setting(
        "auto", form="off, auto or a number", safe=True, may_differ="always"
    )
    device: str = setting(
        "auto", form=devices.NAMES, safe=True, may_differ="always", per_device=True
    )


# Largest cohorts with `auto`: on a GPU, and on a CPU.
AUTO, AUTO_ON_CPU = 32, 128


def cohort_size(text: str) -> int:
    """Return the largest number of clients that train together."""
    if size := {"off": 1, "auto": AUTO}.get(text):
        return size
    require(text.isdecimal() and int(text) >= 1, "cohort", text, "off, auto or >= 1")
    return int(text)


def client_name(config: Settings) -> str:
    """Return the client's name, which is the same in every run.

    It is ``client-name`` of the node config, or in simulation ``partition-id``, padded
    so that names sort as numbers. Raises `SettingsError` if neither is set.
    """
    if "client-name" in config:
        name = str(config["client-name"])
        require(name != "", "client-name", name, "a name, of a character or more")
        return name
    if "partition-id" in config:
        return str(config["partition-id"]).zfill(6)
    raise SettingsError(
        "the node config has neither client-name nor partition-id, and the SuperNode "
        "was not registered with a --name; start it with --node-config "
        "'client-name=\"NAME\"'"
    )


def partition(node: Settings, run: Settings) -> tuple[int, int]:
    """Return a node's partition of the data and the number of partitions.

    Both are 0 for a device, whose task contains all of its data.
    """
    if "partition-id" not in node:
        return 0, 0
    index: Any = node["partition-id"]
    valid = type(index) is int and index >= 0
    require(valid, "partition-id", index, "an integer, at least 0")
    count: Any = node.get("num-partitions", run["num-clients"])
    valid = type(count) is int and count > index
    require(valid, "num-partitions", count, f"an integer above partition-id, {index}")
    return index, count


@cache
def per_device(kind: type[Client]) -> set[str]:
    """Return the settings that a device may override in its node config."""
    of_kind = declared(cast(Maker, kind)).items()
    return {*facts("per-device"), *(n for n, s in of_kind if s.per_device)}


def check_names(node: Settings, kind: type[Client]) -> None:
    """Raise `SettingsError` for a misspelled name in a node config.

    It must not leave a device without noise, or its state without a directory. Other
    unknown names may belong to another app, or are those of other settings.
    """
    valid_names = {*per_device(kind), *OF_A_NODE}
    for name in node.keys() - valid_names - defaults().keys():
        plain = name.lower().replace("_", "-")
        if difflib.get_close_matches(plain, valid_names, cutoff=NEARLY):
            what = "name in the node config"
            raise unknown(what, name, valid_names, code="node-config")


class Setup(NamedTuple):
    """The resolved settings of a client, the same for every message of a run.

    Parameters
    ----------
    kind : type of Client
        The client class.
    algorithm : object
        Settings of the algorithm, an instance of its ``_settings_type``.
    device : DeviceSettings
        Settings of every device, with the privacy of its examples.
    task : TaskKey
        Settings of the task.
    states : Path, optional
        Directory of the simulated clients' states, if the run can be resumed.
    run : mapping
        All settings of the run and the node.
    name : str
        Name of the client.
    partition : int
        Its partition of the data; 0 for a device, whose task contains all of its data.
    num_clients : int
        Number of partitions; 0 for a device.
    columns : tuple of float
        Statistics of the columns of all devices' tables, from the message's config.
    """

    kind: type[Client]
    algorithm: Any
    device: DeviceSettings
    task: TaskKey
    states: Path | None
    run: Settings
    name: str = ""
    partition: int = 0
    num_clients: int = 0
    columns: tuple[float, ...] = ()


def build_client(
    context: Context, setup: Setup, config: Mapping[str, Any], trains: bool = False
) -> Client:
    """Return the client that a message is for, and seed torch for it.

    Parameters
    ----------
    context : Context
        The client's node config and state.
    setup : Setup
        Its settings.
    config : mapping
        Config of the message, with ``run``, ``acknowledged-round`` and
        ``checkpoint-round`` if the server tracks them.
    trains : bool, default False
        Whether the client trains with the learning rate of the message's round.

    Raises
    ------
    SettingsError
        If the algorithm cannot use the task.
    """
    server_round = config.get(keys.SERVER_ROUND, 0)
    seed = devices.client_seed(int(setup.run["seed"]), setup.name, server_round)
    devices.seed(seed)
    index = setup.partition
    task = built_task(setup.task, setup.num_clients, setup.columns)
    state = personal_state(context, setup, config)
    try:
        client = setup.kind(task, index, state, setup.algorithm)
    except SettingsError as error:
        algorithm, task_name = setup.run["algorithm"], setup.run["task"]
        line = f"algorithm {algorithm!r} and task {task_name!r}: {error}"
        raise SettingsError(line, error.code) from None
    client.config = cast(Config, config)
    # After its constructor, which reads the learning rate that all rounds start from.
    settings = client.settings
    if trains and keys.SERVER_ROUND in config and isinstance(settings, TrainerSettings):
        rounds = int(setup.run["num-server-rounds"])
        client.settings = settings.in_round(server_round, rounds)
    client._own_data = "partition-id" not in context.node_config
    if setup.device.dp_noise:
        client._private = PrivateTraining(setup.device, context.state, state.directory)
    if setup.device.upload_compressor != NONE:
        allowed = f"none for {setup.kind.__name__}, which replaces Client.fit"
        plain, operator = setup.kind.fit is Client.fit, setup.device.operator
        require(plain, "upload-compressor", operator, allowed)
        client._upload = Upload(setup.device, seed)
    return client


def personal_state(
    context: Context, setup: Setup, config: Mapping[str, Any]
) -> PersonalState:
    """Return a client's state; see `build_client`."""
    node, name = context.node_config, setup.name
    run = str(config.get(keys.RUN, context.run_id))
    directory, about = None, dict[str, str]()
    if "state-dir" in node:
        place, experiment = str(node["state-dir"]), setup.device.experiment
        directory = state_directory(place, name, run, experiment)
    elif setup.states and "partition-id" in node:
        directory = setup.states / quoted(name)
    if directory is not None:
        task = built_task(setup.task, setup.num_clients, setup.columns)
        about = about_state(task, setup.partition, setup.kind)
    rounds = config.get(keys.ACKNOWLEDGED_ROUND), config.get(keys.CHECKPOINT_ROUND, 0)
    return PersonalState(context, directory, *rounds, run, name, about)


# Properties, which the server queries before the first round


def check_version(config: Mapping[str, object]) -> None:
    """Raise `SettingsError` if the server has another minor version of flwr-frl."""
    ours = version()
    theirs = str(config.get(keys.VERSION, ours))
    if ours.split(".")[:2] != theirs.split(".")[:2]:
        raise SettingsError(
            f"this device has flwr-frl {ours}, the server has {theirs}; install the "
            "same minor version on both",
            "version",
        )


def properties_of(context: Context, setup: Setup, config: Config) -> Config:
    """Return the properties that a client reports.

    Parameters
    ----------
    context, setup : Context, Setup
        The client's context, and its settings.
    config : dict
        Config of the query.

    Raises
    ------
    SettingsError
        If the client cannot take part.
    """
    client = build_client(context, setup, config)
    properties = client.get_properties(config) | incompatible_with_noise(client)
    if isinstance(client.task, ImageTask):
        properties |= zip(keys.INPUTS, client.task.shape, strict=True)
    if "partition-id" in context.node_config:
        return properties | simulated_properties(client.task, setup)
    if statistics := client.task.column_statistics:
        allowed = "client or none with dp-noise: its sums have no noise"
        require(not setup.device.dp_noise, "standardize", "global", allowed)
        most = keys.MOST_STATISTICS
        allowed = f"client or none on devices with more than {most // 3:,} columns"
        require(len(statistics) <= most, "standardize", "global", allowed)
        properties[keys.COLUMNS] = cast(Any, [*statistics])
    # A device handles each message in a new process, so notes are logged here only.
    for note in getattr(client.task, "notes", ()):
        log(WARNING, "%s", note)
    return properties


def label_of(context: Context, setup: Setup) -> Config:
    """Return the name of a simulated client's data, under its key; {} without one."""
    names = getattr(built_task(setup.task, setup.num_clients), "client_names", ())
    if "partition-id" in context.node_config and setup.partition < len(names):
        return {keys.OWN_NAME: str(names[setup.partition])}
    return {}


def incompatible_with_noise(client: Client) -> Config:
    """Return the property of a model with constants or tied parameters that are shared.

    With noise from the server, constants change in each round, and the names of a tied
    parameter have different values. The property is absent for other models.
    """
    model = client.task.scratch_model
    shared = set(client._array_names(client.shared))
    buffers = {n: b for n, b in model.named_buffers() if n in shared}
    # Batch norms, which have counters, are refused with another message.
    if buffers and all(b.is_floating_point() for b in buffers.values()):
        what = f"the buffer {min(buffers)!r}: register it with persistent=False"
        return {keys.INCOMPATIBLE_WITH_NOISE: what}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name and {first, name} <= shared:
            what = f"one parameter as {first!r} and as {name!r}"
            return {keys.INCOMPATIBLE_WITH_NOISE: what}
    return {}


def simulated_properties(task: Task, setup: Setup) -> dict[str, Any]:
    """Return properties that a simulated client reports and a device does not.

    They are its number of training examples of each class, if there are classes, and
    whether it joins after training.
    """
    properties: dict[str, Any] = {}
    if task.classes:
        targets = task.train_examples(setup.partition).targets.numpy()
        held, counts = np.unique(targets[targets >= 0], return_counts=True)
        properties[keys.HELD_CLASSES] = [str(task.classes[c]) for c in held]
        properties[keys.CLASS_COUNTS] = counts.tolist()
    drawn = int(setup.run["new-clients"]), int(setup.run["seed"])
    if setup.partition in newcomers(setup.num_clients, *drawn):
        properties[keys.NEWCOMER] = True
    return properties


@lru_cache(maxsize=16)
def newcomers(num_clients: int, count: int, seed: int) -> frozenset[int]:
    """Draw the simulated clients that join after training; at least one trains."""
    rng = np.random.default_rng([seed, 0x2E3C0])
    drawn = rng.permutation(num_clients)[: max(0, min(count, num_clients - 1))]
    return frozenset(drawn.tolist())
