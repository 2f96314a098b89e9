"""Partitioners of ``flwr-datasets``, and others like them, by their import paths."""

import inspect
import json
import shlex
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import numpy as np
import numpy.typing as npt

from flwr_frl.task.settings import SettingsError, load, need, require

Rows = npt.NDArray[np.int64]

# The column in which a partition says which examples are its own.
ROW = "flwr-frl-row"


def dealt(
    path: str, arguments: str, columns: Any, num_clients: int, seed: int
) -> list[Rows]:
    """Return which examples each client gets from somebody's partitioner.

    Parameters
    ----------
    path : str
        The import path of a class as `flwr_datasets.partitioner.Partitioner`: it is
        given a ``dataset`` and has ``num_partitions`` and ``load_partition(i)``.
    arguments : str
        Its arguments, ``name=value ...``. It gets ``num_partitions`` and ``seed`` as
        well, if it has such arguments and they are not among these.
    columns : datasets.Dataset
        All examples. The partitioner sees them in an order that the seed draws, as
        training and test examples lie one behind the other.
    num_clients, seed : int
        How many parts there must be, and the run's seed.

    Returns
    -------
    list of ndarray of int
        Rows of ``columns``, for each client in ascending order.

    Raises
    ------
    SettingsError
        If it cannot be had, raises something, or does not make so many parts.
    """
    package = path.partition(":")[0].partition(".")[0]
    if package == "flwr_datasets":
        need(package, "hf", f"partition {path!r}")
    maker = load(path, "partition")
    given = parsed(arguments)
    order = np.random.default_rng([seed, 0x9A28]).permutation(len(columns))
    rows = columns.add_column(ROW, np.arange(len(columns))).select(order)
    try:
        known = inspect.signature(maker).parameters
        ours = {"num_partitions": num_clients, "seed": seed}
        given = {n: v for n, v in ours.items() if n in known} | given
        # Some show their progress, which nobody waits for.
        with redirect_stderr(StringIO()):
            partitioner = maker(**given)
            partitioner.dataset = rows
            count = partitioner.num_partitions
            if count == num_clients:
                return [_rows_of(partitioner.load_partition(i)) for i in range(count)]
    # Somebody's own: it can raise anything.
    except Exception as error:
        raise SettingsError(
            f"partition {path!r} with {given} raises {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    raise SettingsError(
        f"num-clients is {num_clients}; it must be {count}, as many as "
        f"partition {path!r} makes parts"
    )


def parsed(arguments: str) -> dict[str, Any]:
    """Return arguments by name; values are JSON, or else texts."""
    allowed = "'name=value ...', with no blanks in a value"
    found = dict[str, Any]()
    try:
        words = shlex.split(arguments)
    except ValueError:
        words = [""]
    for word in words:
        name, equals, text = word.partition("=")
        valid = bool(equals) and name.isidentifier()
        require(valid, "partitioner-arguments", arguments, allowed)
        found[name] = _value(text)
    # Clients are made in several processes, which must agree.
    seeded = found.get("seed", 0) is not None
    require(seeded, "partitioner-arguments", arguments, "with another seed than null")
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _rows_of(part: Any) -> Rows:
    rows = part.select_columns([ROW]).with_format("numpy")[:][ROW]
    return np.sort(np.asarray(rows, np.int64))
