"""Tables of numbers or images: local files, or a data set of Hugging Face's hub.

Files are read with pyarrow, which opens nothing that a file names, and the data set is
written to the cache.
"""

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flwr_frl.common.settings import (
    SettingsError,
    error_line,
    is_possible,
    need,
    require,
    setting,
)
from flwr_frl.task.data.cache import (
    MAX_CLASSES,
    Dataset,
    DataSettings,
    ImageSet,
    Integers,
    Read,
    stamp,
)
from flwr_frl.task.data.images import FORM, INSPECTED, Pictures, Source, common_shape

# Suffixes of files; a folder is read by the first of them for which it has files.
FORMATS = (".parquet", ".arrow", ".csv", ".jsonl", ".json")
# Words in the names of files and folders that tell their split.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# Seed of held-out test sets, the same for all runs.
HELD_OUT_SEED = 0x4E1D
# An integer as a program writes it if other cells of its column are empty.
WHOLE = re.compile(r"([+-]?\d+)\.0*")
# Common names of label columns, for data sets without a `ClassLabel` column.
LABEL_NAMES = ("label", "labels", "target", "class")


@dataclass(frozen=True)
class ColumnSettings(DataSettings):
    """Columns and splits of a table.

    Parameters
    ----------
    input_columns : str, default ""
        The column of images, or comma-separated columns of numbers; ``*`` uses all
        numeric columns except the label and the client. By default the only column of
        images or of lists.
    label_column : str, default ""
        The column of classes; by default the only ``ClassLabel`` column, or one named
        ``label``, ``labels``, ``target`` or ``class``.
    client_column : str, default ""
        The column whose values are the names of the clients; by default the examples
        are divided by ``partition``.
    train_split : str, default "train"
        Split for training.
    test_split : str, default ""
        Split for testing; by default ``test`` or ``validation``. If there is neither, a
        part of the training split is held out.
    test_fraction : float, default 0.2
        Fraction of the training split that is held out; the same examples for all
        seeds. With ``client-column``, it is a fraction of each client's examples.
    data_subset : str, default ""
        A folder in the data set, to use only its files.
    """

    input_columns: str = setting("", form="columns, separated by commas", safe=True)
    label_column: str = setting("", form="a column", safe=True)
    client_column: str = setting("", form="a column", safe=True)
    train_split: str = setting("train", form="a split", safe=True)
    test_split: str = setting("", form="a split", safe=True)
    test_fraction: float = setting(0.2, gt=0, lt=1)
    data_subset: str = setting("", form="a folder", safe=True)


def table_files(name: str, settings: ColumnSettings) -> tuple[str, Read]:
    """Return the key of a table, and a function that reads it.

    Parameters
    ----------
    name : str
        Path of a file, or of a folder of files of one format (`FORMATS`), such as
        ``save_to_disk`` writes; or the name of a data set of the hub, which is
        downloaded and read like a folder. The cache does not notice that it changes.
    settings : ColumnSettings
        Columns and splits; ``data_dir`` overrides the name.

    Raises
    ------
    SettingsError
        If there is no name, or a path does not exist or has no table; later, if a file
        is unreadable, or a split or a column is missing or unsuitable.
    """
    name = settings.data_dir or name
    valid = bool(name) and is_possible(name)
    require(valid, "task", f"hf:{name}", "hf:NAME, with the name or path of a data set")
    path = Path(name).expanduser()
    is_local = path.exists()
    exists = is_local or not name.startswith((".", "/", "~"))
    require(exists, "data-dir", name, "the path of a data set")
    version = name
    if is_local:
        files = _files(path, settings.data_subset, follow_links=False)
        version = f"{path.resolve()}/{stamp(files)}"

    def read() -> Dataset:
        need("pyarrow", "hf", f"the data set {name!r}")
        try:
            root = path if is_local else _downloaded(name, settings)
            files = _files(root, settings.data_subset, follow_links=not is_local)
            return _dataset(name, _splits(root, files), settings)
        except SettingsError:
            raise
        # Files and the network raise nearly any exception.
        except Exception as error:
            here = "" if is_local else " (not a local path)"
            line = f"the data set {name!r}{here} cannot be loaded: {error_line(error)}"
            raise SettingsError(line, "task") from error

    chosen = [getattr(settings, field.name) for field in fields(ColumnSettings)]
    return f"hf/5{FORM}/{version}/{chosen}", read


def _downloaded(name: str, settings: ColumnSettings) -> Path:
    """Download a data set of the hub, without its metadata and code."""
    from huggingface_hub import snapshot_download

    patterns = [f"{settings.data_subset}*{suffix}" for suffix in FORMATS]
    return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))


