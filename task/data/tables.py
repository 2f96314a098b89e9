"""Tables of numbers or images: local files, or a data set of Hugging Face's hub.

Files are read with pyarrow, which opens nothing that a file names, and the data set is
written to the cache.
"""

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image

from flwr_frl.common.errors import SettingsError, need, reading, require, unknown
from flwr_frl.common.settings import setting
from flwr_frl.task.data.datasets import (
    FORM,
    Dataset,
    DataSettings,
    ImageSet,
    Integers,
    Pictures,
    Read,
    named_classes,
    stamp,
)

# Suffixes of files; a folder is read by the first of them for which it has files.
FORMATS = (".parquet", ".arrow", ".csv", ".tsv", ".jsonl", ".json")
# Words in the names of files and folders that tell their split.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# Seed of held-out test sets, the same for all runs.
HELD_OUT_SEED = 0x4E1D
# Common names of columns of labels and of clients, the latter without the words of
# `NUMBERS`, which are those of columns that only count the rows.
LABEL_NAMES = ("label", "labels", "target", "class")
CLIENT_NAMES = (
    *("client", "user", "subject", "person", "participant", "patient", "device"),
)
NUMBERS = {"id", "index", "row", "number", "unique", "unnamed", "timestamp", "time"}
# Cells of CSV files without a value, besides those that pandas writes.
EMPTY = ["", "?", "NA", "N/A", "NaN", "nan", "null", "None"]
# A number as texts of a column have it in which few other cells are none.
NUMBER = r"(?i)^\s*[+-]?(\d+\.?\d*|\.\d+|inf|nan)(e[+-]?\d+)?\s*$"
# Share of a column's cells up to which texts among numbers are mistakes.
FEW = 0.1
# Whole numbers with more different values are no classes, unless the user says so.
MANY = 20


@dataclass(frozen=True)
class ColumnSettings(DataSettings):
    """Columns and splits of a table.

    Parameters
    ----------
    input_columns : str, default ""
        The column of images, or comma-separated columns of numbers. By default the only
        column of images or of lists, otherwise all columns of numbers except the label,
        the client and those that count the rows, such as ``id``.
    label_column : str, default ""
        The column to predict; by default the only ``ClassLabel`` column, or one named
        ``label``, ``labels``, ``target`` or ``class``.
    label_type : {"auto", "class", "number"}, default "auto"
        Whether the labels are classes, or numbers (regression). ``auto``: numbers if
        they have fractions or more than 20 different values.
    client_column : str, default ""
        The column whose values are the names of the clients; by default one with a name
        such as ``user`` or ``subject_id``. Without such a column, each file of a folder
        is a client, or ``partition`` divides the examples of a single file.
    missing : {"error", "mean"}, default "error"
        What happens to empty cells of the inputs: an error, or the mean of the column
        in the training data takes their place.
    window : int, default 0
        Number of successive rows that form an example, for rows in the order of time; 0
        uses single rows. The rows of a window have one client and, if labels are
        classes, one class. The label is that of the last row. Without a test split,
        the last rows of each such series of at least two windows are for testing, so
        no window overlaps both sets.
    stride : int, default 0
        Number of rows between the starts of two windows; 0 stands for ``window``, so
        that windows do not overlap.
    test_fraction : float, default 0.2
        Fraction of the examples that is for testing if the data have no part ``test``
        or ``validation``; the same examples for all seeds. If there are clients, it is
        a fraction of each client's examples.
    split : {"random", "time"}, default "random"
        Which rows are held out: drawn at random, or the last ones of each client, for
        rows in the order of time. Windows are always split by time.
    data_subset : str, default ""
        A folder in the data set, to use only its files.
    """

    input_columns: str = setting("", form="columns, separated by commas", safe=True)
    label_column: str = setting("", form="a column", safe=True)
    label_type: Literal["auto", "class", "number"] = setting("auto")
    client_column: str = setting("", form="a column", safe=True)
    missing: Literal["error", "mean"] = setting("error")
    window: int = setting(0, ge=0, le=100_000)
    stride: int = setting(0, ge=0, unused_if={"window": (0,)})
    test_fraction: float = setting(0.2, gt=0, lt=1)
    split: Literal["random", "time"] = setting("random")
    data_subset: str = setting("", form="a folder", safe=True)


