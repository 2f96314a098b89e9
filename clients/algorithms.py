"""Look up an algorithm's client class, and resolve the settings of a client."""

from pathlib import Path
from typing import Any

from flwr.app import Context

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.setup import (
    DeviceSettings,
    Setup,
    check_names,
    client_name,
    partition,
    per_device,
)
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.run_cache import run_cache
from flwr_frl.common.settings import (
    Maker,
    Resolved,
    Setting,
    Settings,
    build,
    converted,
    declared,
    is_path,
    load,
    resolve,
)
from flwr_frl.common.text import short_name
from flwr_frl.strategies.algorithms import settings_owners
from flwr_frl.task.tasks import task_key, task_maker


def load_client(path: str) -> type[Client]:
    """Return the client class at an import path, ``package.module:Class``.

    Raises `SettingsError` if it cannot be imported or is not a `Client`.
    """
    kind = load(path, "client")
    if isinstance(kind, type) and issubclass(kind, Client):
        return kind
    raise SettingsError(f"client {path!r} is no client; expected a subclass of Client")


def client_class(settings: Settings) -> type[Client]:
    """Return the client class that the algorithm's strategy names.

    Parameters
    ----------
    settings : mapping
        ``algorithm`` and ``task``; for SRPFL also its base.

    Returns
    -------
    type of Client
        The class.

    Raises
    ------
    SettingsError
        If there is no such algorithm, or its client cannot be imported.
    """
    return load_client(settings_owners(settings)[-1]._traits.client)


def owners(settings: Settings) -> list[Maker]:
    """Return the classes and functions that declare settings of a run.

    Parameters
    ----------
    settings : mapping
        As for `client_class`.

    Returns
    -------
    list of callable
        Strategies, the client and the task.
    """
    task = task_maker(str(settings["task"]))
    return [*settings_owners(settings), client_class(settings), task]


def complete(settings: Settings) -> dict[str, Setting]:
    """Replace settings of the task by those that the algorithm requires.

    Parameters
    ----------
    settings : mapping
        All settings.

    Returns
    -------
    dict
        The same with the client's ``task_settings``.
    """
    required = client_class(settings)._traits.task_settings
    head_layers = settings["head-layers"] or required.get("head-layers", 1)
    return {**settings, **required, "head-layers": head_layers}


def client_setup(
    context: Context, run_config: Settings | None, strict: bool = True
) -> Setup:
    """Return the resolved settings of this client.

    Parameters
    ----------
    context : Context
        Its node config overrides the settings of `per_device`.
    run_config : mapping
        Settings of the run, already resolved in simulation; by default the context's.
    strict : bool, default True
        False under another project's ServerApp, to which unknown names may belong.

    Raises
    ------
    SettingsError
        If a name is unknown or a value is out of range.
    """
    run = context.run_config if run_config is None else run_config
    if not isinstance(run, Resolved):
        run = _resolved(tuple(run.items()), strict)
    return _node_setup(run, tuple(context.node_config.items()))


@run_cache(maxsize=None)
def _node_setup(run: Resolved, config: tuple[tuple[str, Any], ...]) -> Setup:
    """Return the setup of a client with a node config.

    A device overrides settings in it. In simulation ``client-models`` assigns the
    models, if the algorithm declares that setting.
    """
    kind, node = client_class(run), dict(config)
    check_names(node, kind)
    overridden = {name: node[name] for name in per_device(kind) if name in node}
    index, count = partition(node, run)
    models = str(run.get("client-models", "")).split()
    if models and "client-models" in declared(kind) and "partition-id" in node:
        overridden = {"model": models[index % len(models)], **overridden}
    common = _setup(run, tuple(overridden.items()))
    name = client_name(node)
    return common._replace(name=name, partition=index, num_clients=count)


@run_cache(maxsize=16)
def _resolved(run: tuple[tuple[str, Setting], ...], strict: bool) -> Resolved:
    given = dict(run)
    # An app with a custom task may also list settings of its own algorithms.
    return resolve(given, owners, strict and not is_path(given.get("task", "")))


@run_cache(maxsize=64)
def _setup(run: Resolved, node: tuple[tuple[str, Any], ...]) -> Setup:
    """Return the setup that clients with the same overridden settings share."""
    kind = client_class(run)
    of_node = {name: converted(name, value, run[name]) for name, value in node}
    settings = Resolved(complete({**run, **of_node}))
    device = build(DeviceSettings, settings)
    kind._traits.check_settings(settings)
    algorithm = build(kind._settings_type, settings)
    states = Path(str(settings["output"])) / short_name(str(settings["algorithm"]))
    is_resumable = int(settings["checkpoint-every"]) or settings["resume"]
    directory = states / "clients" if is_resumable else None
    return Setup(kind, algorithm, device, task_key(settings), directory, settings)
