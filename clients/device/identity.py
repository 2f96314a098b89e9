"""Who a client is, where it keeps its state, and which settings it has."""

import difflib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

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
from flwr_frl.clients.device.card import ModelCard, is_built_by_name
from flwr_frl.clients.device.state import OF_A_RUN, PersonalState
from flwr_frl.task.base import Task
from flwr_frl.task.devices import NAMES, seed
from flwr_frl.task.files import refuse_links
from flwr_frl.task.held_out import EvaluationSettings
from flwr_frl.task.messages import (
    ACKNOWLEDGED_ROUND,
    CHECKPOINT_ROUND,
    RUN,
    SERVER_ROUND,
)
from flwr_frl.task.run_cache import run_cache
from flwr_frl.task.settings import (
    Free,
    Place,
    Range,
    Setting,
    Settings,
    SettingsError,
    build,
    defaults,
    is_path,
    require,
    resolve,
    unknown,
)
from flwr_frl.task.tasks import build_task, reads_data_dir
from flwr_frl.task.tasks.image import ImageTask
from flwr_frl.task.training.privacy import ExamplePrivacy

# What a node config has besides an algorithm's ``node_settings``.
OF_A_NODE = ("client-name", "state-dir", "partition-id", "num-partitions")
# How like a known name one is that was meant to be it, from 0 to 1; ``device-id`` is
# less like ``device``.
NEARLY = 0.82
# Of a directory for a client or an experiment.
LONGEST_NAME = 200


@dataclass(frozen=True)
class DeviceSettings(EvaluationSettings, ExamplePrivacy):
    """What every device needs to know besides its algorithm and its task.

    Parameters
    ----------
    experiment : str, default ""
        Runs of the same experiment go on from each device's personal state of the last
        one; without a name a run is on its own, with those that resume it.
    count_multiple : int, default 1
        The server is told numbers of examples as the nearest multiple of this, and at
        least one; 1 tells them as they are. A device may set it for itself.
    torch_threads : int, default 1
        Threads of one client's training.
    cohort : str, default "auto"
        How many clients of one process train together, with their models stacked;
        ``auto`` for up to 32 where that is faster. ``off`` trains one by one: the
        reference, with numbers that are the same to the last bit on every backend and
        not only to rounding.
    device : str, default "auto"
        Where clients train: ``cpu``, ``cuda`` (the first GPU), ``cuda:1``, ``mps``.
        ``auto`` is the first CUDA GPU where there is one and the CPU elsewhere. A
        device may set it for itself.
    """

    experiment: Annotated[str, Free("a name")] = ""
    count_multiple: Annotated[int, Range("[1, inf)")] = 1
    torch_threads: Annotated[int, Range("[1, 1024]")] = 1
    cohort: Annotated[str, Free("off, auto or a number")] = "auto"
    device: Annotated[str, Free(NAMES)] = "auto"


# Clients that train together where `auto` says how many.
AUTO = 32


def cohort_size(text: str) -> int:
    """Return how many clients train together: the setting ``cohort``."""
    if text in ("off", "auto"):
        return 1 if text == "off" else AUTO
    require(text.isdecimal() and int(text) >= 1, "cohort", text, "off, auto or >= 1")
    return int(text)


def client_name(context: Context) -> str:
    """Return who this client is, the same in every run, from its node config.

    It has ``client-name`` (a device) or ``partition-id`` (simulation; padded, so that
    names sort as numbers); neither is a `SettingsError`.
    """
    config = context.node_config
    if "client-name" in config:
        name = str(config["client-name"])
        require(name != "", "client-name", name, "a name, of a character or more")
        return name
    if "partition-id" in config:
        return f"{partition_id(config):06d}"
    raise SettingsError(
        "the node config has neither client-name nor partition-id; start the SuperNode "
        "with --node-config 'client-name=\"NAME\"'"
    )


def partition_id(node: Settings) -> int:
    """Return which share of the data a node has; `SettingsError` unless it is one."""
    index = node["partition-id"]
    valid = isinstance(index, int) and type(index) is not bool and index >= 0
    require(valid, "partition-id", index, "an integer, at least 0")
    return int(index)


class Setup(NamedTuple):
    """What is the same for every message of a run.

    Parameters
    ----------
    settings : mapping
        All settings of this client.
    kind : type of Client
        Its algorithm.
    own : object
        The algorithm's ``settings_type``.
    privacy : ExamplePrivacy
        Of the client's examples.
    """

    settings: Settings
    kind: type[Client]
    own: Any
    privacy: ExamplePrivacy


def client_setup(context: Context, run_config: UserConfig | None) -> Setup:
    """Return the settings and the algorithm of this client.

    The settings are those of the run config, or the context's where there is none, and
    what the node config may set for itself. An unknown name or a wrong type is an error
    (`SettingsError`).
    """
    given = context.run_config if run_config is None else run_config
    pairs = tuple(given.items())
    kind, setup = _known(pairs)
    if "partition-id" in context.node_config:
        partition_id(context.node_config)
    unread(context.node_config, kind)
    return setup(tuple(kind.own_settings(given, context.node_config).items()))


def unread(node: Settings, kind: type[Client]) -> list[str]:
    """Return the names in a node config that nothing here reads.

    They may be another app's. One that is nearly known is a `SettingsError`: a slip of
    the pen must not leave a device without its noise, or its head on no disk.
    """
    known = *kind.node_settings, *OF_A_NODE
    names = [name for name in node if name not in known]
    # Another setting's own name, as ``partition``, is no slip of the pen.
    for name in (n for n in names if n not in defaults()):
        plain = name.lower().replace("_", "-")
        if difflib.get_close_matches(plain, known, cutoff=NEARLY):
            raise unknown("name in the node config", name, known)
    return names


