"""Tasks of the form ``hf:FOLDER`` for tests."""

from pathlib import Path

import named_tasks


def task_of(home: Path, name: str, num_clients: int, cache: Path | None = None, **own):
    """Return the task of a folder or file in ``home``."""
    place = {"cache-dir": str(cache or home / "cache")}
    named = {"partition": "iid", **place, **named_tasks.dashed(own)}
    return named_tasks.task_of(f"hf:{home / name}", num_clients, **named)
