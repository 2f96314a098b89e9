"""Which columns of a data set are inputs and labels, and what is in them."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flwr_frl.task.settings import SettingsError, require

Values = npt.NDArray[Any]

# Label columns by their names, where no column names its classes.
USUAL = ("label", "labels", "target", "class")
# More are hardly classes.
MAX_CLASSES = 100_000
NUMBERS = ("int", "uint", "float", "bool")


class Named(Protocol):
    """The settings that name columns."""

    @property
    def input_columns(self) -> str:
        """With commas between."""

    @property
    def label_column(self) -> str:
        """One."""


def choose(features: Any, own: Named, name: str) -> tuple[list[str], str]:
    """Return the columns of inputs and the one of labels.

    Parameters
    ----------
    features : datasets.Features
        All columns with their types.
    own : Named
        What is set.
    name : str
        Of the data set, for errors.

    Raises
    ------
    SettingsError
        If they are not named, and not clear, or are not of the right type.
    """
    listed = ", ".join(f"{n} ({_kind(feature)})" for n, feature in features.items())
    # A column may be called anything.
    listed = " ".join(listed.split())
    known = f"of the columns of {name!r}: {listed}"
    classes = [n for n, feature in features.items() if _kind(feature) == "ClassLabel"]
    usual = [n for n in USUAL if n in features]
    label = own.label_column
    if not label and (len(classes) == 1 or (not classes and usual)):
        label = (classes or usual)[0]
    require(label in features, "label-column", label, f"one {known}")
    rest = {n: feature for n, feature in features.items() if n != label}
    images = [n for n, feature in rest.items() if _kind(feature) == "Image"]
    numbers = [n for n, feature in rest.items() if _is_numeric(feature)]
    lists = [n for n in numbers if type(rest[n]).__name__ != "Value"]
    inputs = [n.strip() for n in own.input_columns.split(",")]
    if own.input_columns == "*":
        inputs = numbers
    elif not own.input_columns and len(images or lists) == 1:
        inputs = images or lists
    usable = set(inputs) <= set(numbers) or inputs in [[n] for n in images]
    allowed = f"one with images or those with numbers, {known}"
    require(bool(inputs) and usable, "input-columns", own.input_columns, allowed)
    return inputs, label


def classes_of(
    parts: dict[str, Any], label: str, name: str
) -> tuple[dict[str, Values], tuple[str, ...]]:
    """Return the class of each example of both parts, and the names of all classes.

    Texts are numbered in their order, integers are from 0.

    Raises
    ------
    SettingsError
        If there is anything else in the column.
    """
    values = {part: column(rows, label) for part, rows in parts.items()}
    together = np.concatenate(list(values.values()))
    kind, what = together.dtype.kind, f"column {label!r} of {name!r}"
    if kind in "OUS" and all(isinstance(value, str) for value in together):
        names, codes = np.unique(together.astype(np.str_), return_inverse=True)
        n = len(values["train"])
        return {"train": codes[:n], "test": codes[n:]}, tuple(map(str, names))
    feature = parts["train"].features[label]
    if kind not in "biu" or together.ndim > 1:
        raise SettingsError(
            f"{what} holds {_kind(feature)}, or lacks values; it must hold classes, as "
            "integers or texts"
        )
    low, high = int(together.min()), int(together.max())
    for code in (low, high):
        allowed = f"a class, from 0 to {MAX_CLASSES - 1}"
        require(0 <= code < MAX_CLASSES, what, code, allowed)
    known = getattr(feature, "names", None) or range(high + 1)
    labels = {part: own.astype(np.int64) for part, own in values.items()}
    return labels, tuple(map(str, known))


def numbers_of(rows: Any, own: str, name: str) -> npt.NDArray[np.float32]:
    """Return a column of numbers, or of lists of equal length, as (n, width).

    Raises
    ------
    SettingsError
        If it has not the same number of numbers in each row.
    """
    what = f"column {own!r} of {name!r}"
    try:
        values = list(column(rows, own))
        x = np.stack(values).astype(np.float32).reshape(len(values), -1)
    # `datasets` itself stumbles over a list that is missing.
    except (AttributeError, TypeError, ValueError):
        line = f"{what} holds rows of unequal length, or lacks some"
        raise SettingsError(line) from None
    missing = np.flatnonzero(~np.isfinite(x).all(axis=1))
    if len(missing):
        raise SettingsError(f"{what} has no number in row {missing[0]}")
    return np.asarray(x)


def column(rows: Any, name: str) -> Values:
    """Return a column as an array."""
    return np.asarray(rows.select_columns([name]).with_format("numpy")[:][name])


def _kind(feature: Any) -> str:
    """Return a column's type in a word or two."""
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
    return kind in NUMBERS and type(feature).__name__ != "ClassLabel"