Pairs = tuple[tuple[str, Setting], ...]


@run_cache(maxsize=16)
def _known(given: Pairs) -> tuple[type[Client], Callable[[Pairs], Setup]]:
    """Return the algorithm, and what gives the setup with a node's own settings."""
    # Of its own: so many pairs are hashed and compared once a message, not twice.
    setup = lru_cache(maxsize=16)(partial(_setup, given))
    return client_class(resolve(dict(given), strict=False)), setup


def _setup(given: Pairs, own: Pairs) -> Setup:
    named = resolve(dict(given), strict=False)
    # The app that brings a task of its own may list settings of its algorithms, too.
    strict = not is_path(named["task"])
    settings = complete(resolve({**dict(given), **dict(own)}, owners(named), strict))
    # For its checks.
    cohort_size(build(DeviceSettings, settings).cohort)
    kind = client_class(settings)
    privacy = build(ExamplePrivacy, settings)
    check_countable(settings)
    return Setup(settings, kind, build(kind.settings_type, settings), privacy)


def build_client(context: Context, setup: Setup, config: Mapping[str, Any]) -> Client:
    """Return the client that a message is for.

    ``config``, the message's, has ``run``, ``acknowledged-round`` and
    ``checkpoint-round`` where the server keeps count of them.
    """
    settings, kind, own, privacy = setup
    node = context.node_config
    num_clients, index = 0, 0
    if "partition-id" in node:
        told = node.get("num-partitions", settings["num-clients"])
        valid = isinstance(told, int) and told >= 1
        require(valid, "num-partitions", told, "an integer, at least 1")
        num_clients = int(told)
        index = partition_id(node)
        allowed = f"below num-partitions, {num_clients}"
        require(index < num_clients, "partition-id", index, allowed)
    task = build_task(settings, num_clients)
    acknowledged = config.get(ACKNOWLEDGED_ROUND)
    run = str(config.get(RUN, context.run_id))
    directory = state_directory(context, settings, run)
    state = PersonalState(
        context,
        directory,
        None if acknowledged is None else int(acknowledged),
        int(config.get(CHECKPOINT_ROUND, 0)),
        run,
        client_name(context),
        about_state(task, kind) if directory else None,
    )
    check_task(task, kind, settings)
    client = kind(task, index, state, own)
    client.own_data = "partition-id" not in node
    client.private = PrivateTraining.of(privacy, context.state, directory)
    return client


def about_state(task: Task, kind: type[Client]) -> dict[str, str]:
    """Return what a client writes into its files: its model's card, its algorithm."""
    card = dict[str, str]()
    if isinstance(task, ImageTask):
        card = ModelCard.of(task).metadata()
        if not is_built_by_name(task):
            del card["model"]
    return {**card, **algorithm_of(kind)}


def algorithm_of(kind: type[Client]) -> dict[str, str]:
    """Return what a client writes into its files of its algorithm."""
    return {"algorithm": f"{kind.__module__}:{kind.__qualname__}"}


def check_task(task: Task, kind: type[Client], settings: Settings) -> None:
    """Raise `SettingsError`, which names both, unless an algorithm takes a task."""
    try:
        kind.check_task(task)
    except SettingsError as error:
        names = f"algorithm {settings['algorithm']!r}", f"task {settings['task']!r}"
        raise SettingsError(f"{names[0]} and {names[1]}: {error}") from None


def state_directory(context: Context, settings: Settings, run: str) -> Path | None:
    """Return where this client keeps its state of a run; None means in memory only."""
    node = context.node_config
    if "state-dir" in node:
        # No name leads out of the directory.
        name = quoted(client_name(context))
        experiment = quoted(str(settings["experiment"]))
        given = str(node["state-dir"])
        require(Place().permits(given), "state-dir", given, "a folder that can be made")
        root = Path(given).expanduser()
        # A run's name comes from a message or from a file.
        directory = root / (experiment or OF_A_RUN + quoted(run)) / name
        refuse_links("state-dir", directory.parent, directory)
        return directory
    resumable = int(settings["checkpoint-every"]) > 0 or settings["resume"]
    if resumable and "partition-id" in node:
        algorithm = short_name(str(settings["algorithm"]))
        name = quoted(client_name(context))
        return Path(str(settings["output"])) / algorithm / "clients" / name
    return None


def quoted(name: str) -> str:
    """Return a name of a directory, which leads nowhere else."""
    text = quote(name, safe="", errors="surrogatepass").replace(".", "%2E")
    if len(text) <= LONGEST_NAME:
        return text
    # No file system takes more than 255 bytes.
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{text[:LONGEST_NAME]}-{digest[:16]}"


def rounded_count(count: int, multiple: int) -> int:
    """Return what the server is told of a number of examples: ``count-multiple``.

    That there are none stays so, and that there are some.
    """
    return max((count + multiple // 2) // multiple, min(count, 1)) * multiple


def task_of_device(settings: Settings, data_dir: str) -> Task:
    """Return the task of a device that trains on all data that it has.

    Raises `SettingsError` if the task reads none.
    """
    own: Settings = {"validation-fraction": 0.0, "evaluate-on": "test"}
    task = build_task({**settings, **own, "data-dir": data_dir}, 0)
    if not reads_data_dir(task, str(settings["task"])):
        raise SettingsError(
            f"data-dir is {data_dir!r}, and task {settings['task']!r} reads none: it "
            "has nothing of the device's own to fit to"
        )
    return task


def seed_torch(context: Context, settings: Settings, config: Mapping[str, Any]) -> None:
    """Seed torch from seed, client and round, never from the worker that runs it."""
    server_round = config.get(SERVER_ROUND, 0)
    text = f"{settings['seed']}/{client_name(context)}/{server_round!r}"
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    seed(int.from_bytes(digest[:8], "little"))
