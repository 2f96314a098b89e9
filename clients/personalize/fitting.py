"""Fit what is a device's own to a trained shared part, on the device's data."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context, RecordDict

from flwr_frl.clients.algorithms import client_class, takes_newcomers
from flwr_frl.clients.device.account import PrivateTraining, check_account
from flwr_frl.clients.device.card import ModelCard, check_array, check_size
from flwr_frl.clients.device.file_settings import named_settings
from flwr_frl.clients.device.identity import (
    DeviceSettings,
    about_state,
    check_task,
    seed_torch,
    task_of_device,
)
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.device.task_card import card_of
from flwr_frl.clients.predict.trained import check_classes, read_run
from flwr_frl.task.devices import use
from flwr_frl.task.files import refuse_links
from flwr_frl.task.messages import SERVER_ROUND
from flwr_frl.task.privacy import ExamplePrivacy
from flwr_frl.task.settings import Place, Settings, SettingsError, build, require

# As a run of its own in a device's state: what it has kept counts until it has trained.
RUN = "personalized"


class Fitted(NamedTuple):
    """What has become of a device that arrived after the training.

    Parameters
    ----------
    path : Path
        Where its own part is kept.
    num_examples, num_test_examples : int
        How many it was fitted and tested on.
    loss : float
        Of its test examples; NaN without any.
    metrics : dict
        As of an evaluation.
    has_images : bool
        Whether its part says by itself what the model's inputs are.
    """

    path: Path
    num_examples: int
    num_test_examples: int
    loss: float
    metrics: dict[str, Any]
    has_images: bool


def personalize(
    checkpoint: Path,
    data_dir: str,
    client_name: str,
    state_dir: str = "",
    device: str = "auto",
    task: str = "",
    algorithm: str = "",
    named: Settings | None = None,
) -> Fitted:
    """Fit a device's personal part, save it for `flwr_frl.clients.predict`, test it.

    The shared part is that of the checkpoint and stays so, there and here.

    Parameters
    ----------
    checkpoint : Path
        The server's, or the directory that it is in.
    data_dir : str
        The device's data.
    client_name : str
        What the device is called.
    state_dir : str, default ""
        The device's; beside the checkpoint by default, as in simulation.
    device : str, default "auto"
        What to train on: the setting ``device``.
    task, algorithm : str, default ""
        The task and the algorithm, where the checkpoint names an import path, or a task
        that downloads its data: a file alone does not get code run or a host contacted.
    named : mapping, optional
        Other settings that the checkpoint alone cannot set, by their names.

    Raises
    ------
    SettingsError
        If the device has trained, its data do not fit the shared part, or the
        algorithm leaves nothing to a device.
    """
    # A name may be too long, or of a ~ that nobody is.
    there = Place().permits(data_dir) and Path(data_dir).expanduser().exists()
    require(there, "data-dir", data_dir, "a folder or file that is there")
    texts = {"task": task, "algorithm": algorithm, "device": device}
    given = named_settings(named, data_dir=data_dir, **texts)
    run = read_run(checkpoint, given)
    trained = {*run.acknowledged, *map(run.labels.get, run.acknowledged)}
    if client_name in trained:
        raise SettingsError(
            f"client-name is {client_name!r}, and that client has trained in this run; "
            "only one that comes after the training is fitted"
        )
    settings = run.settings
    kind = client_class(settings)
    if not takes_newcomers(settings):
        raise SettingsError(
            f"algorithm {settings['algorithm']!r} leaves no model for devices that "
            "come after the training"
        )
    if not kind.groups_to_fit():
        raise SettingsError(
            f"algorithm {settings['algorithm']!r} leaves nothing to fit to a device: "
            "flwr_frl.clients.predict needs its global model alone, and --data-dir "
            "where it is "
            "fine-tuned before use"
        )
    # Also what is built with the task is where the client trains.
    use(device)
    torch.set_num_threads(build(DeviceSettings, settings).torch_threads)
    run.check_data(run.arrays)
    own_task = task_of_device(settings, data_dir)
    check_classes(kind, run, own_task.classes, data_dir)
    card = card_of(own_task, settings)
    check_size(card, run.arrays)
    check_task(own_task, kind, settings)
    own_task.check(0)
    directory = run.directory_of(client_name, state_dir)
    if directory is not None:
        refuse_links("checkpoint", directory.parent, directory)
    context = Context(0, 0, {"client-name": client_name}, RecordDict(), {})
    own = build(kind.settings_type, settings)
    # Nothing that was kept before has a say.
    client = kind(own_task, 0, PersonalState(context), own)
    privacy = build(ExamplePrivacy, settings)
    client.private = PrivateTraining.of(privacy, context.state, directory)
    check_account(client.private, directory)
    shared = dict(run.arrays)
    wanted = client.initial_arrays(client.shared)
    # A head that the server keeps for each client begins as everybody's.
    shared |= {n: a for n, a in wanted.items() if n not in shared and _fits(kind, n)}
    for name, like in wanted.items():
        check_array(card, name, like, shared)
    seed_torch(context, settings, {SERVER_ROUND: run.server_round})
    client.receive([shared[name].numpy() for name in wanted], {})
    client.personalize()
    state = PersonalState(
        Context(0, 0, {}, RecordDict(), {}),
        directory,
        run=RUN,
        client=client_name,
        about=about_state(own_task, kind),
    )
    state.save(client.personal_arrays(kind.groups_to_fit()), run.server_round)
    path = state.path(run.server_round)
    if path is None or not path.is_file():
        raise SettingsError(f"state-dir {str(directory)!r} cannot be written")
    loss, num_test_examples, metrics = client.test(client.deployed_model())
    count, has_images = len(own_task.train_examples(0)), isinstance(card, ModelCard)
    return Fitted(path, count, num_test_examples, loss, metrics, has_images)


def _fits(kind: Any, name: str) -> bool:
    return name.startswith(kind.groups_to_fit())