def table_files(
    name: str, settings: ColumnSettings, alone: bool = False
) -> tuple[str, Read]:
    """Return the key of a table, and a function that reads it.

    Parameters
    ----------
    name : str
        Name of a data set of the hub, which is downloaded and read like a folder. The
        cache does not notice that it changes. "" if there is only ``data_dir``.
    settings : ColumnSettings
        Columns; ``data_dir`` overrides the name. It is a file, or a folder of files of
        one format (`FORMATS`), such as ``save_to_disk`` writes.
    alone : bool, default False
        Whether all rows are those of one client.

    Raises
    ------
    SettingsError
        If a path does not exist or has no table; later, if a file is unreadable, or a
        column is missing or unsuitable.
    """
    is_local = bool(settings.data_dir) or not name
    version = name
    path = Path(settings.data_dir).expanduser()
    if is_local:
        name = settings.data_dir
        exists = bool(name) and path.exists()
        allowed = "the path of a table, or of a folder of tables"
        require(exists, "data-dir", name, allowed)
        version = f"{path.resolve()}/{stamp(_files(path, settings.data_subset))}"

    def read() -> Dataset:
        with reading(name, "task"):
            if not is_local:
                need("huggingface_hub", "hf", f"the data set {name!r}")
            root = path if is_local else _downloaded(name, settings)
            files = _files(root, settings.data_subset)
            return _dataset(name, _joined(_splits(root, files)), settings, alone)

    chosen = [getattr(settings, field.name) for field in fields(ColumnSettings)]
    return f"table{FORM}/{version}/{chosen}/{alone}", read


def _downloaded(name: str, settings: ColumnSettings) -> Path:
    """Download a data set of the hub, without its metadata and code."""
    from huggingface_hub import snapshot_download

    patterns = [f"{settings.data_subset}*{suffix}" for suffix in FORMATS]
    return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))


def _files(root: Path, subset: str) -> list[Path]:
    """Return a file, or the files of a folder of the first format that it has."""
    place = root / subset
    inside = place.exists() and place.resolve().is_relative_to(root.resolve())
    require(inside, "data-subset", subset, "a folder in the data")
    found = sorted(path for path in place.rglob("*") if path.is_file()) or [place]
    by_format = ([p for p in found if p.suffix.lower() == f] for f in FORMATS)
    files = next(filter(None, by_format), [])
    allowed = f"a file, or a folder of files, of a format {', '.join(FORMATS)}"
    require(bool(files), "data-dir", str(place), allowed)
    return files


