"""Fit the personal parameters of a device that arrives after the training.

``python -m flwr_frl.predict.personalize --checkpoint results/fedrep --data-dir
/srv/images --client-name pi-9 --state-dir /var/lib/flwr-frl/state`` fits a head, or the
algorithm's other personal parameters, for ``newcomer-epochs`` of the run's settings.
The checkpoint stays unchanged. ``flwr_frl.predict`` with the same options then
uses the result, and so does a later run in which the device takes part.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context, RecordDict

from flwr_frl.clients.base import deployed_groups
from flwr_frl.clients.device.card import about_state
from flwr_frl.clients.device.groups import personal_arrays
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.command_line import exit_code
from flwr_frl.common.files import refuse_links
from flwr_frl.common.settings import Setting, require
from flwr_frl.predict.__main__ import named_in, parser_of
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
    require(new, "client-name", client_name, allowed)
    # The traits of the class suffice; an instance would allocate its state.
    leaves = all(o._traits.takes_newcomers for o in settings_owners(run.settings))
    algorithm = run.settings["algorithm"]
    allowed = "one that leaves a model for devices that come after the training"
    require(leaves, "algorithm", algorithm, allowed)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after printing a one-line error."""
    return exit_code(lambda: _main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: Sequence[str]) -> int:
    parser = parser_of("flwr_frl.predict.personalize", __doc__)
    options = parser.parse_args(arguments)
    name = options.client_name or Path(options.data_dir).resolve().name
    where = {"checkpoint": options.checkpoint, "data_dir": options.data_dir}
    where |= {"client_name": name, "state_dir": options.state_dir}
    fitted = personalize(**{**named_in(options), **where})
    results = {"loss": fitted.loss, **fitted.metrics}
    text = ", ".join(f"{key} {value:.4g}" for key, value in results.items())
    text += f" on {fitted.num_test_examples} test examples"
    print(f"fitted on {fitted.num_examples} examples, {text}; kept in {fitted.path}")
    command = shlex.join(["--client-name", name, *arguments])
    print(f"python -m flwr_frl.predict FILES {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
