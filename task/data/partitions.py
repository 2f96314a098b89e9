"""Partitions: which examples of a data set belong to which client.

A partition is a matrix of proportions, classes by clients: entry (c, i) is the share of
class c's examples that client i gets, and each row sums to 1 (or to 0 for a class that
nobody has). Training and test examples are split by the same matrix, so a client's test
set has the classes and the mix of its training set.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from task.settings import Settings, SettingsError, require, unknown

Proportions = npt.NDArray[np.float64]
Indices = list[npt.NDArray[np.int64]]


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

    Every class is cut into ``num_clients * per_client / num_classes`` shards of equal
    size, and each client draws ``per_client`` shards. A client may draw two of the same
    class, so some have fewer classes than ``per_client``; see `classes`.

    Parameters
    ----------
    num_classes, num_clients : int
        How many there are.
    per_client : int
        Shards per client, S.
    rng : numpy.random.Generator
        Shuffles the shards.

    Returns
    -------
    ndarray of float, shape (num_classes, num_clients)
        The proportions.

    Raises
    ------
    SettingsError
        If S is larger than the number of classes or the shards cannot be equal.
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

    Parameters
    ----------
    num_classes, num_clients : int
        How many there are.
    per_client : int
        Classes per client, S.
    rng : numpy.random.Generator
        Breaks the ties.

    Returns
    -------
    ndarray of float, shape (num_classes, num_clients)
        The proportions.

    Raises
    ------
    SettingsError
        As `shards`.
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

    Parameters
    ----------
    num_classes, num_clients : int
        How many there are.
    alpha : float
        Concentration, > 0: small is uneven, large is even.
    rng : numpy.random.Generator
        Draws the proportions.

    Returns
    -------
    ndarray of float, shape (num_classes, num_clients)
        The proportions.
    """
    require(alpha > 0, "dirichlet-alpha", alpha, "greater than 0")
    return rng.dirichlet(np.full(num_clients, alpha), num_classes)


def log_normal(
    num_classes: int,
    num_clients: int,
    per_client: int,
    sigma: float,
    rng: np.random.Generator,
) -> Proportions:
    """Return S different classes per client and log-normal sizes (FedRep's FEMNIST).

    Parameters
    ----------
    num_classes, num_clients : int
        How many there are.
    per_client : int
        Classes per client, S.
    sigma : float
        Standard deviation of the logarithm of a client's weight, >= 0. The clients of a
        class share its examples in proportion to their weights.
    rng : numpy.random.Generator
        Draws weights and classes.

    Returns
    -------
    ndarray of float, shape (num_classes, num_clients)
        The proportions.
    """
    require(sigma >= 0, "size-sigma", sigma, "at least 0")
    held = distinct_shards(num_classes, num_clients, per_client, rng) > 0
    weights = held * rng.lognormal(0.0, sigma, num_clients)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def iid(num_classes: int, num_clients: int) -> Proportions:
    """Return equal proportions of every class.

    Parameters
    ----------
    num_classes, num_clients : int
        How many there are.

    Returns
    -------
    ndarray of float, shape (num_classes, num_clients)
        The proportions.
    """
    return np.full((num_classes, num_clients), 1 / num_clients)


def class_groups(num_classes: int, num_clients: int) -> Proportions:
    """Return three groups of clients, each with its own third of the classes.

    Within a group all is even (SRPFL, appendix C, "correlated heterogeneity").

    Parameters
    ----------
    num_classes, num_clients : int
        How many there are; at least 3 each.

    Returns
    -------
    ndarray of float, shape (num_classes, num_clients)
        The proportions.
    """
    require(num_clients >= 3, "num-clients", num_clients, "at least 3")
    require(num_classes >= 3, "num-classes", num_classes, "at least 3")
    group_of_class = np.arange(num_classes) * 3 // num_classes
    group_of_client = np.arange(num_clients) * 3 // num_clients
    together = group_of_class[:, None] == group_of_client
    return np.asarray(together / together.sum(axis=1, keepdims=True))


PARTITIONS: dict[
    str, Callable[[int, int, Settings, np.random.Generator], Proportions]
] = {
    "shards": lambda c, n, s, rng: shards(c, n, int(s["classes-per-client"]), rng),
    "distinct-shards": lambda c, n, s, rng: distinct_shards(
        c, n, int(s["classes-per-client"]), rng
    ),
    "dirichlet": lambda c, n, s, rng: dirichlet(c, n, float(s["dirichlet-alpha"]), rng),
    "log-normal": lambda c, n, s, rng: log_normal(
        c, n, int(s["classes-per-client"]), float(s["size-sigma"]), rng
    ),
    "class-groups": lambda c, n, s, rng: class_groups(c, n),
    "iid": lambda c, n, s, rng: iid(c, n),
}


TEST_PARTITIONS = ("same", "all")


def partition(
    train_labels: npt.NDArray[np.int64],
    test_labels: npt.NDArray[np.int64],
    num_classes: int,
    num_clients: int,
    settings: Settings,
) -> tuple[Indices, Indices]:
    """Split training and test examples over the clients as the settings say.

    Parameters
    ----------
    train_labels, test_labels : ndarray of int
        Class of each example.
    num_classes, num_clients : int
        How many there are.
    settings : mapping
        ``partition`` and what it needs, ``seed``, and ``test-partition``: ``same``
        splits the test examples as the training examples, with ``all`` every client
        tests on all of them.

    Returns
    -------
    train, test : list of ndarray of int
        Indices of each client's examples.

    Raises
    ------
    SettingsError
        If the partition is unknown or impossible, or leaves a client without training
        examples.
    """
    name = str(settings["partition"])
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    require(num_clients >= 1, "num-clients", num_clients, "at least 1")
    rng = np.random.default_rng([int(settings["seed"]), 0x9A27])
    proportions = PARTITIONS[name](num_classes, num_clients, settings, rng)
    train = split(train_labels, proportions, rng)
    tested = str(settings["test-partition"])
    if tested not in TEST_PARTITIONS:
        raise unknown("test-partition", tested, TEST_PARTITIONS)
    if tested == "same":
        test = split(test_labels, proportions, rng)
    else:
        test = [np.arange(len(test_labels))] * num_clients
    empty = [i for i, part in enumerate(train) if len(part) == 0]
    if empty:
        raise SettingsError(
            f"partition {name!r} leaves {len(empty)} of {num_clients} clients without "
            f"training examples (the first: client {empty[0]}); use fewer clients"
        )
    return train, test
