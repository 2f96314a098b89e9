"""Fit the personal parameters of a device that arrives after the training.

`flwr_frl.predict` then uses them, and so does a later run in which the device takes
part. The checkpoint stays unchanged.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context, RecordDict

from flwr_frl.clients.base import deployed_groups
from flwr_frl.clients.device.card import about_state
from flwr_frl.clients.device.groups import personal_arrays
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.files import refuse_links
from flwr_frl.common.settings import Setting, require
from flwr_frl.predict.file_settings import need
from flwr_frl.predict.predictor import FilePath
from flwr_frl.predict.runs import SIMULATED, TrainedRun
from flwr_frl.strategies.algorithms import settings_owners
from flwr_frl.task.devices import use

# Run name in the state file of a personalised device. For predictions it is an earlier
# run, whose state the device's first training replaces.
PERSONALIZED = "personalized"


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
    exists = os.path.exists(os.path.expanduser(data_dir))
    require(exists, "data-dir", str(data_dir), "a folder or file that is there")
    named = {"device": "auto", **settings, "data_dir": data_dir}
    run = TrainedRun.read(checkpoint, named, client_name)
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
    if directory is not None:
        refuse_links("checkpoint", directory.parent, directory)
    client = run.client(task, index, client_name)
    heads = {name.rpartition("/")[2] for name in run.heads}
    alone = [client._group_of(name) for name in client.received if name in heads]
    groups = (*deployed_groups(run.kind), *alone)
    allowed = "one with personal parameters; else use flwr_frl.predict --data-dir"
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
    saved = tuple(dict.fromkeys((*client.personal, *groups)))
    path = state.save(personal_arrays(client, saved), run.server_round)
    allowed = "a folder that can be written"
    require(path is not None, "state-dir", str(directory), allowed)
    assert path is not None
    loss, num_test_examples, metrics = client._test(client.deployed_model())
    count = len(task.train_examples(index))
    return Fitted(path, count, num_test_examples, loss, metrics)
