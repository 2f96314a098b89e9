"""Fit a device's personal parameters to a trained shared part, on the device's data."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context, RecordDict

from flwr_frl.clients.algorithms import client_class, takes_newcomers
from flwr_frl.clients.base import Client, deployed_groups
from flwr_frl.clients.device.card import ModelCard, about_state
from flwr_frl.clients.device.conversions import under
from flwr_frl.clients.device.file_settings import named_settings
from flwr_frl.clients.device.parameter_groups import (
    initial_arrays,
    personal_arrays,
)
from flwr_frl.clients.device.setup import (
    DeviceSettings,
    check_task,
)
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.files import refuse_links
from flwr_frl.common.settings import (
    Settings,
    SettingsError,
    build,
    is_possible,
    require,
)
from flwr_frl.predict.trained import TrainedRun, read_run, task_of_device
from flwr_frl.task.devices import use

# Run name in the state file. For predictions it is an earlier run, whose state the
# device's first training replaces.
RUN = "personalized"


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
    checkpoint: Path,
    data_dir: str,
    client_name: str,
    state_dir: str = "",
    device: str = "auto",
    task: str = "",
    algorithm: str = "",
    named: Settings | None = None,
) -> Fitted:
    """Fit, save and test a device's personal parameters.

    `flwr_frl.predict` uses the saved parameters. The checkpoint stays
    unchanged.

    Parameters
    ----------
    checkpoint : Path
        The server's checkpoint, or the folder that contains it.
    data_dir : str
        The device's data.
    client_name : str
        Name of the device.
    state_dir : str, default ""
        The device's ``state-dir``; by default a folder beside the checkpoint, as in
        simulation.
    device : str, default "auto"
        Where to train, as the setting ``device``.
    task, algorithm : str, default ""
        The task and the algorithm, if the checkpoint names an import path or a task
        that downloads its data. A file alone never causes code to run or a host to be
        contacted.
    named : mapping, optional
        Other settings that the checkpoint alone cannot set, by name.

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
    # `is_possible` refuses names that are too long or start with an unknown ~user.
    exists = is_possible(data_dir) and Path(data_dir).expanduser().exists()
    require(exists, "data-dir", data_dir, "a folder or file that is there")
    texts = {"task": task, "algorithm": algorithm, "device": device}
    run = read_run(checkpoint, named_settings(named, data_dir=data_dir, **texts))
    settings = run.settings
    kind = _newcomer_class(run, client_name)
    # The device is set before the task is built, which allocates memory on it.
    use(device)
    torch.set_num_threads(build(DeviceSettings, settings).torch_threads)
    run.check_data(run.arrays)
    own_task = task_of_device(settings, data_dir)
    run.check_classes(kind, own_task.classes)
    card = ModelCard.of_device(own_task, settings)
    card.check_size(run.arrays)
    check_task(own_task, kind, settings)
    own_task.check(0)
    directory = run.directory_of(client_name, state_dir)
    if directory is not None:
        refuse_links("checkpoint", directory.parent, directory)
    # The fit starts from an empty state, even if the device has a saved one.
    state = PersonalState(Context(0, 0, {}, RecordDict(), {}))
    client = kind(own_task, 0, state, build(kind.settings_type, settings))
    run.check_frozen(client)
    initial = initial_arrays(client, client.shared)
    # If the server stores a head for each client, the newcomer's is the initial head.
    heads = {name.rpartition("/")[2] for name in under("heads/", run.state)}
    alone = {name: array for name, array in initial.items() if name in heads}
    groups = (*deployed_groups(kind), *map(client._group_of, alone))
    if not groups:
        raise SettingsError(
            f"algorithm {settings['algorithm']!r} leaves nothing to fit to a device: "
            "use flwr_frl.predict with --data-dir"
        )
    if any(0 in like.shape for like in initial.values()):
        raise SettingsError(
            f"algorithm {settings['algorithm']!r} sends clients models that its shared "
            "arrays lack; simulate new clients with new-clients"
        )
    shared = {**alone, **run.arrays}
    for name, like in initial.items():
        card.check_array(name, like, shared)
    run.prepare(client, client_name, directory)
    client.receive([shared[name].numpy() for name in initial], {})
    client.personalize()
    state = PersonalState(
        Context(0, 0, {}, RecordDict(), {}),
        directory,
        run=RUN,
        client=client_name,
        about=about_state(own_task, kind),
    )
    # Personal groups that were not fitted keep their initial values.
    saved = tuple(dict.fromkeys((*client.personal, *groups)))
    path = state.path(run.server_round)
    if not state.save(personal_arrays(client, saved), run.server_round):
        raise SettingsError(f"state-dir {str(directory)!r} cannot be written")
    loss, num_test_examples, metrics = client.test(client.deployed_model())
    count = len(own_task.train_examples(0))
    return Fitted(path, count, num_test_examples, loss, metrics)


def _newcomer_class(run: TrainedRun, client_name: str) -> type[Client]:
    """Return the run's client; `SettingsError` if a device cannot join the run."""
    trained = {*run.acknowledged, *map(run.labels.get, run.acknowledged)}
    if client_name in trained:
        raise SettingsError(
            f"client-name is {client_name!r}, and that client has trained in this run; "
            "only a device that arrives after the training can be fitted"
        )
    algorithm = f"algorithm {run.settings['algorithm']!r}"
    kind = client_class(run.settings)
    if not takes_newcomers(run.settings):
        raise SettingsError(
            f"{algorithm} leaves no model for devices that come after the training"
        )
    return kind
