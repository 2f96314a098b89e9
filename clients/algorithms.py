"""From an algorithm's name, or import path, to its client."""

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.file_settings import Followed
from flwr_frl.clients.fine_tuning import fine_tuned
from flwr_frl.strategies.algorithms import (
    ALGORITHMS,
    FINE_TUNED,
    client_path,
    settings_owners,
    short_name,
    strategy_class,
)
from flwr_frl.task.run_cache import run_cache
from flwr_frl.task.settings import (
    Maker,
    Settings,
    SettingsError,
    declared,
    is_path,
    load,
    require,
    resolve,
)
from flwr_frl.task.tasks import task_maker


@run_cache(maxsize=None)
def load_client(path: str) -> type[Client]:
    """Return the client class at an import path.

    Parameters
    ----------
    path : str
        ``package.module:Class``, as a strategy names its client; with ``-ft`` at its
        end, that client with `flwr_frl.clients.fine_tuning`.

    Returns
    -------
    type of Client
        The class.

    Raises
    ------
    SettingsError
        If it cannot be imported, is no `Client`, or cannot be fine-tuned.
    """
    plain = path.removesuffix(FINE_TUNED)
    found = load(plain, "client")
    if isinstance(found, type) and issubclass(found, Client):
        return found if plain == path else fine_tuned(found)
    raise SettingsError(
        f"client {path!r} is no client; it must be a subclass of Client"
    )


def client_class(settings: Settings) -> type[Client]:
    """Return the client that the algorithm's strategy names.

    Parameters
    ----------
    settings : mapping
        ``algorithm`` and ``task``, and for SRPFL what it wraps.

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
    """Return whether the algorithm leaves a model for those who come after training.

    Parameters
    ----------
    settings : mapping
        All settings.

    Returns
    -------
    bool
        As its strategy says, and one that it wraps.
    """
    # Asked of the classes: a strategy allocates what its settings say. SRPFL's own
    # answer is a property, which is true of a class.
    owners = settings_owners(settings)
    return all(bool(getattr(owner, "takes_newcomers", True)) for owner in owners)


def check_named(followed: Followed) -> None:
    """Raise `SettingsError` unless all code that a file needs is named by the user.

    Parameters
    ----------
    followed : Followed
        The file's settings. The package's tasks are checked where one is used.
    """
    followed.need(["algorithm"])
    if is_path(followed.withheld.get("task", "")):
        followed.need(["task"])
    settings = resolve(followed.settings, strict=False)
    # Others do not use what SRPFL wraps.
    followed.need({"srpfl-base"} & {*declared(strategy_class(settings))})
    followed.need(declared(client_class(settings)))


def check_countable(settings: Settings) -> None:
    """Raise `SettingsError` if private training would not count all that is learned.

    The error names the algorithms that can be counted.
    """
    noise, algorithm = settings["dp-noise"], str(settings["algorithm"])
    if noise == 0 or _is_countable(settings):
        return
    names = [n for n in ALGORITHMS if _is_countable({**settings, "algorithm": n})]
    allowed = f"0 with {algorithm!r} on {settings['task']!r}: not all steps of its "
    allowed += f"training can be counted, as those of {', '.join(names)} can"
    require(False, "dp-noise", noise, allowed)


def _is_countable(settings: Settings) -> bool:
    for base in client_class(settings).__mro__:
        if "supports_example_dp" in vars(base):
            return bool(vars(base)["supports_example_dp"])
        if "fit" in vars(base):
            # A class with a `fit` of its own has to say so again.
            break
    return False


def owners(settings: Settings) -> list[Maker]:
    """Return everything of the algorithm and the task that declares settings.

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


def complete(settings: Settings) -> Settings:
    """Fill in what the algorithm decides where a setting leaves it open.

    Parameters
    ----------
    settings : mapping
        All settings.

    Returns
    -------
    mapping
        The same with ``head-layers`` above 0.
    """
    if settings["head-layers"] != 0:
        return settings
    return {**settings, "head-layers": client_class(settings).head_layers}


__all__ = [
    "check_countable",
    "check_named",
    "client_class",
    "complete",
    "load_client",
    "owners",
    "short_name",
    "takes_newcomers",
]
