"""Tasks of the form ``hf:FOLDER`` for tests."""

from pathlib import Path

from flwr_frl.common.settings import resolve
from flwr_frl.task.tasks import build_task

FLOWER = "flwr_datasets.partitioner:"


def task_of(home: Path, name: str, num_clients: int, cache: Path | None = None, **own):
    """Return the task of a folder or file in ``home``."""
    given = {name.replace("_", "-"): value for name, value in own.items()}
    cache = cache or home / "cache"
    own = {"task": f"hf:{home / name}", "cache-dir": str(cache), **given}
    return build_task(resolve({"partition": "iid", **own}), num_clients)


def by_column(column: str) -> dict[str, str]:
    """Return settings with which each value of a column is a client."""
    return {
        "partition": f"{FLOWER}NaturalIdPartitioner",
        "partitioner-arguments": f"partition_by={column}",
    }
