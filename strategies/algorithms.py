"""Find an algorithm's strategy by its name or import path.

An algorithm is a strategy that declares its client. A built-in one has a row in
`ALGORITHMS`; any other is named by its import path, ``package.module:Class``.
"""

from collections.abc import Iterable
from typing import Any, cast

from flwr_frl.common.algorithms import ALGORITHMS as ALGORITHMS
from flwr_frl.common.algorithms import CASES, OF_ALL, SIMULATION_DEFAULTS
from flwr_frl.common.compression import NONE, UploadSettings, from_settings
from flwr_frl.common.errors import SettingsError, require, unknown
from flwr_frl.common.settings import Setting, Settings, build, is_path, load
from flwr_frl.common.text import short_name
from flwr_frl.strategies.base import Strategy, inherits
from flwr_frl.strategies.server.traits import Algorithm


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
    path = str(settings["algorithm"])
    if not is_path(path):
        if path not in ALGORITHMS:
            others = "package.module:Class"
            raise unknown("algorithm", path, ALGORITHMS, "flwr-frl --list", others)
        path = ALGORITHMS[path][0]
    path = CASES.get((path, str(settings["task"])), path)
    kind = load(path, "algorithm")
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        allowed = "expected a subclass of Strategy or SRPFL"
        raise SettingsError(f"algorithm {path!r} is no strategy; {allowed}")
    return kind


def settings_owners(settings: Settings) -> list[type[Algorithm]]:
    """Return the strategy that the settings name, and the one that it wraps if any."""
    strategy = strategy_class(settings)
    wrapped = getattr(strategy, "wrapped_settings", None)
    return [strategy, *(settings_owners(wrapped(settings)) if wrapped else [])]


def build_strategy(settings: Settings) -> Strategy:
    """Return the strategy of the algorithm that the settings name.

    Raises `SettingsError` as `strategy_class`, or if a setting is out of its range.
    """
    kind: Any = strategy_class(settings)
    strategy = cast(Strategy, kind._build(settings))
    strategy._run.uploads = _uploads(strategy, settings)
    return strategy


def _uploads(strategy: Strategy, settings: Settings) -> UploadSettings | None:
    """Return how clients compress; `SettingsError` if the strategy cannot decode it."""
    uploads = build(UploadSettings, settings)
    if uploads.upload_compressor == NONE:
        return None
    name, kind = "upload-compressor", type(strategy)
    averages = kind._traits.averages_models and inherits(kind, "per_client")
    allowed = f"none for {kind.__name__}: only methods that average models allow it"
    require(averages, name, uploads.operator, allowed)
    secure = settings.get("secure-aggregation", False)
    require(not secure, "secure-aggregation", secure, f"False with {name}")
    # Checks `compressor-k`.
    from_settings(uploads, ())
    return uploads


def simulation_defaults(
    settings: Settings, algorithms: Iterable[str] = ()
) -> dict[str, Setting]:
    """Return the defaults of settings in simulation.

    Parameters
    ----------
    settings : mapping
        The settings of a run; ``algorithm`` and ``task`` are read.
    algorithms : iterable of str, default ()
        All algorithms of a command, by default that of the settings. A default of a
        setting that they all read, such as the number of rounds, must be common.

    Notes
    -----
    A strategy that wraps another one depends on which replies come first, and in
    simulation a speed model determines it.
    """
    each = list[dict[str, Setting]]()
    for algorithm in algorithms or [str(settings["algorithm"])]:
        *wrapping, kind = settings_owners({**settings, "algorithm": algorithm})
        speeds: dict[str, Setting] = {"speed-model": "fixed"} if wrapping else {}
        path = f"{kind.__module__}:{kind.__qualname__}"
        each.append({**speeds, **SIMULATION_DEFAULTS.get(path, {})})
    joint = {n: v for values in reversed(each) for n, v in values.items()}
    differ = {n for n in OF_ALL for values in each if values.get(n) != joint.get(n)}
    return {n: value for n, value in joint.items() if n not in differ}


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
    seen = {name: name for name in ALGORITHMS}
    for algorithm in algorithms:
        name = short_name(algorithm)
        if (other := seen.setdefault(name, algorithm)) != algorithm:
            raise SettingsError(
                f"two algorithms are called {name!r}: {other!r} and {algorithm!r}; "
                "each must have a name of its own"
            )
