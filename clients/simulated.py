"""Functions that only simulations use: trial builds, saved states and newcomers."""

from collections.abc import Iterable, Mapping
from logging import ERROR

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.common import NDArrays, log

from flwr_frl.clients.algorithms import client_setup
from flwr_frl.clients.base import Client, Config, EvaluateResult
from flwr_frl.clients.device.setup import build_client, client_name
from flwr_frl.clients.device.state import versions_in
from flwr_frl.common.messages import (
    ACKNOWLEDGED_ROUND,
    CHECKPOINT_ROUND,
    FITTED,
    RUN,
    SHARE,
)
from flwr_frl.common.settings import Resolved, SettingsError, require
from flwr_frl.task.held_out import fewer


def try_out(settings: Resolved, num_clients: int) -> list[Client]:
    """Build and check the first client of each of ``client-models``.

    Raises `SettingsError` if a model cannot be built, or its shared arrays differ from
    the first one's.
    """
    models = str(settings.get("client-models", "")).split()
    clients: list[Client] = []
    for i in range(min(max(1, len(models)), num_clients)):
        node = {"partition-id": i, "num-partitions": num_clients}
        context = Context(0, 0, {**node}, RecordDict(), {})
        clients.append(build_client(context, client_setup(context, settings), {}))
        clients[i].get_properties({})
        both = clients[0]._structure(), clients[i]._structure()
        for first, other in zip(*both, strict=True):
            allowed = f"such that all share the same, not {first} and {other}"
            require(first == other, "client-models", settings["client-models"], allowed)
    return clients


def keep(
    contexts: Iterable[Context],
    settings: Resolved,
    run: str,
    acknowledged: Mapping[str, int],
) -> bool:
    """Write the states that clients hold in memory to the run's directory.

    The version of each client's last acknowledged round is written, if there is one.
    Failures are logged. Return True if all states are written.
    """
    written = True
    # Only with `resume` or checkpoints do states have a directory.
    resumed = Resolved({**settings, "resume": settings["output"]})
    for context in contexts:
        name = client_name(context.node_config)
        config = ConfigRecord({RUN: run})
        config[ACKNOWLEDGED_ROUND] = config[CHECKPOINT_ROUND] = acknowledged.get(
            name, 0
        )
        try:
            setup = client_setup(context, resumed)
            client = build_client(context, setup, config)
            state, round_ = client._state, client._state.round
            on_disk = {(v.run, v.round) for v in versions_in(state.directory)}
            missing = round_ and (run, round_) not in on_disk
            arrays = state.load() if missing else None
            if arrays is not None and state.round == round_:
                written = state.save(arrays, round_) is not None and written
            if client._private:
                client._private.write()
        except SettingsError as error:
            log(ERROR, "the state of client %s is in memory only: %s", name, error)
            written = False
    return written


def join(
    client: Client, parameters: NDArrays, config: Config, seed: int
) -> EvaluateResult:
    """Fit the personal groups of a client that joins after training, and test.

    Parameters
    ----------
    client : Client
        The client.
    parameters : list of ndarray
        The trained shared arrays.
    config : dict
        As in `Client.fit`; ``share``, in (0, 1], is the fraction of the training
        examples that is used.
    seed : int
        Seed with which these examples are drawn.

    Returns
    -------
    loss, num_examples, metrics
        As returned by `Client.evaluate`; ``fitted`` is the number of training examples
        used.
    """
    share = float(config.get(SHARE, 1.0))
    client.task = fewer(client.task, client._index, share, seed)
    client._receive(parameters, config)
    client.personalize()
    loss, num_examples, metrics = client._test(client.deployed_model())
    metrics[FITTED] = len(client.task.train_examples(client._index))
    return loss, num_examples, metrics