def _splits(root: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files by split. Without a known word in a name, it is ``train``."""
    splits: dict[str, list[Path]] = {}
    for path in files:
        words = re.split("[^a-z]+", path.relative_to(root).as_posix().lower())
        named = [SPLITS[word] for word in words if word in SPLITS]
        splits.setdefault(named[0] if named else "train", []).append(path)
    return splits


class Table(NamedTuple):
    """Rows of the training split, followed by those of the test split if there is one.

    Parameters
    ----------
    rows : pyarrow.Table
        The rows.
    trained : int
        Number of rows of the training split.
    files : list of tuple
        Each file with its number of rows.
    """

    rows: Any
    trained: int
    files: list[tuple[Path, int]]

    def place(self, row: int) -> str:
        """Return where a row is, for messages; the first of a file is row 1."""
        for path, count in self.files:
            if row < count:
                return f"row {row + 1} of {path.name!r} (not counting a header)"
            row -= count
        raise IndexError(row)


def _read(path: Path) -> Any:
    from pyarrow import csv, ipc, json, parquet

    suffix = path.suffix.lower()
    with path.open("rb") as file:
        if suffix == ".parquet":
            return parquet.ParquetFile(file).read()
        if suffix == ".arrow":
            return ipc.open_stream(file).read_all()
        if suffix not in (".csv", ".tsv"):
            return json.read_json(file)
        # Spreadsheets of some countries separate cells by semicolons.
        separator = chr(max(b",;\t", key=file.readline().count))
        file.seek(0)
        parse = csv.ParseOptions(delimiter=separator)
        convert = csv.ConvertOptions(null_values=EMPTY, strings_can_be_null=True)
        table = csv.read_csv(file, parse_options=parse, convert_options=convert)
        # The header may have blanks around names.
        return table.rename_columns([name.strip() for name in table.column_names])


@runtime_checkable
class DataFrame(Protocol):
    """A data frame of pandas, Polars or pyarrow."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return its rows, as Arrow's PyCapsule interface specifies."""


def read_inputs(
    source: Path | DataFrame, dataset: Dataset, s: ColumnSettings, client: str
) -> tuple[npt.NDArray[np.float32], list[str]]:
    """Return rows or windows of a file with a header or a data frame.

    Parameters
    ----------
    source : Path or data frame
        A file of a format in `FORMATS`, or a data frame. It may have other columns.
    dataset : Dataset
        Names of the columns.
    s : ColumnSettings
        Treatment of missing numbers, and size of the windows.
    client : str
        If there is a column of clients, only the rows of this one are returned; ""
        returns all. Rows of a window have one client.

    Returns
    -------
    inputs : ndarray, shape (n, width) or (n, width, time)
        Rows or windows; NaN if missing.
    places : list of str
        The file and the row of each input, from 1; of a window the first one.

    Raises
    ------
    SettingsError
        If it lacks a column or the client, has a cell that is not a number, or has too
        few rows for a window.
    """
    from pyarrow import table as arrow_table

    path = source if isinstance(source, Path) else Path("data frame")
    with reading(path, "file"):
        rows = _read(path) if isinstance(source, Path) else arrow_table(source)
    if absent := [name for name in dataset.columns if name not in rows.column_names]:
        has = f"it has the columns {_listed(rows.column_names)}"
        raise SettingsError(f"{str(path)!r} lacks {_listed(absent)}; {has}", "columns")
    table = Table(rows, len(rows), [(path, len(rows))])
    values = [_numbers(table, name, s.missing) for name in dataset.columns]
    numbers, places = np.concatenate(values, axis=1), np.arange(len(rows))
    owners, name = np.zeros_like(places), dataset.client_column
    if name and name in rows.column_names:
        texts = np.array([str(cell) for cell in rows[name].to_pylist()], np.str_)
        found, owners = np.unique(texts, return_inverse=True)
        if client:
            allowed = f"one of {_listed(found.tolist())}, or no column {name!r}"
            require(client in found, "client-name", client, allowed)
            places = np.flatnonzero(texts == client)
    numbers, owners = numbers[places], owners[places]
    if s.window:
        order, (_, first) = _windows(owners, np.zeros_like(owners), 0, s)
        require(len(first) > 0, "window", s.window, "at most the rows of a series")
        numbers = sliding_window_view(numbers[order], s.window, axis=0)[first]
        places = places[order][first]
    return numbers, [f"{path}:{row + 1}" for row in places]


def _joined(splits: Mapping[str, list[Path]]) -> Table:
    """Return the rows for training and for testing."""
    import pyarrow

    require("train" in splits, "data-dir", ", ".join(splits), "files for training, too")
    tested = "test" if "test" in splits else "validation"
    parts = [splits[split] for split in ("train", tested) if split in splits]
    files = [[(path, _read(path)) for path in part] for part in parts]
    tables = [
        pyarrow.concat_tables([t for _, t in part], promote_options="permissive")
        for part in files
    ]
    # Equal integers must stand for equal classes.
    names = [_class_names(table) for table in tables]
    allowed = f"for testing the same classes as for training, {names[0]}"
    require(names[0] == names[-1], "label-column", names[-1], allowed)
    rows = pyarrow.concat_tables(tables, promote_options="permissive")
    counts = [(path, len(table)) for part in files for path, table in part]
    return Table(rows, len(tables[0]), counts)


def _dataset(name: str, table: Table, s: ColumnSettings, alone: bool) -> Dataset:
    """Return a data set; its images are decoded when it is written."""
    rows, n = table.rows, table.trained
    client = s.client_column.strip() or _client_column(rows)
    inputs, label = _choose_columns(rows, s, client)
    clients, owners = _clients(table, client, bool(s.data_dir), alone)
    is_image = _is_image(rows[inputs[0]])
    targets, classes = _targets(table, label, s, is_image)
    numbers, notes = np.empty(0, np.float32), tuple[str, ...]()
    if not is_image:
        arrays = [_numbers(table, column, s.missing) for column in inputs]
        numbers = np.concatenate(arrays, axis=1)
        left = [c for c in rows.column_names if c not in {*inputs, label, client}]
        kind = f"one of {len(classes)} classes" if classes else "a number"
        by = f"the {len(clients)} of {client!r}" if client else f"{len(clients)} files"
        notes = (
            f"{name!r}: {label!r} is predicted as {kind}, from {_listed(inputs)}; "
            + (f"not used: {_listed(left)}; " if left else "")
            + f"clients: {by if clients else 'set by partition'}",
        )
    parts = [np.arange(n), np.arange(n, len(rows))]
    if s.window and not is_image:
        kinds = targets if classes else np.zeros_like(owners)
        order, parts = _windows(owners, kinds, n, s)
        allowed = "fewer rows, so that a series has windows for training and testing"
        require(all(map(len, parts)), "window", s.window, allowed)
        numbers = sliding_window_view(numbers[order], s.window, axis=0)
        targets, owners = (each[order][s.window - 1 :] for each in (targets, owners))
    elif n == len(rows):
        by_time = s.split == "time"
        tested = held_out(owners, s.test_fraction, by_time)
        allowed = f"smaller, so that some of the {n} examples remain for training"
        require(len(tested) < n, "test-fraction", s.test_fraction, allowed)
        parts = [np.setdiff1d(parts[0], tested), tested]
        notes += (
            f"{name!r} has no test split: {len(tested)} of the {n} examples, "
            f"{'the last ones' if by_time else 'drawn at random'}, are held out for "
            "testing",
        )
    images: list[Any] = [numbers[part] for part in parts] if not is_image else []
    if is_image:
        opened = partial(_opened, rows[inputs[0]])
        images = [*Pictures.of_parts(parts, opened, s.image_size)]
    train, test = (
        ImageSet(own, targets[part], owners[part] if clients else None)
        for own, part in zip(images, parts, strict=True)
    )
    column = client if clients else ""
    return Dataset(train, test, classes, clients, notes, tuple(inputs), column)


def _listed(names: Sequence[str]) -> str:
    """Return names of columns, of many only some."""
    shown = [*names[:4], "…", names[-1]] if len(names) > 6 else names
    # Names may contain line breaks.
    return " ".join(", ".join(shown).split())


def _windows(
    owners: Integers, kinds: Integers, trained: int, s: ColumnSettings
) -> tuple[Integers, list[Integers]]:
    """Return the rows in the order of their series, and where the windows start.

    Parameters
    ----------
    owners, kinds : ndarray, shape (rows,)
        Client and class of each row. Successive rows with the same are one series.
    trained : int
        Number of rows of the training split.
    s : ColumnSettings
        Size of the windows. Without a test split, the last ``test-fraction`` of each
        series, at least one window if there are two, is for testing.

    Returns
    -------
    order : ndarray
        All rows: those of each split by client.
    starts : list of ndarray
        First positions, in this order, of the windows for training and for testing.
    """
    count = len(owners)
    tested = np.arange(count) >= trained
    order = np.lexsort((owners, tested))
    keys = np.column_stack([owners, kinds, tested])[order]
    inner = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
    edges = [0, *inner.tolist(), count]
    starts: list[list[int]] = [[], []]
    for first, end in pairwise(edges):
        length, cut = end - first, end if first < trained else first
        if trained == count and length >= 2 * s.window:
            cut = end - max(int(length * s.test_fraction), s.window)
        step = s.stride or s.window
        starts[0] += range(first, cut - s.window + 1, step)
        starts[1] += range(cut, end - s.window + 1, step)
    return order, [np.array(each) for each in starts]


def held_out(clients: Integers, fraction: float, by_time: bool = False) -> Integers:
    """Return ascending rows for testing, the same for all seeds.

    Parameters
    ----------
    clients : ndarray
        Client of each row. Each has its share of the test rows, up to one row.
    fraction : float
        Share of the rows that is for testing; at least one row.
    by_time : bool, default False
        Whether they are the last rows of each client.
    """
    count = len(clients)
    tested = max(1, round(count * fraction))
    order = np.random.default_rng(HELD_OUT_SEED).permutation(count)
    order = np.arange(count)[::-1] if by_time else order
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


def _choose_columns(rows: Any, s: ColumnSettings, client: str) -> tuple[list[str], str]:
    """Return the names of the input columns and of the label column."""
    columns = rows.column_names
    candidates = [*_class_names(rows)] or [n for n in LABEL_NAMES if n in columns][:1]
    label = s.label_column.strip() or (candidates[0] if len(candidates) == 1 else "")
    if label not in columns:
        raise unknown("label-column", label, columns, "the table")
    rest = [name for name in columns if name not in (label, client)]
    images = [name for name in rest if _is_image(rows[name])]
    numbers = [name for name in rest if _is_numeric(rows[name])]
    inputs = [name.strip() for name in s.input_columns.split(",")]
    if not s.input_columns:
        lists = [name for name in numbers if hasattr(rows[name].type, "value_type")]
        arrays = images or lists
        usual = [name for name in numbers if not _counts_rows(name)]
        inputs = arrays if len(arrays) == 1 else usual
    for name in inputs:
        if name not in numbers + images:
            kind, usable = "column of numbers in input-columns", numbers + images
            raise unknown(kind, name, usable, "the table", code="input-columns")
    valid = {*inputs} <= {*numbers} or len(inputs) == 1
    allowed = "one column of images, or columns of numbers with commas, of the columns "
    allowed += _listed(columns)
    require(bool(inputs) and valid, "input-columns", s.input_columns, allowed)
    return inputs, label


def _words(name: str) -> set[str]:
    return {*re.findall("[a-z]+", name.lower())}


def _counts_rows(name: str) -> bool:
    """Return whether a column only counts the rows, to judge by its name."""
    return not name or set() < _words(name) <= NUMBERS


def _client_column(table: Any) -> str:
    """Return the only column that varies and has a name such as ``subject_id``."""
    usual = [{name} for name in CLIENT_NAMES]
    names = [n for n in table.column_names if _words(n) - NUMBERS in usual]
    names = [n for n in names if len(table[n].unique()) > 1]
    return names[0] if len(names) == 1 else ""


def _class_names(table: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of classes that ``datasets`` has stored with integer columns."""
    metadata = (table.schema.metadata or {}).get(b"huggingface", b"{}")
    features = json.loads(metadata).get("info", {}).get("features", {})
    return {
        name: tuple(map(str, feature["names"]))
        for name, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }


def _is_image(cells: Any) -> bool:
    """Return whether cells have the bytes of a file, as ``datasets`` stores images."""
    from pyarrow import types

    return bool(
        types.is_struct(cells.type) and cells.type.get_field_index("bytes") >= 0
    )


def _is_numeric(cells: Any) -> bool:
    """Return whether cells are numbers, or lists of numbers.

    Columns of numbers with a few texts are columns of numbers, which have mistakes.
    """
    from pyarrow import compute, types

    if (texts := _texts(cells)) is not None:
        count = compute.sum(texts).as_py() or 0
        return bool(0 < count <= FEW * (len(cells) - cells.null_count))
    kind = cells.type
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    tests = types.is_integer, types.is_floating, types.is_boolean
    return any(test(kind) for test in tests)


def _texts(cells: Any) -> Any:
    """Return which texts of a column are no numbers; None for other columns."""
    from pyarrow import compute, types

    if types.is_string(cells.type) or types.is_large_string(cells.type):
        return compute.invert(compute.match_substring_regex(cells, NUMBER))
    return None


def _clients(
    table: Table, column: str, is_local: bool, alone: bool
) -> tuple[tuple[str, ...], Integers]:
    """Return the names of the clients, none without any, and the client of each row."""
    count = len(table.rows)
    if alone:
        return (), np.zeros(count, np.int64)
    if column:
        if column not in table.rows.column_names:
            raise unknown("client-column", column, table.rows.column_names, "the table")
        _require_full(table, column, "client-column")
        cells = table.rows[column].to_numpy()
    else:
        named = [path.stem for path, _ in table.files]
        by_file = is_local and len(set(named)) > 1
        # Files such as train-0.csv and data-00000-of-00002.arrow are parts of a split.
        parts = ("-of-" in name or _words(name) & {*SPLITS} for name in named)
        if not by_file or any(parts):
            return (), np.zeros(count, np.int64)
        cells = np.repeat(named, [rows for _, rows in table.files])
    found, numbers = np.unique(cells, return_inverse=True)
    allowed = "a column with at least 2 clients that have several rows each, not "
    allowed += f"{len(found)} in {count} rows"
    require(1 < len(found) < count, "client-column", column, allowed)
    return tuple(map(str, found)), numbers


def _require_full(table: Table, column: str, code: str) -> None:
    """Raise an error that names the first empty cell of a column, if any."""
    cells = table.rows[column]
    if cells.null_count:
        place = table.place(cells.is_null().index(True).as_py())
        raise SettingsError(f"column {column!r} is empty in {place}", code)


def _targets(
    table: Table, label: str, s: ColumnSettings, is_image: bool
) -> tuple[npt.NDArray[Any], tuple[str, ...]]:
    """Return the target of each row, and the names of the classes.

    Classes are numbered in the order of their names, or of the numbers that they are.
    Without classes, targets are numbers.
    """
    cells = table.rows[label]
    _require_full(table, label, "label-column")
    values = cells.to_numpy()
    if named := _class_names(table.rows).get(label):
        valid = values.min() >= 0 and values.max() < len(named)
        require(bool(valid), "label-column", label, f"integers below {len(named)}")
        return values.astype(np.int64), named
    is_number = values.dtype.kind in "biuf"
    is_whole = is_number and bool((values == np.rint(values)).all())
    names = values.astype(np.int64) if is_whole else values
    valid = is_number or all(isinstance(value, str) for value in values)
    require(valid, "label-column", label, "a column of classes or numbers")
    if not is_number:
        names = np.array([value.strip() for value in values])
    found, codes = np.unique(names, return_inverse=True)
    is_class = not is_number or (is_whole and (is_image or len(found) <= MANY))
    if s.label_type != "auto":
        is_class = s.label_type == "class"
    require(is_class or is_number, "label-type", s.label_type, f"class for {label!r}")
    if not is_class:
        finite = bool(np.isfinite(values).all() and len(found) > 1)
        require(finite, "label-column", label, "a column of different finite numbers")
        return values.astype(np.float32), ()
    allowed = "a column of classes with several rows each, not "
    allowed += f"{len(found)} different cells in {len(values)} rows"
    valid = len(found) <= max(2, len(values) // 2)
    require(valid, "label-column", label, allowed)
    classes = named_classes(s.classes, tuple(map(str, found)))
    return np.array([classes.index(str(name)) for name in found])[codes], classes


def _numbers(table: Table, column: str, missing: str) -> npt.NDArray[np.float32]:
    """Return a column of numbers, or of lists of equal length, as (n, width).

    Cells without a number are NaN if ``missing`` is ``mean``.
    """
    cells = table.rows[column]
    texts = _texts(cells)
    if texts is not None and (row := texts.index(True).as_py()) >= 0:
        line = f"column {column!r} has {cells[row].as_py()!r} in {table.place(row)}; "
        line += "expected a number or an empty cell, or other input-columns"
        raise SettingsError(line, "input-columns")
    with reading(f"column {column}", "input-columns", "lists of equal length"):
        if hasattr(cells.type, "value_type"):
            values = np.array(cells.to_pylist(), np.float32)
        else:
            values = cells.cast("float64").to_numpy().astype(np.float32)
    values = values.reshape(len(values), -1)
    invalid = np.isinf(values) if missing == "mean" else ~np.isfinite(values)
    if invalid.any():
        found = np.flatnonzero(invalid.any(axis=1)).tolist()
        raise SettingsError(
            f"column {column!r} has no finite number in {table.place(found[0])}; rows "
            f'affected: {len(found)}; fill or remove them, or set missing="mean"',
            "missing",
        )
    return values


def _opened(cells: Any, row: int) -> Image.Image:
    """Return the image in a cell. A path or a URL beside its bytes is ignored."""
    return Image.open(io.BytesIO(cells[row]["bytes"].as_py()))
