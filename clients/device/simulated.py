"""What only simulated clients do: keep states beside the checkpoint, tell more."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from logging import ERROR
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, RecordDict, UserConfig
from flwr.common import log

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.identity import build_client, client_name, client_setup
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
    """Return the first client of each of ``client-models``, after trying them.

    Raises `SettingsError` if one is impossible, or shares other arrays than the first.
    """
    models = str(settings.get("client-models", "")).split()
    clients: list[Client] = []
    for i in range(min(max(1, len(models)), num_clients)):
        node = {"partition-id": i, "num-partitions": num_clients}
        context = Context(0, 0, {**node}, RecordDict(), {})
        clients.append(build_client(context, client_setup(context, {**settings}), {}))
        clients[i].get_properties({})
        both = clients[0].structure(), clients[i].structure()
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
    """Write what clients have in memory only, as if it had been kept on the disk.

    That is the version of each one's last round that counts, where it keeps any. Where
    the disk refuses it, the log says so.
    """
    # As for a run that can be resumed.
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
            log(ERROR, "what client %s has is in memory only: %s", name, error)


def _keep(client: Client) -> None:
    state = client.state
    if client.personal and state.round and not state.is_on_disk(state.round):
        round_, arrays = state.round, state.load()
        if arrays is not None and state.round == round_:
            state.save(arrays, round_)
    if client.private:
        client.private.write()


@lru_cache(maxsize=16)
def newcomers(num_clients: int, count: int, seed: int) -> frozenset[int]:
    """Return who of so many simulated clients comes after the training.

    They are drawn by the seed; at least one is left to train.
    """
    rng = np.random.default_rng([seed, 0x2E3C0])
    drawn = rng.permutation(num_clients)[: max(0, min(count, num_clients - 1))]
    return frozenset(drawn.tolist())


def simulated_properties(
    client: Client, context: Context, settings: Settings
) -> dict[str, Any]:
    """Return what a simulated client tells, and a device would not.

    That is its folder's name, and how many training examples it has of each class that
    it has any of, where there are such things; and whether it is a newcomer.
    """
    task, found = client.task, dict[str, Any]()
    names = getattr(task, "client_names", ())
    if client.index < len(names):
        found[OWN_NAME] = str(names[client.index])
    if task.classes:
        targets = task.train_examples(client.index).targets.numpy()
        held, counts = np.unique(targets[targets >= 0], return_counts=True)
        found[HELD_CLASSES] = [str(task.classes[c]) for c in held]
        found[CLASS_COUNTS] = counts.tolist()
    count = int(settings["new-clients"])
    num_clients = int(context.node_config.get("num-partitions", 0))
    if client.index in newcomers(num_clients, count, int(settings["seed"])):
        found[NEWCOMER] = True
    return found
