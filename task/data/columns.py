"""Selection of the input and label columns of a ``datasets`` data set."""

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from flwr_frl.common.settings import SettingsError, require

Values = npt.NDArray[Any]

# Common names of label columns, for data sets without a `ClassLabel` column.
LABEL_NAMES = ("label", "labels", "target", "class")
# Larger integers are probably not classes.
MAX_CLASSES = 100_000
NUMERIC = ("int", "uint", "float", "bool")
# An integer as a program writes it if other cells of its column are empty.
WHOLE = re.compile(r"([+-]?\d+)\.0*")


def choose_columns(
    features: Any, input_columns: str, label_column: str, client_column: str, name: str
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
    name : str
        Name of the data set, for error messages.

    Raises
    ------
    SettingsError
        If a column is missing, ambiguous or of an unsupported type.
    """
    listed = ", ".join(f"{n} ({_kind(feature)})" for n, feature in features.items())
    # Names of columns may contain line breaks.
    listed = " ".join(listed.split())
    choices = f"of the columns of {name!r}: {listed}"
    classes = [n for n, feature in features.items() if _kind(feature) == "ClassLabel"]
    # The header of a CSV file may have blanks around names.
    named = {n.strip(): n for n in features}
    usual = [named[n] for n in LABEL_NAMES if n in named]
    label = named.get(label_column.strip(), label_column)
    if not label and (len(classes) == 1 or (not classes and usual)):
        label = (classes or usual)[0]
    require(label in features, "label-column", label, f"one {choices}")
    rest = {n: feature for n, feature in features.items() if n != label}
    images = [n for n, feature in rest.items() if _kind(feature) == "Image"]
    numbers = [n for n, feature in rest.items() if _is_numeric(feature)]
    lists = [n for n in numbers if type(rest[n]).__name__ != "Value"]
    inputs = [named.get(n.strip(), n.strip()) for n in input_columns.split(",")]
    if input_columns == "*":
        inputs = [n for n in numbers if n != client_column]
    elif not input_columns and len(images or lists) == 1:
        inputs = images or lists
    usable = set(inputs) <= set(numbers) or inputs in [[n] for n in images]
    allowed = (
        "one column of images, columns of numbers separated by commas, or '*' for "
    )
    allowed += f"all columns of numbers, {choices}"
    require(bool(inputs) and usable, "input-columns", input_columns, allowed)
    return inputs, label


def class_name(label: str) -> str:
    """Return the class that a label names: ``1`` for ``1.0``, and without blanks."""
    label = label.strip()
    whole = WHOLE.fullmatch(label)
    return whole[1] if whole else label


def read_labels(
    parts: dict[str, Any], label: str, name: str
) -> tuple[dict[str, Values], tuple[str, ...]]:
    """Return the class of each example, and the names of the classes.

    Strings are numbered in the sorted order of their names (see `class_name`); integers
    must be classes from 0.

    Parameters
    ----------
    parts : dict of str to datasets.Dataset
        The examples for ``train`` and ``test``.
    label : str
        Name of the label column.
    name : str
        Name of the data set, for error messages.

    Raises
    ------
    SettingsError
        If the column has missing values, or values other than classes.
    """
    values = {part: read_column(rows, label) for part, rows in parts.items()}
    together = np.concatenate(list(values.values()))
    kind, place = together.dtype.kind, f"column {label!r} of {name!r}"
    if kind in "OUS" and all(isinstance(value, str) for value in together):
        texts, codes = np.unique(together.astype(np.str_), return_inverse=True)
        names, numbers = np.unique([*map(class_name, texts)], return_inverse=True)
        codes, n = numbers[codes], len(values["train"])
        return {"train": codes[:n], "test": codes[n:]}, tuple(map(str, names))
    feature = parts["train"].features[label]
    if kind not in "biu" or together.ndim > 1:
        raise SettingsError(
            f"{place} holds {_kind(feature)}, or lacks values; it must hold classes, "
            "as integers or strings",
            "label-column",
        )
    low, high = int(together.min()), int(together.max())
    for code in (low, high):
        allowed = f"a class, from 0 to {MAX_CLASSES - 1}"
        require(0 <= code < MAX_CLASSES, place, code, allowed, "label-column")
    labels = {part: codes.astype(np.int64) for part, codes in values.items()}
    return labels, tuple(map(str, getattr(feature, "names", None) or range(high + 1)))


def read_numbers(rows: Any, column: str, name: str) -> npt.NDArray[np.float32]:
    """Return a column of numbers, or of lists of equal length, as (n, width).

    Raises
    ------
    SettingsError
        If lengths differ, or a number is missing or not finite.
    """
    place = f"column {column!r} of {name!r}"
    try:
        values = list(read_column(rows, column))
        x = np.stack(values).astype(np.float32).reshape(len(values), -1)
    # `datasets` itself raises AttributeError on a missing list.
    except (AttributeError, TypeError, ValueError):
        line = f"{place} holds rows of unequal length, or lacks some"
        raise SettingsError(line, "input-columns") from None
    if not np.isfinite(x).all():
        raise SettingsError(f"{place} has rows without a number", "input-columns")
    return np.asarray(x)


def read_column(rows: Any, name: str) -> Values:
    """Return a column as an array."""
    return np.asarray(rows.select_columns([name]).with_format("numpy")[:][name])


def _kind(feature: Any) -> str:
    """Return a short description of a column's type."""
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return f"list of {_kind(inner)}"
    kind = type(feature).__name__
    return str(feature.dtype) if kind == "Value" else kind


def _is_numeric(feature: Any) -> bool:
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _is_numeric(inner)
    kind = str(getattr(feature, "dtype", "")).rstrip("0123456789")
    return kind in NUMERIC and type(feature).__name__ != "ClassLabel"
