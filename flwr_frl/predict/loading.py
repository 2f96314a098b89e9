"""Load a trained model: combine shared arrays with a client's personal ones."""

import copy
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from flwr_frl.clients.algorithms import client_class
from flwr_frl.clients.base import Client, deployed_groups
from flwr_frl.clients.device.card import (
    Classifier,
    ModelCard,
    algorithm_of,
    initial_only,
    unknown_split,
    without_examples,
)
from flwr_frl.clients.device.conversions import Tensors, under
from flwr_frl.clients.device.file_settings import named_settings
from flwr_frl.clients.device.parameter_groups import array_names, initial_arrays
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.device.state_file import read_checked, usable, versions_in
from flwr_frl.common.settings import (
    Settings,
    SettingsError,
    build,
    require,
    unknown,
)
from flwr_frl.predict.trained import (
    TrainedRun,
    read_run,
    read_tensors,
    task_of_device,
)
from flwr_frl.task.base import Task
from flwr_frl.task.fingerprint import check_examples
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.weights import FORMAT
from flwr_frl.task.tasks import build_task

# Names of simulated clients; no device has one.
SIMULATED = re.compile("[0-9]{6,}")

# A `Classifier` for images, or a `SplitModel` that takes the task's inputs.
Model = Classifier | SplitModel
Loaded = tuple[Model, ModelCard]


def load_model(
    path: Path, task: str = "", data_dir: str = "", named: Settings | None = None
) -> Loaded:
    """Load a ``.safetensors`` file that `export` has written.

    Parameters
    ----------
    path : Path
        The file.
    task : str, default ""
        The task, if the file names an import path or a task that downloads its data.
        A file alone never causes code to run or a host to be contacted (`followed`).
    data_dir : str, default ""
        Folder of the data, for a task that reads its classes from it.
    named : mapping, optional
        Other settings that the file alone cannot set, by name.

    Returns
    -------
    model : Classifier or SplitModel
        A `Classifier` for images, otherwise the task's `SplitModel`; in evaluation
        mode.
    card : ModelCard
        Its inputs and outputs.

    Raises
    ------
    SettingsError
        If the file is missing, damaged or of another kind.
    """
    metadata, tensors = read_tensors(path, "model")
    if metadata.get("format") != FORMAT:
        raise SettingsError(
            f"model is {str(path)!r}; expected a file that --export has written"
        )
    try:
        named = named_settings(named, task=task, data_dir=data_dir)
        card = ModelCard.from_metadata(metadata, named)
        return card.load(tensors), card
    except SettingsError as error:
        raise SettingsError(f"{str(path)!r}: {error}") from None


def load_run(
    path: Path | str,
    client: str = "",
    state_dir: str = "",
    data_dir: str = "",
    task: str = "",
    partition: str = "",
    algorithm: str = "",
    named: Settings | None = None,
) -> Loaded:
    """Load a client's model from a run: shared and personal arrays combined.

    Parameters
    ----------
    path : Path or str
        The server's checkpoint, or the folder that contains it.
    client : str, default ""
        Name of the client; not needed if clients have no personal arrays.
    state_dir : str, default ""
        ``state-dir`` of a device; by default the folder beside the checkpoint in which
        a simulation keeps its clients' states.
    data_dir : str, default ""
        The device's data. They are needed for the fine-tuning of ``-ft``, FedBABU and
        Per-FedAvg, which repeats that of the last evaluation, and for the class names
        if the client has no state file (FLUTE, FedAvg). A run counts as a simulation,
        whose data are those of its settings, if ``state_dir`` is empty and ``data_dir``
        is empty or equal to that of the run.
    task : str, default ""
        As for `load_model`.
    partition : str, default ""
        Import path of a simulation's custom partition, without which no client's
        examples can be read.
    algorithm : str, default ""
        The algorithm, if it is an import path.
    named : mapping, optional
        As for `load_model`.

    Returns
    -------
    model, card
        As returned by `load_model`.

    Raises
    ------
    SettingsError
        If a file is missing or damaged, the client is unknown, or the arrays do not
        fit the model.
    """
    texts = {"task": task, "partition": partition, "algorithm": algorithm}
    for name, text in {"client": client, **texts}.items():
        require(isinstance(text, str), name, text, "a string")
    by_user = named_settings(named, data_dir=data_dir, **texts)
    run = read_run(Path(path), by_user)
    try:
        return _load_client(run, client, state_dir, str(by_user.get("data-dir", "")))
    except SettingsError as error:
        raise SettingsError(f"{str(run.path)!r}: {error}") from None


