"""Data sets of Hugging Face's ``datasets``: from the hub, a folder or a file.

They are read once and written to the cache. Later runs need not import ``datasets``,
which takes a second.
"""

import glob
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
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
from flwr_frl.task.data.arrays import MAX_CLASSES
from flwr_frl.task.data.cache import PARTS, Dataset, ImageSet, stamp
from flwr_frl.task.data.datasets import DataSettings, cache_root
from flwr_frl.task.data.images import (
    FORM,
    IMAGE_SUFFIXES,
    INSPECTED,
    Pictures,
    Source,
    common_shape,
)
from flwr_frl.task.data.labels import class_name, held_out
from flwr_frl.task.data.partitions import parse_arguments

Values = npt.NDArray[Any]

# Readers of `datasets` by suffix; their files cannot refer to others, as those of HDF5
# can. A folder is read by the first of them for which it has files.
READERS = {
    **dict.fromkeys(sorted(IMAGE_SUFFIXES), "imagefolder"),
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
}
# Words in the names of files and folders that tell their split.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# Common names of label columns, for data sets without a `ClassLabel` column.
LABEL_NAMES = ("label", "labels", "target", "class")
NUMERIC = ("int", "uint", "float", "bool")


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
        A folder in the data set, to use only its files.
    """

    input_columns: str = setting("", form="columns, separated by commas", safe=True)
    label_column: str = setting("", form="a column", safe=True)
    train_split: str = setting("train", form="a split", safe=True)
    test_split: str = setting("", form="a split", safe=True)
    test_fraction: float = setting(0.2, gt=0, lt=1)
    data_subset: str = setting("", form="a folder", safe=True)


class HubData:
    """A ``datasets`` data set that can be read into the cache.

    Paths and URLs in the files of a data set are not trusted. Only files below its
    folder are read, without its metadata. A data set of the hub is downloaded, and then
    read like a folder.

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
        exists = self.path.exists() or not self.name.startswith((".", "/", "~"))
        require(exists, "data-dir", self.name, "the path of a data set")
        self.is_local = self.path.exists()
        if self.path.is_dir():
            self._choose_subset()
        # The column whose values are the clients; empty for other partitions.
        self.client_column = ""
        if getattr(settings, "partition", "").endswith(":NaturalIdPartitioner"):
            arguments = parse_arguments(getattr(settings, "partitioner_arguments", ""))
            self.client_column = str(arguments.get("partition_by", ""))

    def _choose_subset(self) -> None:
        subset = self.settings.data_subset
        self.path /= subset
        require(self.path.exists(), "data-subset", subset, "a folder in the data")

    @property
    def key(self) -> str:
        """A key that changes with the files and the selected columns.

        Data sets of the hub are identified by their names, without a version.
        """
        s = self.settings
        columns = s.input_columns, s.label_column, s.train_split, s.test_split
        others = s.test_fraction, s.data_subset, s.image_size, self.client_column
        version = self.name
        if self.is_local:
            files = sorted(p for p in self.path.rglob("*") if p.is_file())
            version = f"{self.path.resolve()}/{stamp(files or [self.path])}"
        return f"hf/3{FORM}/{version}/{columns}/{others}"

    def read(self) -> Dataset:
        """Return the data set; its images are decoded when it is written."""
        parts, notes = self._loaded
        import datasets

        columns, label = self._columns
        labels, classes = _labels(parts, label)
        used = np.unique(np.concatenate([*labels.values()]))
        if empty := len(classes) - len(used):
            notes += (f"{empty} of the {len(classes)} classes have no examples",)
        inputs: dict[str, Any]
        if isinstance(parts["train"].features[columns[0]], datasets.Image):
            n = len(parts["train"])
            spread = range(0, n, -(-n // INSPECTED))
            some = self._sources(parts["train"].select(spread), columns[0])
            shape = common_shape(some, self.settings.image_size)
            inputs = {
                part: Pictures(self._sources(rows, columns[0]), len(rows), shape)
                for part, rows in parts.items()
            }
        else:
            inputs = {part: _numbers(rows, columns) for part, rows in parts.items()}
        train, test = (ImageSet(inputs[part], labels[part]) for part in PARTS)
        return Dataset(train, test, classes, notes=notes)

    def columns(self) -> Any:
        """Return all columns except the inputs, for training examples, then test ones.

        Examples of unused classes are left out.
        """
        parts, _ = self._loaded
        import datasets

        inputs, label = self._columns
        labels, _ = _labels(parts, label)
        count = self.settings.num_classes or MAX_CLASSES
        chosen = [
            rows.select(np.flatnonzero(labels[part] < count)).remove_columns(inputs)
            for part, rows in parts.items()
        ]
        chosen[1] = chosen[1].cast(chosen[0].features)
        return datasets.concatenate_datasets(chosen)

    @cached_property
    def _columns(self) -> tuple[list[str], str]:
        s, features = self.settings, self._loaded[0]["train"].features
        return choose_columns(
            features, s.input_columns, s.label_column, self.client_column
        )

    @cached_property
    def _loaded(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The examples for ``train`` and ``test``, and notices for users."""
        need("datasets", "hf", f"the data set {self.name!r}")
        import datasets

        datasets.disable_progress_bars()
        try:
            if not self.is_local:
                self._download()
            splits = {n: _undecoded(x) for n, x in self._from_files().items()}
            parts, notes = self._split(splits)
        except SettingsError:
            raise
        # Files and the network raise nearly any exception.
        except Exception as error:
            here = "" if self.is_local else " (not a local path)"
            raise SettingsError(
                f"the data set {self.name!r}{here} cannot be loaded: "
                f"{error_line(error)}",
                "task",
            ) from error
        for part, rows in parts.items():
            clients = self.client_column
            if clients in rows.features:
                valid = rows.data.column(clients).null_count == 0
                allowed = f"a column with a client in every row of the {part} examples"
                require(valid, "partitioner-arguments", clients, allowed)
        return parts, notes

    def _download(self) -> None:
        """Download a data set of the hub, without its metadata and code."""
        from huggingface_hub import snapshot_download

        self.path = Path(
            snapshot_download(
                self.name,
                repo_type="dataset",
                allow_patterns=[f"{self.settings.data_subset}*{s}" for s in READERS],
            )
        )
        self._choose_subset()

    def _from_files(self) -> dict[str, Any]:
        """Return the splits of a folder or a file.

        ``datasets`` gets a list of files and does not look for metadata.
        """
        import datasets

        root, found = self.path, [self.path]
        if root.is_dir():
            found = sorted(path for path in root.rglob("*") if path.is_file())
        readers = {READERS.get(path.suffix.lower()) for path in found}
        reader = next((r for r in READERS.values() if r in readers), None)
        allowed = f"a folder or file of the formats {', '.join(READERS)}"
        require(reader is not None, "task", f"hf:{self.name}", allowed)
        splits: dict[str, list[str]] = {}
        for path in found:
            if READERS.get(path.suffix.lower()) == reader:
                split = self._split_of(path.relative_to(root).as_posix())
                # `datasets` takes names for patterns.
                splits.setdefault(split, []).append(glob.escape(self._own(path)))
        # One by one, as each split may number its classes otherwise.
        options: dict[str, Any] = {"split": "train"}
        if self.settings.cache_dir:
            options["cache_dir"] = str(cache_root(self.settings) / "huggingface")
        return {
            split: datasets.load_dataset(reader, data_files=files, **options)
            for split, files in splits.items()
        }

    def _split_of(self, place: str) -> str:
        """Return the split of a file below the folder."""
        if (self.path / "dataset_dict.json").exists():
            # Written by `save_to_disk`
            return place.partition("/")[0]
        words = re.split("[^a-z]+", place.lower())
        known = [SPLITS[word] for word in words if word in SPLITS]
        return known[0] if known and self.path.is_dir() else "train"

    def _own(self, path: Path) -> str:
        """Return the real path of a file of the data set; refuse any other."""
        from huggingface_hub.constants import HF_HUB_CACHE

        folder = self.path.parent if self.path.is_file() else self.path
        roots, downloads = [folder.resolve()], Path(HF_HUB_CACHE).resolve()
        if roots[0].is_relative_to(downloads):
            # Folders of downloads consist of links to others.
            roots.append(downloads)
        real = path.resolve()
        # The user may name a link. `datasets` takes :: for a chain of URLs.
        own = path == self.path or any(map(real.is_relative_to, roots))
        if not own or "::" in str(path):
            raise ValueError(f"it names {str(path)!r}; only its own files are read")
        return str(path.absolute())

    def _split(self, splits: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the examples for ``train`` and ``test``, and notices for users."""
        s = self.settings
        choices = f"one of {', '.join(splits)}"
        require(s.train_split in splits, "train-split", s.train_split, choices)
        train = splits[s.train_split]
        usual = [n for n in ("test", "validation") if n in splits if n != s.train_split]
        if name := s.test_split or next(iter(usual), ""):
            found = name in splits and name != s.train_split
            require(found, "test-split", name, f"{choices}, but not train-split")
            test = splits[name]
            if {*test.features} != {*train.features}:
                raise ValueError(f"{name!r} has other columns than {s.train_split!r}")
            return {"train": train, "test": test}, ()
        clients = None
        if self.client_column in train.features:
            clients = _column(train, self.client_column)
        n, tested = len(train), held_out(len(train), s.test_fraction, clients)
        allowed = f"smaller, so that some of the {n} examples remain for training"
        require(len(tested) < n, "test-fraction", s.test_fraction, allowed)
        rest = np.setdiff1d(np.arange(n), tested)
        note = (
            f"{self.name!r} has no test split: {len(tested)} of the {n} examples of "
            f"{s.train_split!r} are held out for testing"
        )
        return {"train": train.select(rest), "test": train.select(tested)}, (note,)

    def _sources(self, rows: Any, column: str) -> Iterator[Source]:
        """Yield the images of a column."""
        import datasets

        decoder = datasets.Image(mode=rows.features[column].mode)
        # Rows hold the encoded images, so that threads can decode them.
        for i, row in enumerate(rows.select_columns([column])):
            load = partial(self._decoded, decoder, row[column])
            yield f"{i} of {self.name}", load

    def _decoded(self, decoder: Any, image: dict[str, Any]) -> Any:
        """Return an image from its bytes, or from a file of the data set."""
        if image["bytes"] is None and image["path"] is not None:
            image = {"bytes": None, "path": self._own(Path(image["path"]))}
        return decoder.decode_example(image)


def choose_columns(
    features: Any, input_columns: str, label_column: str, client_column: str
) -> tuple[list[str], str]:
    """Return the names of the input columns and of the label column.

    Parameters
    ----------
    features : datasets.Features
        All columns with their types.
    input_columns, label_column : str
        The settings; empty ones are inferred.
    client_column : str
        Column that names the clients, which is no input with ``input_columns="*"``.

    Raises
    ------
    SettingsError
        If a column is missing, ambiguous or of an unsupported type.
    """
    kinds = {name: _kind(feature) for name, feature in features.items()}
    listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    # Names of columns may contain line breaks.
    listed = f"of the columns {' '.join(listed.split())}"
    # The header of a CSV file may have blanks around names.
    named = {name.strip(): name for name in features}
    classes = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    usual = classes or [named[name] for name in LABEL_NAMES if name in named]
    label = named.get(label_column.strip(), label_column)
    if not label and usual and len(classes) < 2:
        label = usual[0]
    require(label in features, "label-column", label, f"one {listed}")
    rest = {name: kind for name, kind in kinds.items() if name != label}
    images = [name for name, kind in rest.items() if kind == "Image"]
    numbers = [name for name, kind in rest.items() if _is_numeric(kind)]
    lists = [name for name in numbers if rest[name].startswith("list")]
    inputs = [named.get(n.strip(), n.strip()) for n in input_columns.split(",")]
    if input_columns == "*":
        inputs = [name for name in numbers if name != client_column]
    elif not input_columns and len(images or lists) == 1:
        inputs = images or lists
    usable = set(inputs) <= set(numbers) or inputs in [[name] for name in images]
    allowed = "one column of images, columns of numbers separated by commas, or '*' for"
    allowed += f" all columns of numbers, {listed}"
    require(bool(inputs) and usable, "input-columns", input_columns, allowed)
    return inputs, label


def _labels(
    parts: dict[str, Any], label: str
) -> tuple[dict[str, Values], tuple[str, ...]]:
    """Return the class of each example, and the names of the classes.

    Strings are numbered in the sorted order of their names (see `class_name`); integers
    must be classes from 0.
    """
    together = np.concatenate([_column(parts[part], label) for part in PARTS])
    n = len(parts["train"])
    names, others = (
        tuple(map(str, getattr(parts[part].features[label], "names", None) or ()))
        for part in PARTS
    )
    allowed = f"for testing the same classes as for training, {', '.join(names)}"
    require(names == others, "label-column", label, allowed)
    if together.dtype.kind in "OUS" and all(isinstance(v, str) for v in together):
        texts, codes = np.unique(together.astype(np.str_), return_inverse=True)
        found, numbers = np.unique([*map(class_name, texts)], return_inverse=True)
        names, codes = tuple(map(str, found)), numbers[codes]
    elif together.dtype.kind in "biu" and together.ndim == 1:
        codes = together.astype(np.int64)
        low, high = int(codes.min()), int(codes.max())
        names = names or tuple(map(str, range(high + 1 if high < MAX_CLASSES else 0)))
        allowed = f"integers from 0, below {MAX_CLASSES}"
        require(low >= 0 and bool(names), "label-column", label, allowed)
    else:
        kind = _kind(parts["train"].features[label])
        allowed = f"a column of classes, as integers or strings; its values are {kind}"
        require(False, "label-column", label, f"{allowed}, or some are missing")
    return {"train": codes[:n], "test": codes[n:]}, names


def _numbers(rows: Any, columns: Iterable[str]) -> npt.NDArray[np.float32]:
    """Return columns of numbers, or of lists of equal length, as (n, width)."""
    parts = []
    for column in columns:
        try:
            values = np.stack(list(_column(rows, column))).astype(np.float32)
            parts.append(values.reshape(len(values), -1))
            valid = bool(np.isfinite(values).all())
        # `datasets` itself raises AttributeError on a missing list.
        except (AttributeError, TypeError, ValueError):
            valid = False
        allowed = "a column with a number, or a list of equal length, in every row"
        require(valid, "input-columns", column, allowed)
    return np.concatenate(parts, axis=1)


def _column(rows: Any, name: str) -> Values:
    return np.asarray(rows.select_columns([name]).with_format("numpy")[:][name])


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


def _kind(feature: Any) -> str:
    """Return a short description of a column's type."""
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return f"list of {_kind(inner)}"
    kind = type(feature).__name__
    return str(feature.dtype) if kind == "Value" else kind


def _is_numeric(kind: str) -> bool:
    return kind.rpartition(" ")[2].rstrip("0123456789") in NUMERIC