def _files(root: Path, subset: str, follow_links: bool) -> list[Path]:
    """Return a file, or the files of a folder of the first format that it has."""
    folder, place = root.resolve(), root / subset
    inside = place.exists() and place.resolve().is_relative_to(folder)
    require(inside, "data-subset", subset, "a folder in the data")
    found = sorted(path for path in place.rglob("*") if path.is_file()) or [place]
    by_format = ([p for p in found if p.suffix.lower() == f] for f in FORMATS)
    files = next(filter(None, by_format), [])
    # The user may name a link.
    own = follow_links or all(p.resolve().is_relative_to(folder) for p in files)
    allowed = f"a file or a folder without links, of a format {', '.join(FORMATS)}"
    require(bool(files) and own, "task", f"hf:{place}", allowed)
    return files


def _splits(root: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files by split. Without a known word in a name, it is ``train``."""
    splits: dict[str, list[Path]] = {}
    for path in files:
        words = re.split("[^a-z]+", path.relative_to(root).as_posix().lower())
        named = [SPLITS[word] for word in words if word in SPLITS]
        splits.setdefault(named[0] if named else "train", []).append(path)
    return splits


def _table(files: Sequence[Path]) -> Any:
    """Return the rows of files with the same columns."""
    import pyarrow

    return pyarrow.concat_tables(map(_read, files), promote_options="permissive")


def _read(path: Path) -> Any:
    from pyarrow import csv, ipc, json, parquet

    suffix = path.suffix.lower()
    with path.open("rb") as file:
        if suffix == ".parquet":
            return parquet.ParquetFile(file).read()
        if suffix == ".arrow":
            return ipc.open_stream(file).read_all()
        if suffix == ".csv":
            options = csv.ConvertOptions(strings_can_be_null=True)
            table = csv.read_csv(file, convert_options=options)
            # The header may have blanks around names.
            return table.rename_columns([name.strip() for name in table.column_names])
        return json.read_json(file)


def _dataset(name: str, splits: Mapping[str, list[Path]], s: ColumnSettings) -> Dataset:
    """Return a data set; its images are decoded when it is written."""
    table, n = _joined(splits, s)
    total = len(table)
    rows, notes = [np.arange(n), np.arange(n, total)], tuple[str, ...]()
    inputs, label = _choose_columns(table, s)
    clients, owners = (
        _numbered(table, s.client_column) if s.client_column else ((), None)
    )
    if n == total:
        tested = held_out(n, s.test_fraction, owners)
        allowed = f"smaller, so that some of the {n} examples remain for training"
        require(len(tested) < n, "test-fraction", s.test_fraction, allowed)
        rows = [np.setdiff1d(rows[0], tested), tested]
        notes = (
            f"{name!r} has no test split: {len(tested)} of the {n} examples of "
            f"{s.train_split!r} are held out for testing",
        )
    codes, classes = _labels(table, label)
    images: list[Any]
    if _is_image(table.schema.field(inputs[0]).type):
        cells = table[inputs[0]]
        some = rows[0][:: -(-len(rows[0]) // INSPECTED)]
        shape = common_shape(_sources(name, cells, some), s.image_size)
        images = [
            Pictures(_sources(name, cells, part), len(part), shape) for part in rows
        ]
    else:
        numbers = np.concatenate([_numbers(table, c) for c in inputs], axis=1)
        images = [numbers[part] for part in rows]
    train, test = (
        ImageSet(own, codes[part], None if owners is None else owners[part])
        for own, part in zip(images, rows, strict=True)
    )
    return Dataset(train, test, classes, clients, notes)


def held_out(
    count: int, fraction: float, clients: npt.NDArray[Any] | None = None
) -> npt.NDArray[np.int64]:
    """Return ascending rows for testing, the same for all seeds.

    Parameters
    ----------
    count : int
        Number of rows.
    fraction : float
        Share of the rows that is for testing; at least one row.
    clients : ndarray, optional
        Client of each row. Each then has its share of the test rows, up to one row.
    """
    tested = max(1, round(count * fraction))
    order = np.random.default_rng(HELD_OUT_SEED).permutation(count)
    if clients is None:
        return np.sort(order[:tested])
    names = clients[order].astype(str)
    _, starts = np.unique(np.sort(names), return_index=True)
    rows_of = np.split(order[np.argsort(names, kind="stable")], starts[1:])
    exact = np.array([len(rows) * fraction for rows in rows_of])
    counts = exact.astype(np.int64)
    # The clients with the largest remainders get one more.
    first = np.argsort(counts - exact, kind="stable")
    counts[first[: tested - counts.sum()]] += 1
    chosen = [rows[:k] for rows, k in zip(rows_of, counts, strict=True)]
    return np.sort(np.concatenate(chosen))


def _joined(splits: Mapping[str, list[Path]], s: ColumnSettings) -> tuple[Any, int]:
    """Return the training and the test examples, and the number of the former."""
    import pyarrow

    choices = f"one of {', '.join(splits)}"
    require(s.train_split in splits, "train-split", s.train_split, choices)
    others = [split for split in splits if split != s.train_split]
    usual = [split for split in ("test", "validation") if split in others]
    tested = s.test_split or next(iter(usual), "")
    allowed = f"{choices}, but not train-split"
    require(not tested or tested in others, "test-split", tested, allowed)
    tables = [_table(splits[split]) for split in (s.train_split, tested) if split]
    # Equal integers must stand for equal classes.
    names = [_class_names(table) for table in tables]
    allowed = f"for testing the same classes as for training, {names[0]}"
    require(names[0] == names[-1], "label-column", names[-1], allowed)
    return pyarrow.concat_tables(tables, promote_options="permissive"), len(tables[0])


def _choose_columns(table: Any, s: ColumnSettings) -> tuple[list[str], str]:
    """Return the names of the input columns and of the label column."""
    kinds = {field.name: field.type for field in table.schema}
    # Names of columns may contain line breaks.
    listed = " ".join(f"of the columns {', '.join(kinds)}".split())
    candidates = [*_class_names(table)] or [n for n in LABEL_NAMES if n in kinds][:1]
    only = candidates[0] if len(candidates) == 1 else ""
    label = s.label_column.strip() or only
    require(label in kinds, "label-column", label, f"one {listed}")
    rest = {name: kind for name, kind in kinds.items() if name != label}
    images = [name for name, kind in rest.items() if _is_image(kind)]
    numbers = [name for name, kind in rest.items() if _is_numeric(kind)]
    lists = [name for name in numbers if hasattr(rest[name], "value_type")]
    inputs = [name.strip() for name in s.input_columns.split(",")]
    if s.input_columns == "*":
        inputs = [name for name in numbers if name != s.client_column]
    elif not s.input_columns and len(images or lists) == 1:
        inputs = images or lists
    usable = set(inputs) <= set(numbers) or inputs in [[name] for name in images]
    allowed = "one column of images, columns of numbers separated by commas, or '*' for"
    allowed += f" all columns of numbers, {listed}"
    require(bool(inputs) and usable, "input-columns", s.input_columns, allowed)
    return inputs, label


def _class_names(table: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of classes that ``datasets`` has stored with integer columns."""
    metadata = (table.schema.metadata or {}).get(b"huggingface", b"{}")
    features = json.loads(metadata).get("info", {}).get("features", {})
    return {
        name: tuple(map(str, feature["names"]))
        for name, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }


def _is_image(kind: Any) -> bool:
    """Return whether cells have the bytes of a file, as ``datasets`` stores images."""
    from pyarrow import types

    return bool(types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def _is_numeric(kind: Any) -> bool:
    """Return whether cells are numbers, or lists of numbers."""
    from pyarrow import types

    while hasattr(kind, "value_type"):
        kind = kind.value_type
    tests = types.is_integer, types.is_floating, types.is_boolean
    return any(test(kind) for test in tests)


def _numbered(table: Any, name: str) -> tuple[tuple[str, ...], Integers]:
    """Return the names of the clients, and the client of each row."""
    valid = name in table.column_names and table[name].null_count == 0
    require(valid, "client-column", name, "a column with a client in every row")
    found, numbers = np.unique(table[name].to_numpy(), return_inverse=True)
    return tuple(map(str, found)), numbers


def class_name(label: str) -> str:
    """Return the class that a label names: ``1`` for ``1.0``, and without blanks."""
    label = label.strip()
    whole = WHOLE.fullmatch(label)
    return whole[1] if whole else label


def _labels(table: Any, label: str) -> tuple[Integers, tuple[str, ...]]:
    """Return the class of each row, and the names of the classes.

    Strings are numbered in the sorted order of their names (see `class_name`); integers
    must be classes from 0.
    """
    values = table[label].to_numpy()
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        texts = [class_name(value) for value in values]
        found, codes = np.unique(texts, return_inverse=True)
        return codes, tuple(map(str, found))
    allowed = f"a column of strings, or of integers from 0 below {MAX_CLASSES}"
    valid = values.dtype.kind in "biu" and values.min() >= 0
    valid = valid and values.max() < MAX_CLASSES
    require(bool(valid), "label-column", label, f"{allowed}, without empty cells")
    counted = tuple(map(str, range(int(values.max()) + 1)))
    return values.astype(np.int64), _class_names(table).get(label, counted)


def _numbers(table: Any, column: str) -> npt.NDArray[np.float32]:
    """Return a column of numbers, or of lists of equal length, as (n, width)."""
    try:
        values = np.array(table[column].to_pylist(), np.float32)
        valid = bool(np.isfinite(values).all())
    # Lists of unequal length, and empty cells
    except (TypeError, ValueError):
        valid = False
    allowed = "a column with a number, or a list of equal length, in every row"
    require(valid, "input-columns", column, allowed)
    return values.reshape(len(values), -1)


def _sources(name: str, cells: Any, rows: Integers) -> Iterator[Source]:
    """Yield the images of a column, not decoded yet."""
    for row in rows.tolist():
        yield f"{row} of {name}", partial(_opened, cells[row])


def _opened(cell: Any) -> Any:
    from PIL import Image

    # A path or a URL beside the bytes is ignored.
    return Image.open(io.BytesIO(cell["bytes"].as_py()))
