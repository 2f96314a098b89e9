"""Look up the client class of an algorithm by name or import path."""

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.file_settings import Followed
from flwr_frl.clients.fine_tuning import fine_tuned
from flwr_frl.common.run_cache import run_cache
from flwr_frl.common.settings import (
    Maker,
    Setting,
    Settings,
    SettingsError,
    declared,
    defaults,
    is_path,
    load,
    require,
)
from flwr_frl.common.text import short_name as short_name
from flwr_frl.strategies.algorithms import (
    ALGORITHMS,
    FINE_TUNED,
    client_path,
    settings_owners,
    strategy_class,
)
from flwr_frl.task.tasks import task_maker
from flwr_frl.task.training.trainer import RENEWED


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
    return all(owner.traits.takes_newcomers for owner in owners)


def check_named(followed: Followed) -> None:
    """Raise `SettingsError` if a file needs code that the user has not named.

    Parameters
    ----------
    followed : Followed
        The file's settings. Built-in tasks are checked when they are built.
    """
    followed.need(["algorithm"])
    if is_path(followed.withheld.get("task", "")):
        followed.need(["task"])
    settings = followed.settings
    # A strategy that wraps another one names it in a setting.
    strategy = strategy_class(settings)
    followed.need({getattr(strategy, "base_setting", "")} & {*declared(strategy)})
    followed.need(declared(client_class(settings)))


def check_countable(settings: Settings) -> None:
    """Raise `SettingsError` if ``dp-noise`` is set and the client does not support it.

    The error lists the algorithms that support it.
    """
    noise, algorithm = settings["dp-noise"], str(settings["algorithm"])
    if noise == 0 or client_class(settings).traits.supports_example_dp:
        return
    names = [
        name
        for name in ALGORITHMS
        if client_class({**settings, "algorithm": name}).traits.supports_example_dp
    ]
    allowed = f"0 with {algorithm!r} on {settings['task']!r}: not all steps of its "
    allowed += f"training can be counted, as those of {', '.join(names)} can"
    require(False, "dp-noise", noise, allowed)


def check_optimizer(settings: Settings) -> None:
    """Raise `SettingsError` if the client does not support the optimiser settings."""
    traits, algorithm = client_class(settings).traits, str(settings["algorithm"])
    state = settings.get("optimizer-state", RENEWED)
    by_train = traits.supports_example_dp and not traits.assumes_sgd
    allowed = f"{RENEWED} with {algorithm!r}, which makes training steps of its own"
    require(by_train or state == RENEWED, "optimizer-state", state, allowed)
    if not traits.assumes_sgd:
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
        The same with the client's ``task_settings``, and with its ``head_layers`` in
        place of ``head-layers`` 0.
    """
    traits = client_class(settings).traits
    head_layers = settings["head-layers"] or traits.head_layers
    return {**settings, **traits.task_settings, "head-layers": head_layers}


def algorithm_of(kind: type[Client]) -> dict[str, str]:
    """Return the metadata of a client's files about its algorithm."""
    return {"algorithm": f"{kind.__module__}:{kind.__qualname__}"}
