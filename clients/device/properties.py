"""The properties that clients report to the server before the first round."""

from functools import lru_cache
from logging import WARNING
from typing import Any, cast

import numpy as np
from flwr.app import ConfigRecord, Context
from flwr.common import ConfigRecordValues, log

from flwr_frl.clients.base import Client, Config, example_counts
from flwr_frl.clients.device.parameter_groups import array_names
from flwr_frl.clients.device.setup import (
    Setup,
    build_client,
    partition,
    seed_torch,
    unread,
)
from flwr_frl.common.messages import (
    CLASS_COUNTS,
    EXAMPLES,
    HELD_CLASSES,
    INCOMPATIBLE_WITH_NOISE,
    INPUTS,
    NEWCOMER,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    OWN_NAME,
    RUN,
)
from flwr_frl.common.run_cache import run_object
from flwr_frl.common.settings import Settings
from flwr_frl.task.base import Task
from flwr_frl.task.fingerprint import fingerprint
from flwr_frl.task.tasks import built_task, reads_data_dir
from flwr_frl.task.tasks.image import ImageTask


class CommonProperties(dict[tuple[int, int], tuple[Setup, Task, Config]]):
    """Properties of simulated clients that differ in nothing but their examples.

    The keys are the id of a setup and the number of clients. The value refers to the
    setup, so that its id stays unique.
    """


def properties_of(context: Context, setup: Setup, config: Config) -> Config:
    """Return the properties that a client reports.

    Simulated clients often differ in their examples only. Then the first one is built,
    and the others report its properties with their own numbers of examples.

    Parameters
    ----------
    context, setup : Context, Setup
        The client's context, and its settings.
    config : dict
        Config of the query.

    Raises
    ------
    SettingsError
        If the client cannot take part.
    """
    index, num_clients = partition(context.node_config, setup.run)
    alike = differs_in_examples_only(context, setup)
    first, key = run_object(CommonProperties), (id(setup), num_clients)
    if alike and key in first:
        _, task, common = first[key]
        properties = {**common, **example_counts(task, index)}
    else:
        seed_torch(context, int(setup.run["seed"]), config)
        client = build_client(context, setup, config)
        task, properties = client.task, _reported_by(client, context, setup, config)
        if alike:
            first[key] = setup, task, dict(properties)
    for count in properties.keys() & {NUM_EXAMPLES, NUM_TEST_EXAMPLES}:
        properties[count] = setup.device.rounded(cast(int, properties[count]))
    if "partition-id" in context.node_config:
        properties |= simulated_properties(task, index, num_clients, setup.run)
    return properties


def label_of(context: Context, setup: Setup) -> Config:
    """Return the name of a simulated client's data, under its key; {} without one."""
    if "partition-id" not in context.node_config:
        return {}
    index, num_clients = partition(context.node_config, setup.run)
    names = getattr(built_task(setup.task, num_clients), "client_names", ())
    return {OWN_NAME: str(names[index])} if index < len(names) else {}


def differs_in_examples_only(context: Context, setup: Setup) -> bool:
    """Return whether clients with this setup differ only in numbers of examples."""
    kind, weights = setup.kind, getattr(setup.algorithm, "class_weights", "none")
    return (
        context.node_config.keys() == {"partition-id", "num-partitions"}
        and kind.get_properties is Client.get_properties
        and isinstance(kind.shared, tuple)
        and weights == "none"
        # Clients with saved states also report their rounds.
        and setup.states is None
        and not context.state
    )


def _reported_by(
    client: Client, context: Context, setup: Setup, config: Config
) -> Config:
    """Return the properties of a client that has been built."""
    properties = client.get_properties(config) | incompatible_with_noise(client)
    if RUN in config and client.personal:
        properties |= cast(Config, client.state.kept())
    if isinstance(client.task, ImageTask):
        properties |= zip(INPUTS, client.task.shape, strict=True)
    # A device handles each message in a new process, so notes are logged here only.
    if "partition-id" not in context.node_config:
        for note in getattr(client.task, "notes", ()):
            log(WARNING, "%s", note)
    ignored = unread(context.node_config, type(client))
    if not reads_data_dir(client.task, str(setup.run["task"])):
        ignored += [name for name in context.node_config if name == "data-dir"]
    for unknown in ignored:
        log(WARNING, "%s in the node config is not read", unknown)
    # Flower checks the types, as a subclass may have added properties.
    ConfigRecord(cast(dict[str, ConfigRecordValues], properties))
    return properties


def incompatible_with_noise(client: Client) -> Config:
    """Return the property of a model with constants or tied parameters that are shared.

    With noise from the server, constants change in each round, and the names of a tied
    parameter have different values. The property is absent for other models.
    """
    model = client.task.scratch_model
    shared = set(array_names(client, client.shared))
    buffers = {n: b for n, b in model.named_buffers() if n in shared}
    # Batch norms, which have counters, are refused with another message.
    if buffers and all(b.is_floating_point() for b in buffers.values()):
        what = f"the buffer {min(buffers)!r}: register it with persistent=False"
        return {INCOMPATIBLE_WITH_NOISE: what}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name and {first, name} <= shared:
            return {
                INCOMPATIBLE_WITH_NOISE: f"one parameter as {first!r} and as {name!r}"
            }
    return {}


def simulated_properties(
    task: Task, index: int, num_clients: int, run: Settings
) -> dict[str, Any]:
    """Return properties that a simulated client reports and a device does not.

    They are the fingerprint of its examples, its number of training examples of each
    class, if there are classes, and whether it joins after training.
    """
    properties: dict[str, Any] = {EXAMPLES: fingerprint(task, index)}
    if task.classes:
        targets = task.train_examples(index).targets.numpy()
        held, counts = np.unique(targets[targets >= 0], return_counts=True)
        properties[HELD_CLASSES] = [str(task.classes[c]) for c in held]
        properties[CLASS_COUNTS] = counts.tolist()
    new_clients, seed = int(run["new-clients"]), int(run["seed"])
    if index in newcomers(num_clients, new_clients, seed):
        properties[NEWCOMER] = True
    return properties


@lru_cache(maxsize=16)
def newcomers(num_clients: int, count: int, seed: int) -> frozenset[int]:
    """Draw the simulated clients that join after training; at least one trains."""
    rng = np.random.default_rng([seed, 0x2E3C0])
    drawn = rng.permutation(num_clients)[: max(0, min(count, num_clients - 1))]
    return frozenset(drawn.tolist())