def _load_client(run: TrainedRun, client: str, state_dir: str, data_dir: str) -> Loaded:
    """Return a client's model and its card; arguments as in `load_run`."""
    settings = run.settings
    # Users name a simulated client by its folder, which may be named as another client.
    client = {label: name for name, label in run.labels.items()}.get(client, client)
    is_simulated = SIMULATED.fullmatch(client) is not None
    of_run = not state_dir and (is_simulated or not client)
    of_run = of_run and _is_same_folder(data_dir, run.data_dir)
    on_device = bool(state_dir or data_dir) and not of_run
    kind = client_class(settings)
    if kind._takes is not Client._takes:
        raise SettingsError(
            f"algorithm {settings['algorithm']!r} leaves no model of the task's own: "
            "its shared arrays have other shapes, and only its clients can combine them"
        )
    metadata, personal = _personal_arrays(run, kind, client, state_dir)
    arrays = run.arrays | under(f"{client}/", under("heads/", run.state)) | personal
    if "model" in metadata:
        card = ModelCard.from_metadata(metadata)
    else:
        card = _card_from_data(run, arrays, on_device)
        run.check_classes(kind, card.classes)
        classes = json.dumps(tuple(card.classes))
        wanted = metadata.get("classes", classes)
        allowed = f"one with the classes {wanted}, for which the head is"
        require(wanted == classes, "data-dir", data_dir, allowed)

    def built(task: Task, index: int = 0) -> Client:
        state = PersonalState.holding({n: a.numpy() for n, a in personal.items()})
        card.check_size(arrays)
        new = kind(task, index, state, build(kind.settings_type, settings))
        run.check_frozen(new)
        groups = (*new.shared, *deployed_groups(kind))
        for name, wanted in initial_arrays(new, groups).items():
            card.check_array(name, wanted, arrays)
        new.receive([arrays[name].numpy() for name in array_names(new, new.shared)], {})
        return new

    try:
        task_alone = without_examples(card.task, _NeedsDataError("it has no data"))
        return _deployed(built(task_alone), card)
    except _NeedsDataError:
        run.check_data(arrays, without=initial_only(run.settings))
        if on_device or not is_simulated:
            own_task = _task_of(run, client, data_dir if on_device else "")
            run.check_classes(kind, own_task.classes)
            card = ModelCard.of_device(own_task, settings)
            trainer = built(own_task)
        else:
            trainer = built(*_simulated_task(run, client))
        run.prepare(trainer, client, run.directory_of(client, state_dir))
        return _deployed(trainer, card)


class _NeedsDataError(SettingsError):
    """The deployed model requires training on the client's examples."""


def _is_same_folder(path: str, in_file: str) -> bool:
    """Return whether a user's path equals one in a file; the latter is not accessed."""
    path = os.path.expanduser(path)
    candidates = os.path.abspath(path), os.path.realpath(path)
    return os.path.abspath(os.path.expanduser(in_file)) in candidates


