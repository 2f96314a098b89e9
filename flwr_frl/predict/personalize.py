"""Fit the personal parameters of a device that arrives after the training.

``python -m flwr_frl.predict.personalize --checkpoint results/fedrep --data-dir
/srv/images --client-name pi-9 --state-dir /var/lib/flwr-frl/state`` fits a head, or the
algorithm's other personal parameters, for ``newcomer-epochs`` of the run's settings.
The checkpoint stays unchanged. ``flwr_frl.predict`` with the same options then
uses the result, and so does a later run in which the device takes part.
"""

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context, RecordDict

from flwr_frl.clients.algorithms import takes_newcomers
from flwr_frl.clients.base import deployed_groups
from flwr_frl.clients.device.card import about_state
from flwr_frl.clients.device.parameter_groups import personal_arrays
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.files import refuse_links
from flwr_frl.common.settings import Setting, SettingsError, require
from flwr_frl.predict.loading import SIMULATED, TrainedRun, read_run
from flwr_frl.predict.predictor import FilePath
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
    run = read_run(checkpoint, named)
    _check_newcomer(run, client_name)
    # Personal parts that are not fitted keep their initial values.
    run.files.need(["weights"])
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
    if not groups:
        raise SettingsError(
            f"algorithm {run.settings['algorithm']!r} leaves nothing to fit to a "
            "device: use flwr_frl.predict with --data-dir",
            "algorithm",
        )
    run.prepare(client, client_name, directory)
    client.personalize()
    state = PersonalState(
        Context(0, 0, {}, RecordDict(), {}),
        directory,
        run=RUN,
        client=client_name,
        about=about_state(task, run.kind),
    )
    saved = tuple(dict.fromkeys((*client.personal, *groups)))
    path = state.path(run.server_round)
    if not state.save(personal_arrays(client, saved), run.server_round):
        message = f"state-dir {str(directory)!r} cannot be written"
        raise SettingsError(message, "state-dir")
    loss, num_test_examples, metrics = client.test(client.deployed_model())
    count = len(task.train_examples(index))
    return Fitted(path, count, num_test_examples, loss, metrics)


def _check_newcomer(run: TrainedRun, name: str) -> None:
    """Raise `SettingsError` if a device cannot join the run."""
    trained = run.values.acknowledged
    known = name in {*trained, *map(run.values.labels.get, trained)}
    allowed = "that of a device that arrives after the training"
    require(not known and not SIMULATED.fullmatch(name), "client-name", name, allowed)
    allowed = "one that leaves a model for devices that come after the training"
    algorithm = run.settings["algorithm"]
    require(takes_newcomers(run.settings), "algorithm", algorithm, allowed)


if __name__ == "__main__":
    from flwr_frl.predict.__main__ import personalize_main

    sys.exit(personalize_main())
