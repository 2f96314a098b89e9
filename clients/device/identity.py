"""A client's name, the settings of every device, and the directory of its state."""

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from flwr.app import Context

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.card import ModelCard, is_built_by_name
from flwr_frl.clients.device.state import OF_A_RUN
from flwr_frl.task import devices
from flwr_frl.task.base import Task
from flwr_frl.task.files import refuse_links
from flwr_frl.task.held_out import EvaluationSettings
from flwr_frl.task.messages import (
    SERVER_ROUND,
)
from flwr_frl.task.settings import (
    Free,
    Place,
    Range,
    Settings,
    SettingsError,
    defaults,
    require,
    unknown,
)
from flwr_frl.task.tasks import build_task, reads_data_dir
from flwr_frl.task.tasks.image import ImageTask
from flwr_frl.task.training.privacy import ExamplePrivacy

# Keys of a node config besides the algorithm's ``node_settings``.
OF_A_NODE = ("client-name", "state-dir", "partition-id", "num-partitions")
# Similarity, from 0 to 1, at which an unknown name counts as misspelled; that of
# ``device-id`` and ``device`` is lower.
NEARLY = 0.82
# Longest name of a directory of a client or an experiment.
LONGEST_NAME = 200


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
        ``auto`` is up to 32 if that is faster. ``off`` trains them one by one, with
        bitwise equal results on every backend.
    device : str, default "auto"
        Device to train on: ``cpu``, ``cuda`` (the first GPU), ``cuda:1``, ``mps``.
        ``auto`` is the first CUDA GPU if there is one, else the CPU. A device may
        override it.
    """

    experiment: Annotated[str, Free("a name")] = ""
    count_multiple: Annotated[int, Range("[1, inf)")] = 1
    torch_threads: Annotated[int, Range("[1, 1024]")] = 1
    cohort: Annotated[str, Free("off, auto or a number")] = "auto"
    device: Annotated[str, Free(devices.NAMES)] = "auto"


# Largest cohort with `auto`.
AUTO = 32


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
        "the node config has neither client-name nor partition-id; start the SuperNode "
        "with --node-config 'client-name=\"NAME\"'"
    )


def partition_id(node: Settings) -> int:
    """Return a node's partition of the data; `SettingsError` if it is no index."""
    index = node["partition-id"]
    valid = isinstance(index, int) and type(index) is not bool and index >= 0
    require(valid, "partition-id", index, "an integer, at least 0")
    return int(index)


def unread(node: Settings, kind: type[Client]) -> list[str]:
    """Return the unknown names in a node config, which may be another app's.

    Raises `SettingsError` if one is similar to a known name: a misspelled name must
    not leave a device without noise, or its state without a directory.
    """
    known = *kind.traits.node_settings, *OF_A_NODE
    names = [name for name in node if name not in known]
    # The name of another setting, such as ``partition``, is not misspelled.
    for name in (n for n in names if n not in defaults()):
        plain = name.lower().replace("_", "-")
        if difflib.get_close_matches(plain, known, cutoff=NEARLY):
            raise unknown("name in the node config", name, known)
    return names


def about_state(task: Task, kind: type[Client]) -> dict[str, str]:
    """Return the metadata of a client's files: its model's card and its algorithm."""
    card = dict[str, str]()
    if isinstance(task, ImageTask):
        card = ModelCard.of(task).metadata()
        if not is_built_by_name(task):
            del card["model"]
    return {**card, **algorithm_of(kind)}


def algorithm_of(kind: type[Client]) -> dict[str, str]:
    """Return the metadata of a client's files about its algorithm."""
    return {"algorithm": f"{kind.__module__}:{kind.__qualname__}"}


def check_task(task: Task, kind: type[Client], algorithm: str, name: str) -> None:
    """Raise `SettingsError`, with both names, if an algorithm cannot use a task."""
    try:
        kind.traits.check(task)
    except SettingsError as error:
        raise SettingsError(
            f"algorithm {algorithm!r} and task {name!r}: {error}"
        ) from None


def state_directory(
    context: Context, run: str, experiment: str, states: Path | None = None
) -> Path | None:
    """Return the directory of a client's state; None if it is in memory only.

    Parameters
    ----------
    context : Context
        Its node config has the client's name and, on a device, ``state-dir``.
    run : str
        Name of the run.
    experiment : str
        Name of the experiment, whose runs share their states; may be empty.
    states : Path, optional
        Directory of the simulated clients' states.
    """
    node = context.node_config
    name = quoted(client_name(context))
    if "state-dir" in node:
        state_dir = str(node["state-dir"])
        allowed = "a folder that can be made"
        require(Place().permits(state_dir), "state-dir", state_dir, allowed)
        root = Path(state_dir).expanduser()
        # A run's name comes from a message or from a file.
        directory = root / (quoted(experiment) or OF_A_RUN + quoted(run)) / name
        refuse_links("state-dir", directory.parent, directory)
        return directory
    return states / name if states and "partition-id" in node else None


def quoted(name: str) -> str:
    """Return a file name for any text; it contains no path separator and no dot."""
    text = quote(name, safe="", errors="surrogatepass").replace(".", "%2E")
    if len(text) <= LONGEST_NAME:
        return text
    # File systems limit names to 255 bytes.
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{text[:LONGEST_NAME]}-{digest[:16]}"


def rounded_count(count: int, multiple: int) -> int:
    """Round a number of examples to a multiple; only 0 becomes 0."""
    return max((count + multiple // 2) // multiple, min(count, 1)) * multiple


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


def seed_torch(context: Context, seed: int, config: Mapping[str, Any]) -> None:
    """Seed torch by seed, client and round, independently of the worker process."""
    server_round = config.get(SERVER_ROUND, 0)
    text = f"{seed}/{client_name(context)}/{server_round!r}"
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    devices.seed(int.from_bytes(digest[:8], "little"))
