"""Resolve a client's settings from its node config and the run, and build it."""

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from flwr.app import Context

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.account import PrivateTraining
from flwr_frl.clients.device.card import about_state
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.device.state_file import state_directory
from flwr_frl.common.messages import (
    ACKNOWLEDGED_ROUND,
    CHECKPOINT_ROUND,
    EXAMPLES,
    RUN,
    SERVER_ROUND,
)
from flwr_frl.common.settings import (
    Maker,
    Settings,
    SettingsError,
    declared,
    defaults,
    facts,
    require,
    setting,
    unknown,
)
from flwr_frl.task import devices
from flwr_frl.task.base import Task
from flwr_frl.task.fingerprint import check_examples, fingerprint
from flwr_frl.task.held_out import EvaluationSettings
from flwr_frl.task.tasks import (
    TaskKey,
    built_task,
)
from flwr_frl.task.training import TrainerSettings
from flwr_frl.task.training.privacy import ExamplePrivacy

# Keys of a node config besides the settings that a device may override.
OF_A_NODE = ("client-name", "state-dir", "partition-id", "num-partitions")
# Similarity, from 0 to 1, at which an unknown name counts as misspelled; that of
# ``device-id`` and ``device`` is lower.
NEARLY = 0.82


@dataclass(frozen=True)
class DeviceSettings(EvaluationSettings, ExamplePrivacy):
    """Settings of every device, besides those of its algorithm and its task.

    Parameters
    ----------
    experiment : str, default ""
        Runs of one experiment start from each device's personal state of the last
        run. Without a name, only runs that resume a run share its states.
    count_multiple : int, default 1
        Numbers of examples are sent to the server as the nearest multiple of this,
        at least one; 1 sends exact numbers. A device may override it.
    torch_threads : int, default 1
        CPU threads of one client.
    cohort : str, default "auto"
        Number of clients of one process that train together, with stacked models;
        ``auto`` is up to 128 on a CPU and up to 32 elsewhere, if that is faster.
        ``off`` trains them one by one, with bitwise equal results on every backend.
    device : str, default "auto"
        Device to train on: ``cpu``, ``cuda`` (the first GPU), ``cuda:1``, ``mps``.
        ``auto`` is the first CUDA GPU if there is one, else the CPU. A device may
        override it.
    """

    experiment: str = setting("", form="a name", safe=True)
    count_multiple: int = setting(1, ge=1, per_device=True)
    torch_threads: int = setting(1, ge=1, le=1024, may_differ="always")
    cohort: str = setting(
        "auto", form="off, auto or a number", safe=True, may_differ="always"
    )
    device: str = setting(
        "auto", form=devices.NAMES, safe=True, may_differ="always", per_device=True
    )

    def rounded(self, count: int) -> int:
        """Round a number of examples to ``count-multiple``; only 0 becomes 0."""
        multiple = self.count_multiple
        return max((count + multiple // 2) // multiple, min(count, 1)) * multiple


# Largest cohort with `auto`, in general and where the clients' models are in the memory
# of a CPU.
AUTO, AUTO_ON_CPU = 32, 128


def cohort_size(text: str) -> int:
    """Return the largest number of clients that train together."""
    if text in ("off", "auto"):
        return 1 if text == "off" else AUTO
    require(text.isdecimal() and int(text) >= 1, "cohort", text, "off, auto or >= 1")
    return int(text)


def client_name(context: Context) -> str:
    """Return the client's name, which is the same in every run.

    It is ``client-name`` of the node config, or in simulation ``partition-id``, padded
    so that names sort as numbers. Raises `SettingsError` if neither is set.
    """
    config = context.node_config
    if "client-name" in config:
        name = str(config["client-name"])
        require(name != "", "client-name", name, "a name, of a character or more")
        return name
    if "partition-id" in config:
        return f"{partition_id(config):06d}"
    raise SettingsError(
        "the node config has neither client-name nor partition-id, and the SuperNode "
        "was not registered with a --name; start it with --node-config "
        "'client-name=\"NAME\"'"
    )


def partition_id(node: Settings) -> int:
    """Return a node's partition of the data; `SettingsError` if it is not an index."""
    index = node["partition-id"]
    valid = isinstance(index, int) and type(index) is not bool and index >= 0
    require(valid, "partition-id", index, "an integer, at least 0")
    return int(index)


def partition(node: Settings, run: Settings) -> tuple[int, int]:
    """Return a node's partition of the data and the number of partitions.

    Both are 0 for a device, whose task contains all of its data.
    """
    if "partition-id" not in node:
        return 0, 0
    partitions = node.get("num-partitions", run["num-clients"])
    valid = isinstance(partitions, int) and partitions >= 1
    require(valid, "num-partitions", partitions, "an integer, at least 1")
    index, num_partitions = partition_id(node), int(partitions)
    allowed = f"below num-partitions, {num_partitions}"
    require(index < num_partitions, "partition-id", index, allowed)
    return index, num_partitions


@cache
def per_device(kind: type[Client]) -> set[str]:
    """Return the settings that a device may override in its node config."""
    of_kind = declared(cast(Maker, kind)).items()
    return {*facts("per-device"), *(n for n, s in of_kind if s.facts.per_device)}


def unread(node: Settings, kind: type[Client]) -> list[str]:
    """Return the unknown names in a node config, which may belong to another app.

    Raises `SettingsError` if one is similar to a known name: a misspelled name must
    not leave a device without noise, or its state without a directory.
    """
    valid_names = {*per_device(kind), *OF_A_NODE}
    names = [name for name in node if name not in valid_names]
    # The name of another setting, such as ``partition``, is not a misspelling.
    for name in (n for n in names if n not in defaults()):
        plain = name.lower().replace("_", "-")
        if difflib.get_close_matches(plain, valid_names, cutoff=NEARLY):
            what = "name in the node config"
            raise unknown(what, name, valid_names, code="node-config")
    return names


def check_task(task: Task, kind: type[Client], settings: Settings) -> None:
    """Raise `SettingsError`, with both names, if an algorithm cannot use a task."""
    try:
        kind._traits.check(task)
    except SettingsError as error:
        algorithm, name = settings["algorithm"], settings["task"]
        raise SettingsError(
            f"algorithm {algorithm!r} and task {name!r}: {error}", error.code
        ) from None


def seed_torch(context: Context, seed: int, config: Mapping[str, Any]) -> None:
    """Seed torch with `torch_seed`."""
    devices.seed(torch_seed(context, seed, config.get(SERVER_ROUND, 0)))


def torch_seed(context: Context, seed: int, server_round: object) -> int:
    """Return torch's seed for a run's seed, a client and a round, on any machine."""
    text = f"{seed}/{client_name(context)}/{server_round!r}"
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little")


class Setup(NamedTuple):
    """The resolved settings of a client, the same for every message of a run.

    Parameters
    ----------
    kind : type of Client
        The client class.
    algorithm : object
        Settings of the algorithm, an instance of its ``settings_type``.
    device : DeviceSettings
        Settings of every device.
    privacy : ExamplePrivacy
        Differential privacy of the client's examples.
    run : mapping
        All settings of the run and the node.
    task : TaskKey
        The settings of the task among them.
    states : Path, optional
        Directory of the simulated clients' states, if the run can be resumed.
    """

    kind: type[Client]
    algorithm: Any
    device: DeviceSettings
    privacy: ExamplePrivacy
    run: Settings
    task: TaskKey
    states: Path | None

    def in_round(self, settings: Any, config: Mapping[str, Any]) -> Any:
        """Return a client's settings with the learning rate of a message's round."""
        if SERVER_ROUND not in config or not isinstance(settings, TrainerSettings):
            return settings
        rounds = int(self.run["num-server-rounds"])
        return settings.in_round(int(config[SERVER_ROUND]), rounds)


def build_client(context: Context, setup: Setup, config: Mapping[str, Any]) -> Client:
    """Return the client that a message is for.

    Parameters
    ----------
    context : Context
        The client's node config and state.
    setup : Setup
        Its settings.
    config : mapping
        Config of the message, with ``run``, ``acknowledged-round``,
        ``checkpoint-round`` and ``examples-fingerprint`` if the server tracks them.

    Raises
    ------
    ResourceError
        If a simulated client's examples are not those of the start of the run.
    """
    node, kind = context.node_config, setup.kind
    index, num_clients = partition(node, setup.run)
    task = built_task(setup.task, num_clients)
    acknowledged = config.get(ACKNOWLEDGED_ROUND)
    run = str(config.get(RUN, context.run_id))
    name, experiment = client_name(context), setup.device.experiment
    directory = state_directory(node, name, run, experiment, setup.states)
    about = about_state(task, kind) if directory else {}
    # A device's data may grow, and no server may compare them with a guess.
    if "partition-id" in node:
        check_examples(task, index, config.get(EXAMPLES))
    elif directory:
        about[EXAMPLES] = fingerprint(task, index)
    state = PersonalState(
        context,
        directory,
        None if acknowledged is None else int(acknowledged),
        int(config.get(CHECKPOINT_ROUND, 0)),
        run,
        name,
        about,
    )
    check_task(task, kind, setup.run)
    client = kind(task, index, state, setup.algorithm)
    client._own_data = "partition-id" not in node
    if setup.privacy.dp_noise:
        client._private = PrivateTraining(setup.privacy, context.state, directory)
    return client