def _task_of(run: TrainedRun, client: str, data_dir: str) -> Task:
    """Return the task of a device with its data in a folder."""
    if not data_dir:
        algorithm = run.settings["algorithm"]
        raise SettingsError(
            f"client-name is {client!r}; algorithm {algorithm!r} trains on a client's "
            "examples before its model is used: name a simulated client, such as "
            "000000, or a device and, in data-dir, its data"
        )
    require(bool(client), "client-name", client, "the device's name")
    return task_of_device(run.settings, data_dir)


def _simulated_task(run: TrainedRun, client: str) -> tuple[Task, int]:
    """Return a simulation's task, as in the last evaluation, and a client's index."""
    if run.withheld_partition:
        raise unknown_split(run.withheld_partition)
    num_clients, index = int(run.settings["num-clients"]), int(client)
    allowed = f"one of 000000 to {num_clients - 1:06d}"
    require(index < num_clients, "client-name", client, allowed)
    task = build_task(run.settings, num_clients)
    check_examples(task, index, run.examples.get(client))
    return task, index


def _deployed(client: Client, card: ModelCard) -> Loaded:
    """Return a copy of the model that a client deploys, and its card.

    The deployed model shares memory with other clients, hence the copy. It may have
    more parts than the card describes.
    """
    return card.wrap(copy.deepcopy(client.deployed_model()).cpu()), card


def _personal_arrays(
    run: TrainedRun, kind: type[Client], client: str, state_dir: str
) -> tuple[dict[str, str], Tensors]:
    """Return metadata and arrays of a client's state file; empty if it needs none."""
    has_groups = bool(deployed_groups(kind))
    heads = under("heads/", run.state)
    on_server = {name.rpartition("/")[0] for name in heads}
    names = sorted(run.acknowledged if has_groups else on_server)
    if has_groups or names:
        allowed = f"one of {', '.join(run.labels.get(name, name) for name in names)}"
        require(bool(client), "client-name", client, allowed)
    # A newcomer has a state file even if the server stores the other clients' heads.
    if has_groups or (names and client not in names):
        return _read_state(run, kind, client, run.directory_of(client, state_dir))
    return {}, {}


def _read_state(
    run: TrainedRun, kind: type[Client], client: str, directory: Path | None
) -> tuple[dict[str, str], Tensors]:
    """Read a client's newest state that the checkpoint acknowledges.

    Unlike `PersonalState`, this function changes no file.
    """
    acknowledged = run.acknowledged.get(client, 0)
    versions = versions_in(directory)
    version = next(usable(versions, run.token, acknowledged), None)
    if version is None and client not in run.acknowledged:
        labels = [run.labels.get(name, name) for name in run.acknowledged]
        error = unknown("client", client, labels)
        line = f"{error}; {str(directory)!r} has no state of it"
        raise SettingsError(line, error.code)
    later = [v.round for v in versions if v.run == run.token]
    if version is None and later:
        raise SettingsError(
            f"client {run.labels.get(client, client)!r} has only states of round "
            f"{min(later)} and later; copy the server's newest checkpoint, as this one "
            f"acknowledges round {acknowledged}"
        )
    if version is None:
        raise SettingsError(
            f"client {run.labels.get(client, client)!r} has nothing of this run in "
            f"{str(directory)!r}; state-dir must be that of its SuperNode"
        )
    try:
        metadata, arrays = read_checked(version.path, client, None, algorithm_of(kind))
    except (SafetensorError, OSError, ValueError) as error:
        raise SettingsError(f"{str(version.path)!r} cannot be used: {error}") from None
    return metadata, {name: torch.from_numpy(array) for name, array in arrays.items()}


def _card_from_data(run: TrainedRun, arrays: Tensors, on_device: bool) -> ModelCard:
    """Build the run's task, which reads its data, and return its card."""
    run.check_data(arrays, without=initial_only(run.settings))
    num_clients = 0 if on_device else int(run.settings["num-clients"])
    card = ModelCard.from_settings(run.settings, num_clients, run.withheld_partition)
    if on_device or card.images is not None:
        return card
    return replace(card, task=run.with_same_examples(card.task))
