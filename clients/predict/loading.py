"""Load a trained model: a client's own part and what it shares."""

import copy
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from flwr.app import Context, RecordDict
from safetensors import SafetensorError

from flwr_frl.clients.algorithms import client_class
from flwr_frl.clients.base import Client
from flwr_frl.clients.device.account import PrivateTraining, check_account
from flwr_frl.clients.device.card import (
    Classifier,
    ModelCard,
    check_array,
    check_size,
    is_built_by_name,
)
from flwr_frl.clients.device.file_settings import named_settings
from flwr_frl.clients.device.identity import algorithm_of, seed_torch, task_of_device
from flwr_frl.clients.device.parameter_groups import Tensors, under
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.device.state_file import age_key, read_checked
from flwr_frl.clients.device.task_card import NOT_LOADED, TaskCard, card_of, unsplit
from flwr_frl.clients.predict.trained import (
    TrainedRun,
    check_classes,
    read_run,
    read_tensors,
)
from flwr_frl.task.base import BaseTask, Task
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.files import STATE_FILE
from flwr_frl.task.messages import SERVER_ROUND
from flwr_frl.task.models import SplitModel
from flwr_frl.task.privacy import ExamplePrivacy
from flwr_frl.task.settings import (
    Settings,
    SettingsError,
    build,
    made_by,
    require,
    unknown,
)
from flwr_frl.task.tasks import build_task, task_maker
from flwr_frl.task.tasks.hub import FromHub
from flwr_frl.task.tasks.image import ImageTask

FORMAT = "flwr-frl model 1"
# Images in memory at a time.
BATCH = 64
# The name of a simulated client.
ANYBODY = "000000"

# A trained model, and what its inputs and outputs mean.
Loaded = tuple[Classifier, ModelCard] | tuple[SplitModel, TaskCard]


def classify(
    classifier: Classifier, card: ModelCard, images: Sequence[Path]
) -> Iterator[tuple[Path, str, float]]:
    """Classify images.

    Parameters
    ----------
    classifier : Classifier
        The model.
    card : ModelCard
        What its inputs and outputs are.
    images : sequence of Path
        Image files; a missing one, or one without an image, is a `SettingsError`.

    Yields
    ------
    path, class name, probability
        Of one image after the other.
    """
    for start in range(0, len(images), BATCH):
        paths = images[start : start + BATCH]
        with torch.no_grad():
            best = classifier(card.read(paths)).softmax(1).max(1)
        for path, probability, label in zip(paths, *best, strict=True):
            yield path, card.classes[int(label)], float(probability)


