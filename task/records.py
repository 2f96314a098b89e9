"""Direct access to the entries of Flower's records, without its checks of each one."""

from collections.abc import Mapping
from typing import Any, TypeVar

Record = TypeVar("Record")


def fill(record: Record, entries: Mapping[str, Any]) -> Record:
    """Add entries to one of Flower's records, and return it.

    The entries must be of allowed types. Flower checks each of them, which takes
    longer than all other work on the small messages of a simulation.
    """
    record.__dict__["_data"].update(entries)
    return record


def entries_of(record: Any) -> dict[str, Any]:
    """Return the dictionary inside one of Flower's records. Do not modify it."""
    entries: dict[str, Any] = record.__dict__["_data"]
    return entries
