"""Look up an algorithm's client class, and resolve the settings of a client."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

from flwr.app import Context, UserConfig

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.setup import (
    DeviceSettings,
    Setup,
    cohort_size,
    partition_id,
    per_device,
    unread,
)
from flwr_frl.clients.fine_tuning import fine_tuned
from flwr_frl.common.run_cache import run_cache
from flwr_frl.common.settings import (
    Maker,
    Setting,
    Settings,
    SettingsError,
    build,
    converted,
    declared,
    defaults,
    is_path,
    load,
    require,
    resolve,
)
from flwr_frl.common.text import short_name
from flwr_frl.strategies.algorithms import (
    FINE_TUNED,
    client_path,
    settings_owners,
)
from flwr_frl.task.tasks import task_key, task_maker
from flwr_frl.task.training.trainer import TrainerSettings


@run_cache(maxsize=None)
def load_client(path: str) -> type[Client]:
    """Return the client class at an import path.

    Parameters
    ----------
    path : str
        ``package.module:Class``; the suffix ``-ft`` selects its fine-tuned variant
        (`flwr_frl.clients.fine_tuning`).

    Returns
    -------
    type of Client
        The class.

    Raises
    ------
    SettingsError
        If it cannot be imported, is not a `Client`, or cannot be fine-tuned.
    """
    plain = path.removesuffix(FINE_TUNED)
    kind = load(plain, "client")
    if isinstance(kind, type) and issubclass(kind, Client):
        return kind if plain == path else fine_tuned(kind)
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
        If there is no such algorithm, or it has no client.
    """
    return load_client(client_path(settings))


def takes_newcomers(settings: Settings) -> bool:
    """Return whether clients that join after training get a model.

    Parameters
    ----------
    settings : mapping
        All settings.

    Returns
    -------
    bool
        True if the strategy, and the one that it wraps, if any, declare it.
    """
    # The traits of the class suffice; an instance would allocate its state.
    owners = settings_owners(settings)
    return all(owner._traits.takes_newcomers for owner in owners)


def check_countable(settings: Settings) -> None:
    """Raise `SettingsError` if the client does not support ``dp-noise`` above 0."""
    noise, algorithm = settings["dp-noise"], str(settings["algorithm"])
    if noise == 0 or client_class(settings)._traits.supports_example_dp:
        return
    allowed = f"0 with {algorithm!r} on {settings['task']!r}: not all steps of its "
    require(False, "dp-noise", noise, f"{allowed}training can be counted")


def check_optimizer(settings: Settings) -> None:
    """Raise `SettingsError` if the client does not support the optimiser settings."""
    algorithm = str(settings["algorithm"])
    if not client_class(settings)._traits.assumes_sgd:
        return
    for name in ("optimizer", "max-gradient-norm"):
        default, value = defaults()[name], settings.get(name, defaults()[name])
        allowed = f"{default} with {algorithm!r}, whose equations assume steps of SGD"
        require(value == default, name, value, allowed)


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


class FrozenConfig(dict[str, Any]):
    """A run config that does not change, whose hash is computed once."""

    def __init__(self, config: UserConfig) -> None:
        super().__init__(config)
        self._hash = hash(tuple(config.items()))

    def __hash__(self) -> int:  # type: ignore[override]
        return self._hash


def client_setup(
    context: Context, run_config: UserConfig | None, strict: bool = True
) -> Setup:
    """Return the resolved settings of this client.

    Parameters
    ----------
    context : Context
        Its node config overrides the settings of `per_device`.
    run_config : UserConfig, optional
        Settings of the run; by default the context's.
    strict : bool, default True
        False under another project's ServerApp, to which unknown names may belong.

    Raises
    ------
    SettingsError
        If a name is unknown or a value is out of range.
    """
    run = context.run_config if run_config is None else run_config
    run = run if isinstance(run, FrozenConfig) else FrozenConfig(run)
    kind, _ = _resolved(run, strict)
    unread(context.node_config, kind)
    node = node_settings(kind, run, context.node_config)
    return _setup(run, strict, tuple(node.items()))


def node_settings(kind: type[Client], settings: Settings, node: Settings) -> Settings:
    """Return the settings that one client overrides.

    A device overrides them in its node config. In simulation ``client-models`` assigns
    the models, if the algorithm declares that setting.
    """
    overridden = {name: node[name] for name in per_device(kind) if name in node}
    if "partition-id" not in node:
        return overridden
    index = partition_id(node)
    models = str(settings.get("client-models", "")).split()
    if models and "client-models" in declared(kind):
        return {"model": models[index % len(models)], **overridden}
    return overridden


@run_cache(maxsize=16)
def _resolved(run: FrozenConfig, strict: bool) -> tuple[type[Client], Settings]:
    """Return the client class and the settings of a run."""
    # An app with a custom task may also list settings of its own algorithms.
    custom = is_path(str(run.get("task", "")))
    settings = resolve(run, owners, strict and not custom)
    return client_class(settings), settings


@run_cache(maxsize=64)
def _setup(run: FrozenConfig, strict: bool, node: tuple[tuple[str, Any], ...]) -> Setup:
    kind, of_run = _resolved(run, strict)
    of_node = {name: converted(name, value, of_run[name]) for name, value in node}
    settings = MappingProxyType(complete({**of_run, **of_node}))
    device = build(DeviceSettings, settings)
    cohort_size(device.cohort)
    check_countable(settings)
    check_optimizer(settings)
    algorithm = build(kind._settings_type, settings)
    if isinstance(algorithm, TrainerSettings):
        algorithm.check_rounds(int(settings["num-server-rounds"]))
        weights = algorithm.class_weights
        allowed = "none or numbers with dp-noise: the counts are private"
        valid = weights != "balanced" or not device.dp_noise
        require(valid, "class-weights", weights, allowed)
    states = Path(str(settings["output"])) / short_name(str(settings["algorithm"]))
    is_resumable = int(settings["checkpoint-every"]) or settings["resume"]
    return Setup(
        kind,
        algorithm,
        device,
        settings,
        task_key(settings),
        states / "clients" if is_resumable else None,
    )
