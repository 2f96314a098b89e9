"""The resolved settings of a client, and the client that they describe."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from flwr.app import Context, UserConfig

from flwr_frl.clients.algorithms import (
    check_countable,
    client_class,
    complete,
    owners,
    short_name,
)
from flwr_frl.clients.base import Client
from flwr_frl.clients.device.account import PrivateTraining
from flwr_frl.clients.device.identity import (
    DeviceSettings,
    about_state,
    check_task,
    client_name,
    cohort_size,
    partition_id,
    state_directory,
    unread,
)
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.task.base import Task
from flwr_frl.task.messages import (
    ACKNOWLEDGED_ROUND,
    CHECKPOINT_ROUND,
    RUN,
)
from flwr_frl.task.run_cache import run_cache
from flwr_frl.task.settings import (
    Setting,
    Settings,
    build,
    declared,
    is_path,
    require,
    resolve,
)
from flwr_frl.task.tasks import build_task
from flwr_frl.task.training.privacy import ExamplePrivacy


@dataclass(frozen=True)
class ClientRun:
    """The settings of a run that its clients read, and others declare.

    Parameters
    ----------
    algorithm, task : str
        Names or import paths.
    seed : int
        Seed of the run.
    num_clients, new_clients : int
        Number of simulated clients, and of those that join after training.
    batch_size : Setting
        Examples a batch, if the algorithm trains in batches.
    states : Path, optional
        Directory of the simulated clients' states, if the run can be resumed.
    """

    algorithm: str
    task: str
    seed: int
    num_clients: int
    new_clients: int
    batch_size: Setting
    states: Path | None

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the run of resolved settings."""
        algorithm = str(settings["algorithm"])
        resumable = int(settings["checkpoint-every"]) > 0 or settings["resume"]
        directory = Path(str(settings["output"])) / short_name(algorithm) / "clients"
        return cls(
            algorithm,
            str(settings["task"]),
            int(settings["seed"]),
            int(settings["num-clients"]),
            int(settings["new-clients"]),
            settings["batch-size"],
            directory if resumable else None,
        )


class Setup(NamedTuple):
    """The resolved settings of a client, the same for every message of a run.

    Parameters
    ----------
    kind : type of Client
        The client class.
    algorithm : object
        Its ``settings_type``.
    device : DeviceSettings
        Settings of every device.
    privacy : ExamplePrivacy
        Differential privacy of the client's examples.
    run : ClientRun
        Settings of the run.
    build_task : callable
        Builds the task for a number of clients; 0 is a device with data of its own.
    """

    kind: type[Client]
    algorithm: Any
    device: DeviceSettings
    privacy: ExamplePrivacy
    run: ClientRun
    build_task: Callable[[int], Task]


def client_setup(context: Context, run_config: UserConfig | None) -> Setup:
    """Return the resolved settings of this client.

    Parameters
    ----------
    context : Context
        Its node config overrides the settings of ``Traits.node_settings``.
    run_config : UserConfig, optional
        Settings of the run; by default the context's.

    Raises
    ------
    SettingsError
        If a name is unknown or a value is out of range.
    """
    given = context.run_config if run_config is None else run_config
    kind, setup = _known(tuple(given.items()))
    if "partition-id" in context.node_config:
        partition_id(context.node_config)
    unread(context.node_config, kind)
    return setup(tuple(node_settings(kind, given, context.node_config).items()))


def node_settings(kind: type[Client], settings: Settings, node: Settings) -> Settings:
    """Return the settings that one client overrides.

    A device overrides them in its node config. In simulation ``client-models`` assigns
    the models, if the algorithm declares that setting.
    """
    overridden = {
        name: node[name] for name in kind.traits.node_settings if name in node
    }
    models = str(settings.get("client-models", "")).split()
    if models and "partition-id" in node and "client-models" in declared(kind):
        return {"model": models[partition_id(node) % len(models)], **overridden}
    return overridden


Pairs = tuple[tuple[str, Setting], ...]


@run_cache(maxsize=16)
def _known(given: Pairs) -> tuple[type[Client], Callable[[Pairs], Setup]]:
    """Return the client class, and a function from a node's settings to the setup."""
    # A cache for each run: its many pairs are hashed once a message, not twice.
    setup = lru_cache(maxsize=16)(partial(_setup, given))
    return client_class(resolve(dict(given), strict=False)), setup


def _setup(given: Pairs, node: Pairs) -> Setup:
    named = resolve(dict(given), strict=False)
    # An app with a custom task may list settings of its algorithms, too.
    strict = not is_path(named["task"])
    settings = complete(resolve({**dict(given), **dict(node)}, owners(named), strict))
    device = build(DeviceSettings, settings)
    cohort_size(device.cohort)
    check_countable(settings)
    kind = client_class(settings)
    return Setup(
        kind,
        build(kind.settings_type, settings),
        device,
        build(ExamplePrivacy, settings),
        ClientRun.of(settings),
        partial(build_task, settings),
    )


def build_client(context: Context, setup: Setup, config: Mapping[str, Any]) -> Client:
    """Return the client that a message is for.

    Parameters
    ----------
    context : Context
        The client's node config and state.
    setup : Setup
        Its settings.
    config : mapping
        Config of the message, with ``run``, ``acknowledged-round`` and
        ``checkpoint-round`` if the server tracks them.
    """
    node, kind = context.node_config, setup.kind
    num_clients, index = 0, 0
    if "partition-id" in node:
        partitions = node.get("num-partitions", setup.run.num_clients)
        valid = isinstance(partitions, int) and partitions >= 1
        require(valid, "num-partitions", partitions, "an integer, at least 1")
        num_clients = int(partitions)
        index = partition_id(node)
        allowed = f"below num-partitions, {num_clients}"
        require(index < num_clients, "partition-id", index, allowed)
    task = setup.build_task(num_clients)
    acknowledged = config.get(ACKNOWLEDGED_ROUND)
    run = str(config.get(RUN, context.run_id))
    experiment, states = setup.device.experiment, setup.run.states
    directory = state_directory(context, run, experiment, states)
    state = PersonalState(
        context,
        directory,
        None if acknowledged is None else int(acknowledged),
        int(config.get(CHECKPOINT_ROUND, 0)),
        run,
        client_name(context),
        about_state(task, kind) if directory else None,
    )
    check_task(task, kind, setup.run.algorithm, setup.run.task)
    client = kind(task, index, state, setup.algorithm)
    client._own_data = "partition-id" not in node
    client._private = PrivateTraining.of(setup.privacy, context.state, directory)
    return client
