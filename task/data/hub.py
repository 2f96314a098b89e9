"""Data sets of Hugging Face's ``datasets``: from the hub, a folder or a file.

They are read once and written to the cache. Later runs need not import ``datasets``,
which takes a second.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from flwr_frl.common.settings import (
    SettingsError,
    error_line,
    is_possible,
    need,
    require,
    setting,
    unknown,
)
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

# Seed of the held-out test set, the same for all runs.
HELD_OUT_SEED = 0x4E1D
# Largest number of columns that a notice lists.
LISTED = 10
# Files that `save_to_disk` writes.
SPLITS, STATE = "dataset_dict.json", "state.json"
# Formats whose files cannot refer to others, as those of HDF5 can. The names of an
# image folder's metadata are checked when images are read.
FORMATS = ("arrow", "csv", "imagefolder", "json", "parquet", "webdataset")
# Name of an image in an archive.
ZIPPED = re.compile(r"(zip://[^:]*::)(.*)", re.DOTALL)
# Held while a function of `datasets` is replaced.
LOCK = Lock()


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

    input_columns: str = setting("", form="columns, separated by commas", safe=True)
    label_column: str = setting("", form="a column", safe=True)
    train_split: str = setting("train", form="a split", safe=True)
    test_split: str = setting("", form="a split", safe=True)
    test_fraction: float = setting(0.2, gt=0, lt=1)
    data_subset: str = setting("", form="a configuration", safe=True)


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

    Paths and URLs in the files of a data set are not trusted. Only files below its
    folder are read, or, for a data set of the hub, files that were downloaded from it.

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
        valid = is_possible(self.name)
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
        return f"hf/2{FORM}/{digest.hexdigest()}/{columns}/{others}"

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
            loaded = self._load()
            splits = {name: _undecoded(rows) for name, rows in loaded.items()}
            parts, notes = self._split(splits)
        except SettingsError:
            raise
        # Files and the network raise nearly any exception.
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
        return any((self.path / name).exists() for name in (SPLITS, STATE))

    @cached_property
    def _cache(self) -> Path:
        """The folder into which ``datasets`` writes tables."""
        import datasets

        if s := self.settings.cache_dir:
            return Path(s).expanduser().resolve() / "huggingface"
        return Path(datasets.config.HF_DATASETS_CACHE).expanduser().resolve()

    @property
    def _folder(self) -> Path:
        """The folder of the data, or the one that contains its only file."""
        is_file = self.path.is_file()
        return (self.path.parent if is_file else self.path).resolve()

    def _load(self) -> dict[str, Any]:
        """Return the splits by name."""
        import datasets

        s = self.settings
        if self._is_saved:
            self._check_saved()
            loaded = datasets.load_from_disk(str(self.path))
            single = isinstance(loaded, datasets.Dataset)
            return {s.train_split: loaded} if single else dict(loaded)
        where, options = self.name, {"cache_dir": str(self._cache)}
        if self.path.exists():
            # Absolute: `datasets` takes `csv` for its reader and not for a folder.
            where = str(self._folder)
            if self.path.is_file():
                options["data_files"] = self.path.name
            # It also takes the name of a file for a pattern.
            plain = not set("*?[") & {*where, *options.get("data_files", "")}
            require(plain, "task", f"hf:{self.name}", "a path without *, ? and [")
        with self._own_files():
            # Since version 4, `datasets` cannot run code of a data set.
            builder = datasets.load_dataset_builder(
                where, s.data_subset or None, **options
            )
        # The reader of an earlier download is called `cache`.
        if builder.name not in (*FORMATS, "cache"):
            allowed = ", ".join(FORMATS)
            raise ValueError(f"its format is {builder.name}; expected one of {allowed}")
        # The metadata of a data set can set the version, which is part of this path.
        if not Path(builder.cache_dir).resolve().is_relative_to(self._cache):
            version = str(builder.config.version)
            raise ValueError(f"its version is {version!r}; expected x.y.z")
        builder.download_and_prepare()
        return dict(builder.as_dataset())

    def _check_saved(self) -> None:
        """Check the names of files in a folder written by ``save_to_disk``."""
        folders = [self.path]
        if (self.path / SPLITS).exists():
            splits = json.loads((self.path / SPLITS).read_text("utf-8"))["splits"]
            folders += [self.path / split for split in splits]
        for state in (folder / STATE for folder in folders):
            self._own(str(state))
            if state.exists():
                for file in json.loads(state.read_text("utf-8"))["_data_files"]:
                    self._own(str(state.parent / file["filename"]))

    @contextmanager
    def _own_files(self) -> Iterator[None]:
        """Make ``datasets`` refuse patterns of files that leave the data set.

        The metadata of a data set can name any file or URL, which `datasets` would
        open at once.
        """
        from datasets import data_files

        resolve, is_local = data_files.resolve_pattern, self.path.exists()
        root = str(self._folder) if is_local else "hf:/"

        def own(pattern: str, base_path: str, *args: Any, **named: Any) -> list[str]:
            for place in base_path, os.path.join(base_path, pattern):
                rest = place.removeprefix(root)
                is_below = rest != place and rest[:1] in ("", "/")
                if not is_below or _is_url(rest) or ".." in rest.split("/"):
                    raise _foreign(place)
            files: list[str] = resolve(pattern, base_path, *args, **named)
            for file in files if is_local else ():
                self._own(file, self._folder)
            return files

        with LOCK:
            data_files.resolve_pattern = own
            try:
                yield
            finally:
                data_files.resolve_pattern = resolve

    def _own(self, place: str, *folders: Path) -> Path:
        """Return the real path of a file of the data set; refuse any other."""
        from huggingface_hub.constants import HF_HUB_CACHE

        if _is_url(place):
            raise _foreign(place)
        path, root = Path(place).resolve(), self.path.resolve()
        downloads = Path(HF_HUB_CACHE).resolve()
        # Folders of downloads consist of links to other folders of downloads.
        if not self.path.exists() or root.is_relative_to(downloads):
            root = downloads
        if not any(path.is_relative_to(folder) for folder in (root, *folders)):
            raise _foreign(str(path))
        return path

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
        for i, row in enumerate(rows):
            place = f"image {i} of {part!r} of {self.name!r}"
            yield place, partial(self._decoded, decoder, row[column])

    def _decoded(self, decoder: Any, image: dict[str, Any]) -> Any:
        """Return an image from its bytes, or from a file of the data set."""
        if image["bytes"] is None and image["path"] is not None:
            zipped = ZIPPED.fullmatch(image["path"])
            inside, path = zipped.groups() if zipped else ("", image["path"])
            image = {"bytes": None, "path": f"{inside}{self._own(path)}"}
        return decoder.decode_example(image)


def _undecoded(rows: Any) -> Any:
    """Return examples whose images are read without opening the files they name."""
    import datasets
    from datasets.features.features import require_decoding

    for name, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            encoded = datasets.Image(mode=feature.mode, decode=False)
            rows = rows.cast_column(name, encoded)
        elif require_decoding(feature):
            # Sounds, videos and lists of images are of no use here.
            rows = rows.remove_columns(name)
    return rows


def _is_url(place: str) -> bool:
    """Return whether a name is a URL, or a chain of URLs."""
    return "://" in place or "::" in place


def _foreign(place: str) -> ValueError:
    return ValueError(f"it names {place!r}; only its own files are read")


def _listed(names: Sequence[str]) -> str:
    """Return the first names of columns, and the number of the others."""
    more = f" and {len(names) - LISTED} others" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
