"""Partitions of a data set over clients.

A built-in partition is a matrix of proportions, of shape (num_classes, num_clients):
entry (c, i) is the fraction of class c's examples that client i gets. Rows sum to 1, or
to 0 for classes that no client has. Training and test examples are split by the same
matrix, so that a client's test set has the class mix of its training set, up to
rounding. With shards, both have the same classes; with other partitions, a small
proportion may give a client a test example of a class but no training example.

The functions in `PARTITIONS` return such a matrix for the numbers of classes and of
clients, the settings and a generator. They raise `SettingsError` if the partition is
impossible.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from flwr_frl.common.errors import reading, require
from flwr_frl.common.settings import Checked, checked_by, is_path, load, setting
from flwr_frl.task.data.datasets import Dataset

Proportions = npt.NDArray[np.float64]
Indices = list[npt.NDArray[np.int64]]
Rng = np.random.Generator
# The partition whose groups of clients have permuted labels.
CLUSTERED = "clustered"


def split(labels: npt.NDArray[np.int64], proportions: Proportions, rng: Rng) -> Indices:
    """Distribute the examples of each class over the clients.

    Parameters
    ----------
    labels : ndarray of int, shape (n,)
        Class of each example.
    proportions : ndarray of float, shape (classes, clients)
        Fraction of each class that each client gets.
    rng : numpy.random.Generator
        Shuffles the examples of each class.

    Returns
    -------
    list of ndarray of int
        Ascending indices of each client's examples. Clients are disjoint, and together
        have all examples of every class with proportions above 0.
    """
    parts: list[Indices] = [[] for _ in range(proportions.shape[1])]
    order = np.argsort(labels, kind="stable")
    bounds = np.searchsorted(labels[order], np.arange(len(proportions) + 1))
    for c, shares in enumerate(proportions):
        examples = rng.permutation(order[bounds[c] : bounds[c + 1]])
        holders = np.flatnonzero(shares)
        # Rounding cumulative sums keeps equal proportions within one example.
        exact = np.cumsum(shares[holders]) * len(examples)
        if not np.allclose(exact, np.rint(exact)):
            # Rounding must not favour the same clients in every class.
            holders = np.roll(holders, c)
            exact = np.cumsum(shares[holders]) * len(examples)
        cuts = np.rint(exact).astype(np.int64)
        for i, part in zip(holders, np.split(examples, cuts[:-1]), strict=False):
            parts[i].append(part)
    empty = np.zeros(0, dtype=np.int64)
    return [np.sort(np.concatenate(part)) if part else empty for part in parts]


def shards(classes: int, clients: int, s: "PartitionSettings", rng: Rng) -> Proportions:
    """Return equal shards, as in the code of FedRep and FLUTE.

    Every class is cut into ``clients * S / classes`` shards of equal size, and each
    client draws S of them (``classes_per_client``). Since it may draw several shards of
    a class, it may have fewer than S classes. S is at most the number of classes, and
    ``clients * S`` must be a multiple of the number of classes.
    """
    copies = _shards_per_class(classes, clients, s.classes_per_client)
    drawn = rng.permutation(np.repeat(np.arange(classes), copies))
    return _count(drawn.reshape(clients, -1), classes) / copies


def distinct_shards(
    classes: int, clients: int, s: "PartitionSettings", rng: Rng
) -> Proportions:
    """Return equal shards of exactly S different classes per client.

    Unlike with `shards`, a client's shards belong to different classes: clients choose
    in turn the classes with the most remaining shards, and at random among equals.
    """
    copies = _shards_per_class(classes, clients, s.classes_per_client)
    left = np.full(classes, copies)
    drawn = np.empty((clients, s.classes_per_client), dtype=np.int64)
    for i in range(clients):
        # Choosing the most frequent classes keeps all later choices possible.
        fullest = np.lexsort((rng.random(classes), -left))[: s.classes_per_client]
        left[fullest] -= 1
        drawn[i] = fullest
    return _count(rng.permutation(drawn), classes) / copies


def _shards_per_class(classes: int, clients: int, per_client: int) -> int:
    allowed = f"from 1 to {classes}, the number of classes"
    require(1 <= per_client <= classes, "classes-per-client", per_client, allowed)
    step = classes // int(np.gcd(classes, per_client))
    allowed = f"a multiple of {step} for equal shards of {classes} classes"
    require(clients % step == 0, "num-clients", clients, allowed)
    return clients * per_client // classes


def _count(drawn: npt.NDArray[np.int64], classes: int) -> Proportions:
    counts = np.zeros((classes, len(drawn)))
    np.add.at(counts, (drawn, np.arange(len(drawn))[:, None]), 1)
    return counts


def dirichlet(
    classes: int, clients: int, s: "PartitionSettings", rng: Rng
) -> Proportions:
    """Draw the proportions of each class from a symmetric Dirichlet distribution.

    Small values of its concentration ``dirichlet_alpha`` give uneven proportions.
    """
    return rng.dirichlet(np.full(clients, s.dirichlet_alpha), classes)


def log_normal(
    classes: int, clients: int, s: "PartitionSettings", rng: Rng
) -> Proportions:
    """Return S different classes per client, and log-normal sizes (FedRep's FEMNIST).

    The clients of a class share its examples in proportion to their weights;
    ``size_sigma`` is the standard deviation of the logarithm of a weight.
    """
    held = distinct_shards(classes, clients, s, rng) > 0
    weights = held * rng.lognormal(0.0, s.size_sigma, clients)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def iid(classes: int, clients: int, s: "PartitionSettings", rng: Rng) -> Proportions:
    """Return equal proportions of every class."""
    return np.full((classes, clients), 1 / clients)


def class_groups(
    classes: int, clients: int, s: "PartitionSettings", rng: Rng
) -> Proportions:
    """Return three groups of clients with a third of the classes each.

    Proportions within a group are equal (SRPFL, appendix C, "correlated
    heterogeneity"). At least 3 classes and 3 clients are required.
    """
    require(clients >= 3, "num-clients", clients, "at least 3")
    require(classes >= 3, "num-classes", classes, "at least 3")
    group_of_class = np.arange(classes) * 3 // classes
    together = group_of_class[:, None] == (np.arange(clients) * 3 // clients)
    return np.asarray(together / together.sum(axis=1, keepdims=True))


def clustered(
    classes: int, clients: int, s: "PartitionSettings", rng: Rng
) -> Proportions:
    """Return equal proportions of every class, for clients in ``label_groups`` groups.

    The groups differ in the meaning of the labels (`PartitionSettings.label_shift`),
    not in the mix of classes. There must be at most as many groups as classes and as
    clients.
    """
    allowed = f"at most {min(classes, clients)}, the number of classes or of clients"
    valid = s.label_groups <= min(classes, clients)
    require(valid, "label-groups", s.label_groups, allowed)
    return iid(classes, clients, s, rng)


PARTITIONS: dict[str, Callable[..., Proportions]] = {
    "shards": shards,
    "distinct-shards": distinct_shards,
    "dirichlet": dirichlet,
    "log-normal": log_normal,
    "class-groups": class_groups,
    "iid": iid,
    CLUSTERED: clustered,
}


def _without(*names: str) -> dict[str, tuple[str, ...]]:
    """Return the partitions with which a setting of the named ones has no effect."""
    return {"partition": tuple(name for name in PARTITIONS if name not in names)}


PartitionName = Annotated[str, checked_by(lambda n: n in PARTITIONS or is_path(n))]


@dataclass(frozen=True)
class PartitionSettings(Checked):
    """Partition of a data set over the clients.

    Parameters
    ----------
    seed : int, default 0
        Seed of the partition, the initial model and all randomness in training.
    partition : str, default "shards"
        ``shards``: equal shards, as in the code of FedRep and FLUTE; a client may draw
        a class twice. ``distinct-shards``: equal shards of exactly
        ``classes-per-client`` classes. ``dirichlet``: proportions drawn from a
        Dirichlet distribution. ``log-normal``: sizes as in FedRep's FEMNIST.
        ``class-groups``: three groups of clients with different classes (SRPFL,
        appendix C). ``iid``: equal proportions. ``clustered``: as ``iid``, but in
        ``label-groups`` groups of clients, each of which has permuted labels. Or the
        import path of a function ``(labels, num_clients, seed)`` that returns the rows
        of each client; ``labels`` has the training examples before the test examples.
    classes_per_client : int, default 2
        Number S of shards or classes per client.
    dirichlet_alpha : float, default 0.5
        Concentration α of ``dirichlet``; small values give uneven proportions.
    size_sigma : float, default 1
        Standard deviation of the logarithm of a client's weight in ``log-normal``.
    label_groups : int, default 4
        Number of groups of clients in ``clustered``, at most the numbers of classes and
        of clients.
    test_partition : {"same", "all"}, default "same"
        ``same`` splits test examples like training examples; with ``all``, every client
        is tested on all test examples.
    client_examples : int, default 0
        Largest number of training examples of a client; 0 sets no limit. Test examples
        are not limited. SRPFL's FEMNIST uses 150, or 100 with a spread of 50.
    client_examples_spread : int, default 0
        A random number up to this one is added to ``client-examples`` for each client.
    """

    seed: int = setting(0, ge=0)
    partition: PartitionName = setting(
        "shards", form=f"{', '.join(PARTITIONS)} or package.module:function", code=True
    )
    classes_per_client: int = setting(
        2, ge=1, unused_if=_without("shards", "distinct-shards", "log-normal")
    )
    dirichlet_alpha: float = setting(0.5, gt=0, unused_if=_without("dirichlet"))
    size_sigma: float = setting(1.0, ge=0, le=100, unused_if=_without("log-normal"))
    label_groups: int = setting(4, ge=1, unused_if=_without(CLUSTERED))
    test_partition: Literal["same", "all"] = setting("same")
    client_examples: int = setting(0, ge=0)
    client_examples_spread: int = setting(0, ge=0)

    def label_shift(self, client: int, num_clients: int) -> int:
        """Return the number that is added to a client's labels, modulo the classes.

        Only ``clustered`` changes labels, of training and test examples alike: group g
        of the label groups sees y + g mod C. Groups are contiguous and nearly equal,
        and group 0 has the original labels. No two groups agree on the label of any
        example, so a single model cannot fit two groups. IFCA (Ghosh et al., NeurIPS
        2020) and FedAMP (Huang et al., AAAI 2021) are designed for clients with
        conflicting labels; IFCA's own experiments rotate the images instead.
        """
        is_clustered = self.partition == CLUSTERED
        return client * self.label_groups // num_clients if is_clustered else 0


def partition(
    dataset: Dataset, num_clients: int, settings: PartitionSettings
) -> tuple[Indices, Indices]:
    """Split training and test examples over the clients.

    Parameters
    ----------
    dataset : Dataset
        The examples. Classes that do not occur have no part in the partition. If it is
        already split, client i is the i-th of its clients.
    num_clients : int
        Number of clients; 0 gives client 0 the whole data set, as on a device with its
        own data set.
    settings : PartitionSettings
        The partition and its parameters.

    Returns
    -------
    train, test : list of ndarray of int
        Indices of each client's examples in the two sets.

    Raises
    ------
    SettingsError
        If the partition is impossible, or leaves a client without training examples.
    """
    if num_clients == 0:
        return [np.arange(len(dataset.train))], [np.arange(len(dataset.test))]
    name, n = settings.partition, len(dataset.train)
    allowed = f"at most {n:,}, the number of training examples"
    require(num_clients <= n, "num-clients", num_clients, allowed)
    rng = np.random.default_rng([settings.seed, 0x9A27])
    labels = np.concatenate([dataset.train.labels, dataset.test.labels])
    if dataset.clients:
        allowed = f"at most {len(dataset.clients)}, the clients that the data has"
        enough = num_clients <= len(dataset.clients)
        require(enough, "num-clients", num_clients, allowed)
        parts = (dataset.train, dataset.test)
        train, test = (_by_owner(part.owners, num_clients) for part in parts)
    elif is_path(name):
        rows = _imported(name, labels, num_clients, settings.seed)
        # All examples are partitioned at once, so that a client's training and test
        # examples have the same distribution.
        train = [part[part < n] for part in rows]
        test = [part[part >= n] - n for part in rows]
    else:
        present, places = np.unique(labels, return_inverse=True)
        proportions = PARTITIONS[name](len(present), num_clients, settings, rng)
        train = split(places[:n], proportions, rng)
        test = split(places[n:], proportions, rng)
    if settings.test_partition == "all":
        test = [np.arange(len(dataset.test))] * num_clients
    if empty := [i for i, part in enumerate(train) if len(part) == 0]:
        first = dataset.clients[empty[0]] if dataset.clients else empty[0]
        allowed = f"fewer, or a less uneven partition: {len(empty)} clients have no "
        allowed += f"training examples, the first is client {first}"
        require(False, "num-clients", num_clients, allowed)
    if settings.client_examples:
        rng = np.random.default_rng([settings.seed, 0x51CE])
        added = rng.integers(settings.client_examples_spread + 1, size=num_clients)
        pairs = zip(train, settings.client_examples + added, strict=True)
        train = [np.sort(rng.permutation(part)[:size]) for part, size in pairs]
    return train, test


def _by_owner(owners: npt.NDArray[np.int64] | None, count: int) -> Indices:
    """Return the ascending indices of the examples of the first ``count`` owners."""
    order = np.argsort(np.asarray(owners), kind="stable")
    bounds = np.searchsorted(np.asarray(owners)[order], np.arange(count + 1))
    return [order[start:end] for start, end in pairwise(bounds)]


def _imported(
    path: str, labels: npt.NDArray[np.int64], num_clients: int, seed: int
) -> Indices:
    """Return the ascending rows that a custom function gives to each client."""
    function = load(path, "partition")
    require(callable(function), "partition", path, "a function")
    clients = function(labels, num_clients, seed)
    with reading(f"the result of {path}", "partition", "a list of rows a client"):
        rows = [np.sort(np.asarray(part, np.int64)) for part in clients]
    every, counts = np.unique(np.concatenate([*rows, []]), return_counts=True)
    in_range = np.isin(every, np.arange(len(labels))).all()
    valid = len(rows) == num_clients and in_range and (counts == 1).all()
    allowed = f"a function that returns {num_clients} lists of rows below {len(labels)}"
    require(bool(valid), "partition", path, f"{allowed}, each row in at most one")
    return rows