def load_model(
    path: Path, task: str = "", data_dir: str = "", named: Settings | None = None
) -> Loaded:
    """Load what `export` wrote as ``.safetensors``.

    Parameters
    ----------
    path : Path
        The file; a missing, damaged or other one is a `SettingsError`.
    task : str, default ""
        The task, where the file names an import path or one that downloads its data:
        a file alone does not get code run or a host contacted (`followed`).
    data_dir : str, default ""
        The data, for a task that reads its classes from them.
    named : mapping, optional
        Other settings that the file alone cannot set, by their names.

    Returns
    -------
    Classifier, ModelCard
        The model; for a task without image files, the `SplitModel` and a `TaskCard`.
    """
    about, tensors = read_tensors(path, "model")
    if about.get("format") != FORMAT:
        raise SettingsError(
            f"model is {str(path)!r}; it must be a file that --export has written"
        )
    try:
        if "task" in about:
            own = named_settings(named, task=task, data_dir=data_dir)
            card = TaskCard.from_metadata(about, own)
            return card.classifier(tensors), card
        image_card = ModelCard.from_metadata(about)
        return image_card.classifier(tensors), image_card
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
    """Put the shared arrays of a run and a client's own part together.

    Raises `SettingsError` if a file is missing or damaged, the client is unknown, or
    nothing fits.

    Parameters
    ----------
    path : Path or str
        The server's checkpoint, or the directory that it is in.
    client : str, default ""
        The client's name; not needed where clients keep nothing of their own.
    state_dir : str, default ""
        The ``state-dir`` of a device; by default what a simulation keeps beside the
        checkpoint.
    data_dir : str, default ""
        The device's data: for what the algorithm fine-tunes before use (``-ft``,
        FedBABU, Per-FedAvg), as in the last evaluation; and for the classes where the
        client has no file of its own (FLUTE, FedAvg). Without it and ``state_dir``, or
        where it is the ``data-dir`` of the run itself, the run was a simulation, of
        which the examples are known.
    task : str, default ""
        As for `load_model`.
    partition : str, default ""
        The import path of a simulation's custom partition. Without it nobody's
        examples are known.
    algorithm : str, default ""
        The algorithm, where it is an import path.
    named : mapping, optional
        As for `load_model`.
    """
    require(isinstance(client, str), "client", client, "a client's name, a text")
    require(
        isinstance(task, str), "task", task, "an import path, 'package.module:name'"
    )
    texts = {"task": task, "partition": partition, "algorithm": algorithm}
    given = named_settings(named, data_dir=data_dir, **texts)
    data_dir = str(given.get("data-dir", ""))
    run = read_run(Path(path), given)
    settings = run.settings
    # A simulated client goes by its folder's name.
    if client not in run.acknowledged:
        client = {own: name for name, own in run.labels.items()}.get(client, client)
    # The user may name the simulation's data, and no device's.
    simulated = not state_dir and _is_simulated(client or ANYBODY)
    of_run = simulated and _same_place(data_dir, run.data_dir)
    on_device = bool(state_dir or data_dir) and not of_run
    kind = client_class(settings)
    if not kind.fixed_shapes:
        raise SettingsError(
            f"algorithm {settings['algorithm']!r} leaves no model of the task's own: "
            "what it shares has other shapes, and its clients alone put it together"
        )
    arrays = dict(run.arrays)
    slots = kind.personal if kind.predicts_with_personal else ()
    known: list[str] = []
    if slots:
        known = sorted(run.acknowledged)
    elif heads := under("heads/", run.state):
        known = sorted({name.rpartition("/")[0] for name in heads})
        arrays |= under(f"{client}/", heads)
    if known or slots:
        allowed = ", ".join(run.labels.get(name, name) for name in known)
        require(bool(client), "client-name", client, f"one of {allowed}")
    card, about, personal = None, dict[str, str](), Tensors()
    # One that came after the training has its own part even where the server has the
    # others' heads.
    if slots or (known and client not in known):
        own = run.directory_of(client, state_dir)
        about, personal = _own(own, client, run, kind)
        card = ModelCard.from_metadata(about) if "model" in about else None
    held = arrays | personal
    about_model = card or _card_of_data(run, held, data_dir, on_device)
    if card is None:
        check_classes(kind, run, about_model.classes, data_dir)
        own_classes = json.dumps(tuple(about_model.classes))
        require(
            about.get("classes", own_classes) == own_classes,
            "data-dir",
            data_dir,
            f"one with the classes {about.get('classes')}, for which the head is",
        )

    def trained(task: Task, card: ModelCard | TaskCard, index: int = 0) -> Client:
        state = PersonalState.holding({n: a.numpy() for n, a in personal.items()})
        check_size(card, held)
        found = kind(task, index, state, build(kind.settings_type, settings))
        _receive(found, card, held)
        return found

    try:
        try:
            return _in_use(trained(_dataless(about_model), about_model), about_model)
        except _NeedsDataError:
            run.check_data(held, without=NOT_LOADED)
            if on_device or not _is_simulated(client):
                # A simulation's data are of all clients.
                own_dir = data_dir if on_device else ""
                own_task = _task_to_train_on(settings, client, own_dir)
                check_classes(kind, run, own_task.classes, data_dir)
                about_model = card_of(own_task, {**settings, "data-dir": data_dir})
                trainer = trained(own_task, about_model)
            else:
                if run.own_partition:
                    raise SettingsError(unsplit(run.own_partition)) from None
                num_clients, index = int(settings["num-clients"]), int(client)
                allowed = f"one of 000000 to {num_clients - 1:06d}"
                require(index < num_clients, "client-name", client, allowed)
                # As it was evaluated, also with what validation leaves of the examples.
                own_task = build_task(settings, num_clients)
                trainer = trained(own_task, about_model, index)
            _prepare(trainer, run, client, state_dir)
            return _in_use(trainer, about_model)
    except SettingsError as error:
        raise SettingsError(f"{str(run.path)!r}: {error}") from None


class _NeedsDataError(SettingsError):
    """A model is used as it comes out of training on the device's data."""


