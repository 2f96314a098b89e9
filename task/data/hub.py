"""Data sets of Hugging Face's ``datasets``: from the hub, a folder or a file.

They are read once and written to the cache. Later runs need not import ``datasets``,
which takes a second.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from flwr_frl.task.data.columns import (
    MAX_CLASSES,
    Values,
    choose_columns,
    read_column,
    read_labels,
    read_numbers,
)
from flwr_frl.task.data.datasets import DataSettings, save_dataset
from flwr_frl.task.data.images import (
    FORM,
    INSPECTED,
    Source,
    common_shape,
)
from flwr_frl.task.data.partitioners import parse_arguments
from flwr_frl.task.settings import (
    Free,
    Place,
    Range,
    SettingsError,
    error_line,
    need,
    require,
    unknown,
)

# Seed of the held-out test set, the same for all runs.
HELD_OUT_SEED = 0x4E1D
# Largest number of columns that a notice lists.
LISTED = 10
# Files that `save_to_disk` writes.
SAVED_FILES = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class ColumnSettings(DataSettings):
    """Columns and splits of a ``datasets`` data set.

    Parameters
    ----------
    input_columns : str, default ""
        The column of images, or comma-separated columns of numbers; ``*`` uses all
        numeric columns except the label and the column by which `NaturalIdPartitioner`
        divides the examples. By default the only column of images or of
        lists.
    label_column : str, default ""
        The column of classes; by default the only ``ClassLabel`` column, or one named
        ``label``, ``labels``, ``target`` or ``class``.
    train_split : str, default "train"
        Split for training.
    test_split : str, default ""
        Split for testing; by default ``test`` or ``validation``. If there is neither, a
        part of the training split is held out.
    test_fraction : float, default 0.2
        Fraction of the training split that is held out; the same examples for all
        seeds. With `NaturalIdPartitioner`, it is a fraction of each client's examples.
    data_subset : str, default ""
        Name of the data set's configuration, if it has several.
    """

    input_columns: Annotated[str, Free("columns, separated by commas")] = ""
    label_column: Annotated[str, Free("a column")] = ""
    train_split: Annotated[str, Free("a split")] = "train"
    test_split: Annotated[str, Free("a split")] = ""
    test_fraction: Annotated[float, Range("(0, 1)")] = 0.2
    data_subset: Annotated[str, Free("a configuration")] = ""


class Selection(NamedTuple):
    """The examples and columns that are used.

    Parameters
    ----------
    parts : dict of str to datasets.Dataset
        The examples for ``train`` and ``test``.
    inputs : list of str
        Names of the input columns.
    labels : dict of str to ndarray of int64
        Class of each example.
    classes, notes : tuple of str
        As in `Dataset`.
    """

    parts: dict[str, Any]
    inputs: list[str]
    labels: dict[str, Values]
    classes: tuple[str, ...]
    notes: tuple[str, ...]


class HubData:
    """A ``datasets`` data set that can be written to the cache.

    Parameters
    ----------
    name : str
        Its name on the hub, or the path of a folder written by ``save_to_disk``, of an
        image folder (``train/<class>/*``), or of a folder or file in Parquet, CSV or
        JSON format.
    settings : ColumnSettings
        Columns and splits; ``data_dir`` overrides the name.

    Raises
    ------
    SettingsError
        If there is no name, or a path does not exist.
    """

    def __init__(self, name: str, settings: ColumnSettings) -> None:
        self.settings = settings
        self.name = settings.data_dir or name
        require(bool(self.name), "task", "hf", "hf:NAME, or hf with a data-dir")
        valid = Place().permits(self.name)
        require(valid, "task", f"hf:{self.name}", "a name or a path")
        self.path = Path(self.name).expanduser()
        if self.name.startswith((".", "/", "~")) and not self.path.exists():
            line = f"{self.name!r} is no data set: there is no such path"
            raise SettingsError(line, "data-dir")

    @property
    def key(self) -> str:
        """A key that changes with the files and the selected columns.

        Data sets of the hub are identified by their names, without a version.
        """
        s = self.settings
        columns = s.input_columns, s.label_column, s.train_split, s.test_split
        others = s.test_fraction, s.data_subset, s.image_size, self._client_column
        versions = [self.name]
        if self.path.exists():
            files = sorted(p for p in self.path.rglob("*") if p.is_file())
            versions = [str(self.path.resolve())]
            for path in files or [self.path]:
                stat = path.stat()
                versions.append(f"{path}/{stat.st_size}/{stat.st_mtime_ns}")
        digest = hashlib.sha256("\n".join(versions).encode(errors="surrogateescape"))
        return f"hf/1{FORM}/{digest.hexdigest()}/{columns}/{others}"

    def write(self, directory: Path) -> None:
        """Write the files of the data set into a folder of the cache."""
        parts, inputs, labels, classes, notes = self._selection
        import datasets

        images = isinstance(parts["train"].features[inputs[0]], datasets.Image)
        arrays: dict[str, Values] = {}
        for part, codes in labels.items():
            arrays[f"{part}-labels"] = codes
            if not images:
                columns = [read_numbers(parts[part], c, self.name) for c in inputs]
                arrays[f"{part}-images"] = np.concatenate(columns, axis=1)
        if not images:
            save_dataset(directory, arrays, classes, notes=notes)
            return
        n = len(parts["train"])
        spread = range(0, n, -(-n // INSPECTED))
        inspected = self._sources("train", inputs[0], spread)
        shape = common_shape(inspected, self.settings.image_size)
        sources = {part: self._sources(part, inputs[0]) for part in parts}
        save_dataset(
            directory, arrays, classes, notes=notes, sources=sources, shape=shape
        )

    def columns(self) -> Any:
        """Return all columns except the inputs, for training examples, then test ones.

        Examples of unused classes are left out.
        """
        parts, inputs, labels, _, _ = self._selection
        num_classes = self.settings.num_classes or MAX_CLASSES
        import datasets

        return datasets.concatenate_datasets(
            [
                parts[part]
                .remove_columns(inputs)
                .select(np.flatnonzero(codes < num_classes))
                for part, codes in labels.items()
            ]
        )

    @cached_property
    def _selection(self) -> Selection:
        need("datasets", "hf", f"the data set {self.name!r}")
        import datasets

        datasets.disable_progress_bars()
        try:
            parts, notes = self._split(self._load())
        except SettingsError:
            raise
        # Loading scripts, files and the network raise nearly any exception.
        except Exception as error:
            here = "" if self.path.exists() else " (not a local path)"
            raise SettingsError(
                f"the data set {self.name!r}{here} cannot be loaded: "
                f"{error_line(error)}",
                "task",
            ) from error
        for part, rows in parts.items():
            if len(rows) == 0:
                line = f"{self.name!r} has no examples to {part}"
                raise SettingsError(line, f"{part}-split")
        s = self.settings
        features = parts["train"].features
        columns = s.input_columns, s.label_column, self._client_column
        inputs, label = choose_columns(features, *columns, self.name)
        labels, classes = read_labels(parts, label, self.name)
        if s.input_columns == "*":
            others = [n for n in features if n not in (*inputs, label)]
            text = f"the inputs are {_listed(inputs)}"
            notes += (text + (f", without {_listed(others)}" if others else ""),)
        empty = len(classes) - len(np.unique(np.concatenate([*labels.values()])))
        if empty:
            notes += (f"{empty} of the {len(classes)} classes have no examples",)
        return Selection(parts, inputs, labels, classes, notes)

    @property
    def _client_column(self) -> str:
        """The column whose values are the clients; empty for other partitions."""
        partition = getattr(self.settings, "partition", "")
        if not partition.endswith(":NaturalIdPartitioner"):
            return ""
        arguments = getattr(self.settings, "partitioner_arguments", "")
        return str(parse_arguments(arguments).get("partition_by", ""))

    @property
    def _is_saved(self) -> bool:
        """True if the path is a folder that was written by ``save_to_disk``."""
        return any((self.path / name).exists() for name in SAVED_FILES)

    def _load(self) -> dict[str, Any]:
        """Return the splits by name."""
        import datasets

        s = self.settings
        where, options = self.name, dict[str, Any]()
        if s.cache_dir:
            cache = Path(s.cache_dir).expanduser() / "huggingface"
            options["cache_dir"] = str(cache)
        if self.path.is_file():
            where, options["data_files"] = str(self.path.parent), self.path.name
        elif self.path.exists():
            where = str(self.path)
        if self._is_saved:
            loaded = datasets.load_from_disk(where)
        else:
            loaded = datasets.load_dataset(where, s.data_subset or None, **options)
        single = isinstance(loaded, datasets.Dataset)
        return {s.train_split: loaded} if single else dict(loaded)

    def _split(self, splits: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the examples for ``train`` and ``test``, and notices for users."""
        s = self.settings
        choices = f"one of {', '.join(splits)}"
        require(s.train_split in splits, "train-split", s.train_split, choices)
        require(s.test_split in ("", *splits), "test-split", s.test_split, choices)
        train = splits[s.train_split]
        self._check_clients(train, s.train_split)
        usual = [name for name in ("test", "validation") if name in splits]
        others = [name for name in usual if name != s.train_split]
        if name := s.test_split or next(iter(others), ""):
            allowed = "another split than train-split"
            require(name != s.train_split, "test-split", name, allowed)
            self._check_clients(splits[name], name)
            columns = s.input_columns, s.label_column, self._client_column
            _, label = choose_columns(train.features, *columns, self.name)
            test = self._with_classes_of(train, splits[name], label)
            if test.features != train.features:
                # In memory for saved data, as `datasets` would write into its folder.
                test = test.cast(train.features, keep_in_memory=self._is_saved)
            return {"train": train, "test": test}, ()
        n, test_rows = len(train), self._held_out(train)
        count = len(test_rows)
        allowed = f"smaller, so that some of the {n} examples remain for training"
        require(count < n, "test-fraction", s.test_fraction, allowed)
        train_rows = np.setdiff1d(np.arange(n), test_rows)
        note = (
            f"{self.name!r} has no test split: {count} of the {n} examples of "
            f"{s.train_split!r} are held out for testing"
        )
        parts = {"train": train.select(train_rows), "test": train.select(test_rows)}
        return parts, (note,)

    def _check_clients(self, examples: Any, split: str) -> None:
        """Raise `SettingsError` if an example has no client."""
        column = self._client_column
        if column not in examples.features:
            return
        values = read_column(examples, column).tolist()
        # Missing strings are None, and missing numbers NaN.
        row = next((i for i, v in enumerate(values) if v is None or v != v), None)
        if row is not None:
            raise SettingsError(
                f"column {column!r} of {self.name!r} has no value in row {row} "
                f"of {split!r}; expected the example's client in every row",
                "partitioner-arguments",
            )

    def _held_out(self, examples: Any) -> Values:
        """Return ascending rows for testing, the same for all seeds.

        If the values of a column are the clients, each has its share of the test
        examples, up to one example.
        """
        n, fraction = len(examples), self.settings.test_fraction
        count = max(1, round(n * fraction))
        order = np.random.default_rng(HELD_OUT_SEED).permutation(n)
        if self._client_column not in examples.features:
            return np.sort(order[:count])
        values = read_column(examples, self._client_column)[order].astype(str)
        _, starts = np.unique(np.sort(values), return_index=True)
        clients = np.split(order[np.argsort(values, kind="stable")], starts[1:])
        exact = np.array([len(rows) * fraction for rows in clients])
        counts = exact.astype(np.int64)
        # The clients with the largest remainders get one more.
        first = np.argsort(counts - exact, kind="stable")
        counts[first[: count - counts.sum()]] += 1
        chosen = [rows[:k] for rows, k in zip(clients, counts, strict=True)]
        return np.sort(np.concatenate(chosen))

    def _with_classes_of(self, train: Any, test: Any, label: str) -> Any:
        """Return test examples whose classes have the training examples' numbers."""
        names, others = (
            getattr(part.features.get(label), "names", None) for part in (train, test)
        )
        if not names or not others or names == others:
            return test
        codes = read_column(test, label)
        if codes.dtype.kind != "i":
            return test
        for name in (others[code] for code in np.unique(codes[codes >= 0])):
            if name not in names:
                listed = f"the column {label!r}"
                raise unknown("class", name, names, listed, code="label-column")
        numbers = [names.index(n) if n in names else -1 for n in others]
        # Negative codes stand for missing labels.
        codes = np.where(codes < 0, codes, np.array(numbers)[codes])
        return test.remove_columns(label).add_column(label, codes)

    def _sources(
        self, part: str, column: str, some: Sequence[int] | None = None
    ) -> Iterator[Source]:
        """Yield the images of a part, or some of them."""
        import datasets

        rows = self._selection.parts[part].select_columns([column])
        if some is not None:
            rows = rows.select(some)
        decoder = datasets.Image(mode=rows.features[column].mode)
        # Rows hold the encoded images, so that threads can decode them.
        encoded = rows.cast_column(column, datasets.Image(decode=False))
        for i, row in enumerate(encoded):
            place = f"image {i} of {part!r} of {self.name!r}"
            yield place, partial(decoder.decode_example, row[column])


def _listed(names: Sequence[str]) -> str:
    """Return the first names of columns, and the number of the others."""
    more = f" and {len(names) - LISTED} others" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
