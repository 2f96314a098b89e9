"""Functions that only simulations use: trial clients, saved states, statistics."""

from collections.abc import Iterable, Mapping
from logging import ERROR
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, RecordDict, UserConfig
from flwr.common import log

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.identity import client_name
from flwr_frl.clients.device.newcomers import newcomers
from flwr_frl.clients.device.setup import ClientRun, build_client, client_setup
from flwr_frl.task.messages import (
    ACKNOWLEDGED_ROUND,
    CHECKPOINT_ROUND,
    CLASS_COUNTS,
    HELD_CLASSES,
    NEWCOMER,
    OWN_NAME,
    RUN,
)
from flwr_frl.task.settings import Settings, SettingsError, require


def try_out(settings: Settings, num_clients: int) -> list[Client]:
    """Build and check the first client of each of ``client-models``.

    Raises `SettingsError` if a model cannot be built, or its shared arrays differ from
    the first one's.
    """
    models = str(settings.get("client-models", "")).split()
    clients: list[Client] = []
    for i in range(min(max(1, len(models)), num_clients)):
        node = {"partition-id": i, "num-partitions": num_clients}
        context = Context(0, 0, {**node}, RecordDict(), {})
        clients.append(build_client(context, client_setup(context, {**settings}), {}))
        clients[i].get_properties({})
        both = clients[0]._structure(), clients[i]._structure()
        for first, other in zip(*both, strict=True):
            allowed = f"such that all share the same, not {first} and {other}"
            require(first == other, "client-models", settings["client-models"], allowed)
    return clients


def keep(
    contexts: Iterable[Context],
    settings: UserConfig,
    run: str,
    acknowledged: Mapping[str, int],
) -> None:
    """Write the states that clients have in memory to the run's directory.

    Each client's version of its last acknowledged round is written, if it has one.
    Failures are logged.
    """
    # With `resume`, states have a directory.
    given = {**settings, "resume": settings["output"]}
    for context in contexts:
        name = client_name(context)
        config = ConfigRecord({RUN: run})
        config[ACKNOWLEDGED_ROUND] = config[CHECKPOINT_ROUND] = acknowledged.get(
            name, 0
        )
        try:
            _keep(build_client(context, client_setup(context, given), config))
        except SettingsError as error:
            log(ERROR, "the state of client %s is in memory only: %s", name, error)


def _keep(client: Client) -> None:
    state = client.state
    if client.personal and state.round and not state.is_on_disk(state.round):
        round_, arrays = state.round, state.load()
        if arrays is not None and state.round == round_:
            state.save(arrays, round_)
    if client._private:
        client._private.write()


def simulated_properties(
    client: Client, context: Context, run: ClientRun
) -> dict[str, Any]:
    """Return properties that a simulated client reports and a device does not.

    They are its folder's name and its training examples of each class, if there are
    folders and classes, and whether it joins after training.
    """
    task, properties = client.task, dict[str, Any]()
    names = getattr(task, "client_names", ())
    if client.index < len(names):
        properties[OWN_NAME] = str(names[client.index])
    if task.classes:
        targets = task.train_examples(client.index).targets.numpy()
        held, counts = np.unique(targets[targets >= 0], return_counts=True)
        properties[HELD_CLASSES] = [str(task.classes[c]) for c in held]
        properties[CLASS_COUNTS] = counts.tolist()
    num_clients = int(context.node_config.get("num-partitions", 0))
    if client.index in newcomers(num_clients, run.new_clients, run.seed):
        properties[NEWCOMER] = True
    return properties