class _ImageModel(BaseTask):
    """A model's card as a task: a model, and no data."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.classes = card.classes
        self.loss = torch.nn.functional.cross_entropy

    def initial_model(self) -> SplitModel:
        return self.card.build()

    def train_examples(self, client: int) -> ExampleSet:
        raise NotImplementedError

    test_examples = train_examples


def _dataless(card: ModelCard | TaskCard) -> Task:
    """Return the card's task, whose data are nobody's here."""

    def refuse(client: int) -> ExampleSet:
        raise _NeedsDataError("it has no data")

    task: Task = (
        _ImageModel(card) if isinstance(card, ModelCard) else copy.copy(card.task)
    )
    vars(task).update(train_examples=refuse, test_examples=refuse)
    return task


def _task_to_train_on(settings: Settings, client: str, data_dir: str) -> Task:
    if not data_dir:
        raise SettingsError(
            f"client-name is {client!r}; algorithm {settings['algorithm']!r} trains on "
            "a client's examples before its model is used: name a simulated client, "
            "000000 say, or a device and, in data-dir, its data"
        )
    require(bool(client), "client-name", client, "the device's name")
    return task_of_device(settings, data_dir)


def _same_place(one: str, other: str) -> bool:
    """Return whether two texts name the same folder."""
    both = [Path(text).expanduser().resolve() for text in (one, other)]
    return both[0] == both[1]


def _is_simulated(client: str) -> bool:
    """Return whether a name is one that clients have in simulation alone."""
    return re.fullmatch(r"[0-9]{6,}", client) is not None


def _prepare(client: Client, run: TrainedRun, name: str, state_dir: str) -> None:
    """Let a client train as in the run's last evaluation."""
    context = Context(0, 0, {"client-name": name}, RecordDict(), {})
    seed_torch(context, run.settings, {SERVER_ROUND: run.server_round})
    privacy = build(ExamplePrivacy, run.settings)
    directory = run.directory_of(name, state_dir)
    client.private = PrivateTraining.of(privacy, context.state, directory)
    check_account(client.private, directory)


def _in_use(client: Client, card: ModelCard | TaskCard) -> Loaded:
    """Return the model that a client itself would use."""
    # It may be more than the card's model: two heads, say. The client's own is lent to
    # all of this process.
    model = copy.deepcopy(client.deployed_model()).cpu().eval()
    if isinstance(card, TaskCard):
        return model, card
    return Classifier(model, card.mean, card.std), card


def _receive(client: Client, card: ModelCard | TaskCard, held: Tensors) -> None:
    """Give a client what the run and it itself have kept."""
    slots = client.personal if client.predicts_with_personal else ()
    for name, wanted in client.initial_arrays(client.shared + slots).items():
        check_array(card, name, wanted, held)
    names = client.names(client.shared)
    client.receive([held[name].numpy() for name in names], {})


def _own(
    directory: Path | None, client: str, trained: TrainedRun, kind: type[Client]
) -> tuple[dict[str, str], Tensors]:
    """Return a client's state of its last round that counts in the checkpoint.

    Unlike `PersonalState`, it leaves all files as they are.
    """
    found = []
    acknowledged, label = trained.acknowledged, trained.labels.get(client, client)
    if directory is not None and directory.is_dir():
        for path in directory.iterdir():
            match = STATE_FILE.fullmatch(path.name)
            if match is None:
                continue
            run, round_ = match[1] or "", int(match[2])
            if run != trained.token:
                # What an earlier run has left counts until there is something newer.
                found.append(((0, *age_key(path)), path))
            elif round_ <= acknowledged.get(client, 0):
                found.append(((1, round_, 0, ""), path))
    if not found:
        if client not in acknowledged:
            labels = [trained.labels.get(name, name) for name in acknowledged]
            error = unknown("client", client, labels)
            if directory is None:
                raise error
            raise SettingsError(f"{error}; nothing of it is in {str(directory)!r}")
        raise SettingsError(
            f"client {label!r} has nothing of this run in {str(directory)!r}; "
            "state-dir must be that of its SuperNode"
        )
    path = max(found)[1]
    try:
        about, arrays = read_checked(path, client, about=algorithm_of(kind))
    except (SafetensorError, OSError, ValueError) as error:
        raise SettingsError(f"{str(path)!r} cannot be used: {error}") from None
    return about, {name: torch.from_numpy(array) for name, array in arrays.items()}


def _card_of_data(
    run: TrainedRun, held: Tensors, data_dir: str, on_device: bool
) -> ModelCard | TaskCard:
    settings = run.settings
    try:
        run.check_data(held, without=NOT_LOADED)
    except SettingsError as error:
        raise SettingsError(f"{str(run.path)!r}: {error}") from None
    given = {**settings, **({"data-dir": data_dir} if data_dir else {})}
    maker = made_by(task_maker(str(settings["task"])))
    if maker is ImageTask or isinstance(maker, FromHub):
        task = build_task(given, 0)
        if is_built_by_name(task):
            return ModelCard.of(task)
    num_clients = 0 if on_device else int(settings["num-clients"])
    return TaskCard(given, num_clients).split_by(run.own_partition)
