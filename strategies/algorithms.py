"""Find an algorithm's strategy by its name or import path.

An algorithm is a strategy that declares its client. A built-in one has a row in
`ALGORITHMS`; any other is named by its import path, ``package.module:Class``. A global
method has a fine-tuned variant, whose name or path ends with ``-ft``.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar, cast

from flwr_frl.common.settings import (
    Setting,
    Settings,
    SettingsError,
    is_path,
    load,
    unknown,
)
from flwr_frl.common.text import short_name
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.server.traits import Algorithm
from flwr_frl.strategies.table import ALGORITHMS as ALGORITHMS
from flwr_frl.strategies.table import CASES, SIMULATION_DEFAULTS
from flwr_frl.strategies.table import FINE_TUNED as FINE_TUNED

S = TypeVar("S", bound=Algorithm)


def strategy_class(settings: Settings) -> type[Algorithm]:
    """Return the strategy of the algorithm that the settings name.

    Parameters
    ----------
    settings : mapping
        ``algorithm``, a key of `ALGORITHMS` or an import path, and ``task``, for which
        `CASES` may name another strategy.

    Returns
    -------
    type of Strategy
        The class.

    Raises
    ------
    SettingsError
        If there is no such algorithm, or it cannot be imported or is not a strategy.
    """
    path = _path(str(settings["algorithm"]))
    return _load(CASES.get((path, str(settings["task"])), path))


def _path(algorithm: str) -> str:
    if is_path(algorithm):
        return algorithm
    plain = algorithm.removesuffix(FINE_TUNED)
    if algorithm not in ALGORITHMS and plain in ALGORITHMS:
        return ALGORITHMS[plain][0] + FINE_TUNED
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm", algorithm, ALGORITHMS, others="package.module:Class")
    return ALGORITHMS[algorithm][0]


def _load(path: str) -> type[Algorithm]:
    plain = path.removesuffix(FINE_TUNED)
    loaded = load(plain, "algorithm")
    if not (isinstance(loaded, type) and issubclass(loaded, Algorithm)):
        raise SettingsError(
            f"algorithm {path!r} is no strategy; expected a subclass of Strategy "
            "or SRPFL"
        )
    return loaded if plain == path else fine_tuned(loaded)


@cache
def fine_tuned(kind: type[S]) -> type[S]:
    """Return a global method whose clients fine-tune the head before evaluation.

    The server is unchanged, except that only the last round is evaluated, as every
    evaluation fine-tunes again (FedRep, section 5.2). The clients are those of
    ``flwr_frl.clients.fine_tuning``.

    Parameters
    ----------
    kind : type of Strategy
        The global method, or SRPFL over one.

    Returns
    -------
    type of Strategy
        A subclass with the same name and ``-ft``. Each call returns the same class.
    """
    about: dict[str, Any] = {
        "__doc__": f"{kind.__name__}; clients test it with a fine-tuned head.",
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__ + FINE_TUNED,
    }
    name, keywords = kind.__name__ + FINE_TUNED, dict[str, Any]()
    if wrapped := getattr(kind, "wrapped_settings", None):

        def wrapped_settings(cls: type[Algorithm], settings: Settings) -> Settings:
            inner = wrapped(settings)
            return {**inner, "algorithm": f"{inner['algorithm']}{FINE_TUNED}"}

        about["wrapped_settings"] = classmethod(wrapped_settings)
    else:
        client = kind._traits.client and kind._traits.client + FINE_TUNED
        keywords = {"client": client, "evaluate_last_round_only": True}
    return cast(type[S], type(name, (kind,), about, **keywords))


def settings_owners(settings: Settings) -> list[type[Algorithm]]:
    """Return the strategy that the settings name, and the one that it wraps if any."""
    strategy = strategy_class(settings)
    wrapped = getattr(strategy, "wrapped_settings", None)
    return [strategy, *(settings_owners(wrapped(settings)) if wrapped else [])]


def build_strategy(settings: Settings) -> Strategy:
    """Return the strategy of the algorithm that the settings name.

    Raises `SettingsError` as `strategy_class` and `client_path` do, or if a setting is
    out of its range.
    """
    client_path(settings)
    kind: Any = strategy_class(settings)
    return cast(Strategy, kind.from_settings(settings))


def client_path(settings: Settings) -> str:
    """Return the import path of the algorithm's client.

    Raises `SettingsError` if its strategy names none.
    """
    path = settings_owners(settings)[-1]._traits.client
    if not path or not isinstance(path, str):
        raise SettingsError(
            f"algorithm {settings['algorithm']!r} has the client {path!r}; declare the "
            "import path of one, as in `class Mine(Strategy, client=...)`"
        )
    return path


def simulation_defaults(settings: Settings) -> dict[str, Setting]:
    """Return the defaults of settings in simulation.

    A strategy that wraps another one depends on which replies come first, and in
    simulation a speed model determines it.
    """
    *wrapping, kind = settings_owners(settings)
    speeds = {"speed-model": "fixed"} if wrapping else {}
    path = f"{kind.__module__}:{kind.__qualname__}".removesuffix(FINE_TUNED)
    return {**speeds, **SIMULATION_DEFAULTS.get(path, {})}


def check_names(algorithms: Iterable[str]) -> None:
    """Raise unless all algorithms have different names.

    Parameters
    ----------
    algorithms : iterable of str
        Names and import paths.

    Raises
    ------
    SettingsError
        If two of them would write to the same place, or the class of an import path
        has the name of a built-in algorithm.
    """
    seen: dict[str, str] = {}
    for algorithm in algorithms:
        name = short_name(algorithm)
        builtin = is_path(algorithm) and name in ALGORITHMS
        other = name if builtin else seen.setdefault(name, algorithm)
        if other != algorithm:
            raise SettingsError(
                f"two algorithms are called {name!r}: {other!r} and {algorithm!r}; "
                "each must have a name of its own"
            )
