"""Third-party partitioners, such as those of ``flwr-datasets``, by import path."""

import inspect
import json
import shlex
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import numpy as np
import numpy.typing as npt

from flwr_frl.common.settings import SettingsError, error_line, load, need, require

Rows = npt.NDArray[np.int64]

# Added column with the index of each example, which identifies it in a partition.
ROW = "flwr-frl-row"


def partition_rows(
    path: str, arguments: str, columns: Any, num_clients: int, seed: int
) -> tuple[list[Rows], tuple[str, ...]]:
    """Return the examples that a third-party partitioner gives to each client.

    Parameters
    ----------
    path : str
        Import path of a class like `flwr_datasets.partitioner.Partitioner`, with the
        attributes ``dataset`` (set before use) and ``num_partitions`` and the method
        ``load_partition(i)``.
    arguments : str
        Its arguments, ``name=value ...``. ``num_partitions`` and ``seed`` are added if
        it has these parameters.
    columns : datasets.Dataset
        All examples. The partitioner receives them in an order drawn by the seed,
        because training examples come before test examples.
    num_clients : int
        Required number of partitions.
    seed : int
        Seed of the run.

    Returns
    -------
    rows : list of ndarray of int
        For each client, ascending rows of ``columns``.
    names : tuple of str
        Names of the clients if the partitioner has them, as `NaturalIdPartitioner` of
        ``flwr-datasets`` does.

    Raises
    ------
    SettingsError
        If the partitioner cannot be imported, raises an exception, or makes another
        number of partitions.
    """
    package = path.partition(":")[0].partition(".")[0]
    if package == "flwr_datasets":
        need(package, "hf", f"partition {path!r}")
    maker = load(path, "partition")
    options = parse_arguments(arguments)
    order = np.random.default_rng([seed, 0x9A28]).permutation(len(columns))
    rows = columns.add_column(ROW, np.arange(len(columns))).select(order)
    try:
        accepted = inspect.signature(maker).parameters
        ours = {"num_partitions": num_clients, "seed": seed}
        options = {n: v for n, v in ours.items() if n in accepted} | options
        # Some partitioners show progress bars.
        with redirect_stderr(StringIO()):
            partitioner = maker(**options)
            partitioner.dataset = rows
            count = partitioner.num_partitions
            if count == num_clients:
                parts = [partitioner.load_partition(i) for i in range(count)]
                names = getattr(partitioner, "partition_id_to_natural_id", {})
                listed = tuple(str(names[i]) for i in range(count) if i in names)
                usable = len(set(listed)) == count
                return [_rows_of(part) for part in parts], listed if usable else ()
    # Third-party partitioners may raise any exception.
    except Exception as error:
        raise SettingsError(
            f"partition {path!r} with {options} raises {error_line(error)}",
            "partition",
        ) from error
    raise SettingsError(
        f"num-clients is {num_clients}; expected {count}, the number of partitions "
        f"that {path!r} makes",
        "num-clients",
    )


def parse_arguments(arguments: str) -> dict[str, Any]:
    """Return arguments by name; values are JSON, or else strings.

    Raises
    ------
    SettingsError
        If the text does not have the form ``name=value ...``, or sets the seed to
        null: several processes compute the same partition, so it must have a seed.
    """
    setting = "partitioner-arguments"
    allowed = "'name=value ...', with no blanks in a value"
    options = dict[str, Any]()
    try:
        words = shlex.split(arguments)
    except ValueError:
        words = [""]
    for word in words:
        name, equals, text = word.partition("=")
        require(bool(equals) and name.isidentifier(), setting, arguments, allowed)
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    seeded = options.get("seed", 0) is not None
    require(seeded, setting, arguments, "arguments with another seed than null")
    return options


def _rows_of(part: Any) -> Rows:
    rows = part.select_columns([ROW]).with_format("numpy")[:][ROW]
    return np.sort(np.asarray(rows, np.int64))
