"""Partitions: which examples of a data set belong to which client.

A partition is a matrix of proportions, classes by clients: entry (c, i) is the share of
class c's examples that client i gets, and each row sums to 1 (or to 0 for a class that
nobody has). Training and test examples are split by the same matrix, so a client's test
set has the mix of its training set, to whole examples. With shards it has its classes
as well; with the others a small share may be a test example and no training example.

The functions of `PARTITIONS` return such a matrix, a float array of shape (num_classes,
num_clients). They take these two numbers, then their own settings (as
`PartitionSettings` explains them) and last, where something is drawn, a generator. They
raise `SettingsError` where the partition is impossible.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from flwr_frl.task.data.partitioners import dealt
from flwr_frl.task.settings import (
    Checked,
    Choice,
    Free,
    Range,
    Seed,
    SettingsError,
    is_path,
    need,
    require,
)

Proportions = npt.NDArray[np.float64]
Indices = list[npt.NDArray[np.int64]]
# Returns a `datasets.Dataset` with what is known of each example, those for training
# first; its size is theirs together.
Columns = Callable[[], Any]


def split(
    labels: npt.NDArray[np.int64], proportions: Proportions, rng: np.random.Generator
) -> Indices:
    """Deal the examples of each class out to the clients by given proportions.

    Parameters
    ----------
    labels : ndarray of int, shape (n,)
        Class of each example.
    proportions : ndarray of float, shape (classes, clients)
        Share of each class that each client gets.
    rng : numpy.random.Generator
        Decides which examples of a class a client gets.

    Returns
    -------
    list of ndarray of int
        For each client the indices of its examples, ascending. Clients are disjoint;
        every example of a class that somebody has belongs to one client.
    """
    parts: list[Indices] = [[] for _ in range(proportions.shape[1])]
    order = np.argsort(labels, kind="stable")
    bounds = np.searchsorted(labels[order], np.arange(len(proportions) + 1))
    for c, shares in enumerate(proportions):
        examples = rng.permutation(order[bounds[c] : bounds[c + 1]])
        holders = np.flatnonzero(shares)
        # Rounding the cumulative sum keeps equal shares within one example.
        exact = np.cumsum(shares[holders]) * len(examples)
        if not np.allclose(exact, np.rint(exact)):
            # What is left over shall not go to the same clients in every class.
            holders = np.roll(holders, c)
            exact = np.cumsum(shares[holders]) * len(examples)
        cuts = np.rint(exact).astype(np.int64)
        for i, part in zip(holders, np.split(examples, cuts[:-1]), strict=False):
            parts[i].append(part)
    empty = np.zeros(0, dtype=np.int64)
    return [np.sort(np.concatenate(part)) if part else empty for part in parts]


def shards(
    num_classes: int, num_clients: int, per_client: int, rng: np.random.Generator
) -> Proportions:
    """Return equal shards as the authors of FedRep and FLUTE deal them out.

    Every class is cut into ``num_clients * S / num_classes`` shards of equal size, and
    each client draws S of them (``per_client``). It may draw two of the same class, so
    some have fewer classes than S. S is at most the number of classes, of which
    ``num_clients * S`` must be a multiple.
    """
    copies = _shards_per_class(num_classes, num_clients, per_client)
    drawn = rng.permutation(np.repeat(np.arange(num_classes), copies))
    return _count(drawn.reshape(num_clients, per_client), num_classes) / copies


def distinct_shards(
    num_classes: int, num_clients: int, per_client: int, rng: np.random.Generator
) -> Proportions:
    """Return equal shards with exactly S different classes per client.

    As `shards`, but each client's shards are of different classes: the clients choose
    in turn, at random among the classes of which most shards are left.
    """
    copies = _shards_per_class(num_classes, num_clients, per_client)
    left = np.full(num_classes, copies)
    drawn = np.empty((num_clients, per_client), dtype=np.int64)
    for i in range(num_clients):
        # Taking the fullest classes keeps every later choice possible.
        fullest = np.lexsort((rng.random(num_classes), -left))[:per_client]
        left[fullest] -= 1
        drawn[i] = fullest
    return _count(rng.permutation(drawn), num_classes) / copies


def _shards_per_class(num_classes: int, num_clients: int, per_client: int) -> int:
    require(
        1 <= per_client <= num_classes,
        "classes-per-client",
        per_client,
        f"from 1 to {num_classes}, the number of classes",
    )
    copies, rest = divmod(num_clients * per_client, num_classes)
    if rest or copies == 0:
        step = num_classes // int(np.gcd(num_classes, per_client))
        lower = num_clients // step * step
        near = f"{lower} or {lower + step}" if lower else f"{step}"
        raise SettingsError(
            f"num-clients is {num_clients}: {num_clients} x {per_client} classes per "
            f"client are no multiple of {num_classes} classes, so shards cannot be "
            f"equal; the nearest that work: {near} clients"
        )
    return copies


def _count(drawn: npt.NDArray[np.int64], num_classes: int) -> Proportions:
    counts = np.zeros((num_classes, len(drawn)))
    np.add.at(counts, (drawn, np.arange(len(drawn))[:, None]), 1)
    return counts


def dirichlet(
    num_classes: int, num_clients: int, alpha: float, rng: np.random.Generator
) -> Proportions:
    """Return each class's proportions drawn from a symmetric Dirichlet distribution.

    Its concentration alpha, above 0, is small for uneven proportions.
    """
    return rng.dirichlet(np.full(num_clients, alpha), num_classes)


def log_normal(
    num_classes: int,
    num_clients: int,
    per_client: int,
    sigma: float,
    rng: np.random.Generator,
) -> Proportions:
    """Return S different classes per client and log-normal sizes (FedRep's FEMNIST).

    The clients of a class share its examples in proportion to their weights; sigma is
    the standard deviation of the logarithm of a client's weight, at least 0.
    """
    held = distinct_shards(num_classes, num_clients, per_client, rng) > 0
    weights = held * rng.lognormal(0.0, sigma, num_clients)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def iid(num_classes: int, num_clients: int) -> Proportions:
    """Return equal proportions of every class."""
    return np.full((num_classes, num_clients), 1 / num_clients)


def class_groups(num_classes: int, num_clients: int) -> Proportions:
    """Return three groups of clients, each with its own third of the classes.

    Within a group all is even (SRPFL, appendix C, "correlated heterogeneity"). There
    must be at least 3 classes and 3 clients.
    """
    require(num_clients >= 3, "num-clients", num_clients, "at least 3")
    require(num_classes >= 3, "num-classes", num_classes, "at least 3")
    group_of_class = np.arange(num_classes) * 3 // num_classes
    group_of_client = np.arange(num_clients) * 3 // num_clients
    together = group_of_class[:, None] == group_of_client
    return np.asarray(together / together.sum(axis=1, keepdims=True))


# Each with the names of the settings that it takes as arguments.
PARTITIONS: dict[str, tuple[Callable[..., Proportions], tuple[str, ...]]] = {
    "shards": (shards, ("classes_per_client",)),
    "distinct-shards": (distinct_shards, ("classes_per_client",)),
    "dirichlet": (dirichlet, ("dirichlet_alpha",)),
    "log-normal": (log_normal, ("classes_per_client", "size_sigma")),
    "class-groups": (class_groups, ()),
    "iid": (iid, ()),
}
# Those that draw nothing at random.
FIXED = ("class-groups", "iid")


class NameOrPath(Choice):
    """One of some names, or the import path of somebody's own."""

    def permits(self, value: Any) -> bool:
        """Return whether a value is one of them, or has the form of a path."""
        return super().permits(value) or is_path(value)

    def __str__(self) -> str:
        return str(Choice(*self.names, "package.module:Class"))


@dataclass(frozen=True)
class PartitionSettings(Checked):
    """How a data set is split over the clients.

    Parameters
    ----------
    seed : int, default 0
        Fixes the partition, the initial model and all that is drawn in training.
    partition : str, default "shards"
        ``shards``: equal shards as the authors of FedRep and FLUTE deal them out (a
        client can draw a class twice); ``distinct-shards``: exactly so many classes;
        ``dirichlet``; ``log-normal`` sizes (FedRep's FEMNIST); ``class-groups``: three
        groups, each with its own classes (SRPFL, appendix C); ``iid``; or the import
        path of a partitioner of ``flwr-datasets``
        (``flwr_datasets.partitioner:NaturalIdPartitioner``) or of one like them.
    partitioner_arguments : str, default ""
        Its arguments, ``partition_by=writer_id alpha=0.3``, besides ``num_partitions``
        and ``seed``, which are ours unless they stand here. Tasks that are no ``hf:``
        have the one column ``label``.
    classes_per_client : int, default 2
        S, the shards or classes of each client.
    dirichlet_alpha : float, default 0.5
        Concentration α of ``dirichlet``: small is uneven, large is even.
    size_sigma : float, default 1
        Standard deviation of the logarithm of a client's weight in ``log-normal``.
    test_partition : {"same", "all"}, default "same"
        ``same`` splits the test examples as the training examples; with ``all`` every
        client tests on all of them.
    """

    seed: Annotated[int, Seed] = 0
    partition: Annotated[str, NameOrPath(*PARTITIONS)] = "shards"
    partitioner_arguments: Annotated[str, Free("name=value ...")] = ""
    classes_per_client: Annotated[int, Range("[1, inf)")] = 2
    dirichlet_alpha: Annotated[float, Range("(0, inf)")] = 0.5
    size_sigma: Annotated[float, Range("[0, inf)")] = 1.0
    test_partition: Annotated[str, Choice("same", "all")] = "same"

    def idle(self) -> dict[str, str]:
        """Return by name the settings that this partition does not use, and why."""
        taken = {name for _, names in PARTITIONS.values() for name in names}
        taken |= {"partitioner_arguments"}
        path = ((), ("partitioner_arguments",))
        taken -= set(PARTITIONS.get(self.partition, path)[1])
        reason = f"partition {self.partition!r} does not use it"
        return {name.replace("_", "-"): reason for name in sorted(taken)}


def partition(
    train_labels: npt.NDArray[np.int64],
    test_labels: npt.NDArray[np.int64],
    num_classes: int,
    num_clients: int,
    settings: PartitionSettings,
    columns: Columns | None = None,
) -> tuple[Indices, Indices]:
    """Split training and test examples over the clients as the settings say.

    Parameters
    ----------
    train_labels, test_labels : ndarray of int
        Class of each example.
    num_classes, num_clients : int
        How many there are.
    settings : PartitionSettings
        How.
    columns : callable, optional
        For somebody's own partitioner; by default it sees the labels alone.

    Returns
    -------
    train, test : list of ndarray of int
        Indices of each client's examples.

    Raises
    ------
    SettingsError
        If the partition is impossible, or leaves a client without training
        examples.
    """
    name = settings.partition
    require(num_clients >= 1, "num-clients", num_clients, "at least 1")
    allowed = f"at most {len(train_labels):,}, the number of training examples"
    require(num_clients <= len(train_labels), "num-clients", num_clients, allowed)
    rng = np.random.default_rng([settings.seed, 0x9A27])
    if is_path(name):
        labels = np.concatenate([train_labels, test_labels])
        known = columns() if columns else _labels_alone(labels)
        arguments = settings.partitioner_arguments
        parts = dealt(name, arguments, known, num_clients, settings.seed)
        # A client is tested on what it would have trained on, were it not for testing.
        n = len(train_labels)
        train = [part[part < n] for part in parts]
        test = [part[part >= n] - n for part in parts]
    else:
        function, names = PARTITIONS[name]
        values = [getattr(settings, argument) for argument in names]
        if name not in FIXED:
            values.append(rng)
        proportions = function(num_classes, num_clients, *values)
        train = split(train_labels, proportions, rng)
        test = split(test_labels, proportions, rng)
    if settings.test_partition == "all":
        test = [np.arange(len(test_labels))] * num_clients
    empty = [i for i, part in enumerate(train) if len(part) == 0]
    if empty:
        raise SettingsError(
            f"partition {name!r} leaves {len(empty)} of {num_clients} clients without "
            f"training examples (the first: client {empty[0]}); use fewer clients"
        )
    return train, test


def _labels_alone(labels: npt.NDArray[np.int64]) -> Any:
    need("datasets", "hf", "a partitioner by its import path")
    from datasets import Dataset

    return Dataset.from_dict({"label": labels})
