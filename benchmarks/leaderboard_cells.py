"""The cells of ``benchmarks/leaderboard.py``: images, partitions and their seeds."""

import contextlib
import shutil
from pathlib import Path

from flwr_frl.common.settings import Setting, SettingsError
from flwr_frl.task.data.folders import ImageFolder
from flwr_frl.task.data.partitions import PartitionSettings, partition

# Training examples that each client must have; with fewer, no batch is full. The seeds
# of Dirichlet partitions are chosen accordingly.
LEAST_EXAMPLES = 10


def subset(data_dir: Path, place: Path, train: int, test: int) -> Path:
    """Return a folder of links to the first images of each class, by name."""
    folder = place / f"images-{train}-{test}"
    if folder.is_dir():
        return folder
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    for part, count in (("train", train), ("test", test)):
        for source in sorted((data_dir / part).iterdir()):
            (partial / part / source.name).mkdir(parents=True)
            for image in sorted(source.iterdir())[:count]:
                link = partial / part / source.name / image.name
                link.symlink_to(image.resolve())
    return partial.rename(folder)


def partition_of(cell: str) -> dict[str, Setting]:
    """Return the settings of a cell's partition."""
    kind, _, number = cell.rpartition("-")
    if kind == "shards":
        return {"partition": kind, "classes-per-client": int(number)}
    if kind == "dirichlet":
        return {"partition": kind, "dirichlet-alpha": float(number)}
    raise SettingsError(f"cell {cell!r}; expected shards-S or dirichlet-ALPHA")


def usable_seeds(folder: ImageFolder, cell: str, clients: int, count: int) -> list[int]:
    """Return the first seeds that leave every client enough images.

    This is common practice for Dirichlet partitions, which may leave a client almost no
    images.
    """
    own = {n.replace("-", "_"): v for n, v in partition_of(cell).items()}
    labels = folder.labels("train"), folder.labels("test")
    found: list[int] = []
    for seed in range(1000):
        settings = PartitionSettings(seed=seed, **own)
        with contextlib.suppress(SettingsError):
            train, test, _ = partition(*labels, clients, settings)
            if min(map(len, train)) >= LEAST_EXAMPLES and min(map(len, test)) >= 1:
                found.append(seed)
        if len(found) == count:
            return found
    raise SettingsError(f"cell {cell!r}: only {len(found)} of 1000 seeds can be used")
