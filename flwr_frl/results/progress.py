"""Descriptions of a run's progress: its last row and the remaining time."""

from collections.abc import Sequence
from itertools import islice

from flwr_frl.results.results import Row, quality


def describe(row: Row, evaluated_on: str) -> str:
    """Return the training loss and the quality in a row, as part of a line."""
    parts = []
    if row.get("train-loss") is not None:
        parts.append(f"train loss {row['train-loss']:.4g}")
    name = quality(row)
    if row.get(name) is not None:
        form = "{:.2%}" if name == "accuracy" else "{:.4g}"
        # Distinguishes the loss of an evaluation from the training loss.
        label = f"{evaluated_on} loss" if name == "loss" else name
        parts.append(f"{label} {form.format(row[name])}")
    return ", ".join(parts)


def seconds_left(rows: Sequence[Row], rounds: int) -> float | None:
    """Estimate the remaining time of a run from its last ten rounds, in seconds.

    Returns None before the second round and after the last one.
    """
    timed = (row for row in reversed(rows) if row.get("seconds") is not None)
    recent = list(islice(timed, 11))[::-1]
    if len(recent) < 2 or (left := rounds - recent[-1]["round"]) <= 0:
        return None
    done = recent[-1]["round"] - recent[0]["round"]
    seconds: float = (recent[-1]["seconds"] - recent[0]["seconds"]) * left / done
    return max(0.0, seconds)


def duration(seconds: float) -> str:
    """Format a time in its two largest units: ``3 h 20 min``."""
    rest, parts = round(seconds), []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        parts.append(f"{count} {unit}" if count else "")
    first = next((i for i, part in enumerate(parts) if part), 0)
    return " ".join(filter(None, parts[first : first + 2])) or "0 s"
