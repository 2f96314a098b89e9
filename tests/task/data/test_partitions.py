"""Partitions: hand-counted sizes and classes, and properties of random cases."""

from math import gcd

import named_tasks
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from refusals import code_of

from flwr_frl.common.settings import declared
from flwr_frl.task.data.datasets import Dataset, ImageSet
from flwr_frl.task.data.partitions import (
    PARTITIONS,
    PartitionSettings,
    dirichlet,
    distinct_shards,
    log_normal,
    partition,
    shards,
    split,
)


def labels_of(num_classes: int, per_class: int) -> np.ndarray:
    """Balanced labels in a random order."""
    labels = np.repeat(np.arange(num_classes), per_class)
    return np.random.default_rng(5).permutation(labels)


def split_of(
    train: np.ndarray, test: np.ndarray, num_clients: int, **overrides
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    sets = ImageSet(train, train), ImageSet(test, test)
    return partition(Dataset(*sets, ()), num_clients, PartitionSettings(**overrides))


DIRICHLET = {"partition": "dirichlet"}


def assert_disjoint_and_complete(parts: list[np.ndarray], total: int) -> None:
    dealt = np.concatenate(parts)
    assert len(dealt) == total
    assert set(dealt.tolist()) == set(range(total))


# Split


def test_split_follows_the_given_proportions():
    # 8 examples of class 0 (1/4, 3/4, 0) and 4 of class 1 (0, 1/2, 1/2).
    labels = np.array([0, 1] * 4 + [0] * 4)
    proportions = np.array([[0.25, 0.75, 0.0], [0.0, 0.5, 0.5]])
    parts = split(labels, proportions, np.random.default_rng(0))
    counts = [np.bincount(labels[part], minlength=2).tolist() for part in parts]
    assert counts == [[2, 0], [6, 2], [0, 2]]
    assert_disjoint_and_complete(parts, 12)


# Equal shards


def test_shards_have_equal_sizes_and_may_repeat_a_class():
    train, test = labels_of(10, 100), labels_of(10, 20)
    repeated = 0
    for seed in range(5):
        parts, tests = split_of(
            train, test, 50, partition="shards", classes_per_client=2, seed=seed
        )
        # 100 shards, 10 of each class, of 10 training and 2 test examples.
        assert {len(part) for part in parts} == {20}
        assert {len(part) for part in tests} == {4}
        for part, held_out in zip(parts, tests, strict=True):
            assert set(np.bincount(train[part]).tolist()) <= {0, 10, 20}
            assert set(test[held_out]) == set(train[part])
            repeated += len(set(train[part])) == 1
    # A client gets its class twice with probability 9/99; none of 250 does: 1e-10.
    assert repeated > 0


@given(st.data(), st.integers(2, 12), st.integers(0, 2**32 - 1))
def test_shards_are_dealt_out_completely(data, num_classes, seed):
    per_client = data.draw(st.integers(1, num_classes))
    step = num_classes // gcd(num_classes, per_client)
    num_clients = step * data.draw(st.integers(1, 5))
    copies = num_clients * per_client // num_classes
    for deal in (shards, distinct_shards):
        rng = np.random.default_rng(seed)
        settings = PartitionSettings(classes_per_client=per_client)
        counts = deal(num_classes, num_clients, settings, rng) * copies
        assert np.allclose(counts, np.rint(counts))
        assert np.allclose(counts.sum(axis=0), per_client)
        assert np.allclose(counts.sum(axis=1), copies)
        if deal is distinct_shards:
            assert counts.max() <= 1 + 1e-9


# Other partitions


def test_dirichlet_is_even_for_a_large_and_uneven_for_a_small_concentration():
    # Each proportion has mean 1/n and variance (n - 1) / (n² (n alpha + 1)).
    n, classes = 10, 400
    for alpha in (0.1, 100.0):
        settings = PartitionSettings(dirichlet_alpha=alpha)
        drawn = dirichlet(classes, n, settings, np.random.default_rng(1))
        assert np.allclose(drawn.sum(axis=1), 1)
        variance = (n - 1) / (n**2 * (n * alpha + 1))
        assert np.isclose(drawn.var(), variance, rtol=0.2)


def test_log_normal_has_s_classes_and_equal_shards_without_spread():
    train, test = labels_of(10, 300), labels_of(10, 30)
    parts, tests = split_of(
        train, test, 20, partition="log-normal", classes_per_client=3, size_sigma=0.5
    )
    assert_disjoint_and_complete(parts, 3000)
    assert_disjoint_and_complete(tests, 300)
    assert {len(set(train[part])) for part in parts} == {3}
    assert len({len(part) for part in parts}) > 5
    for part, held_out in zip(parts, tests, strict=True):
        assert set(test[held_out]) <= set(train[part])
    settings = PartitionSettings(classes_per_client=3, size_sigma=0.0)
    even = log_normal(10, 20, settings, np.random.default_rng(0))
    assert set(np.unique(even.round(9))) == {0.0, round(1 / 6, 9)}


# All partitions


@pytest.mark.parametrize("name", sorted(PARTITIONS))
@hypothesis_settings(max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_every_partition_is_disjoint_complete_and_determined_by_the_seed(name, seed):
    train, test = labels_of(6, 80), labels_of(6, 20)
    usual = {"partition": name, "dirichlet_alpha": 5.0, "size_sigma": 0.5}
    parts, tests = split_of(train, test, 12, seed=seed, **usual)
    assert_disjoint_and_complete(parts, 480)
    assert_disjoint_and_complete(tests, 120)
    seeds = (seed, seed + 1)
    again, other = (split_of(train, test, 12, seed=s, **usual)[0] for s in seeds)
    assert all(map(np.array_equal, parts, again))
    assert not all(map(np.array_equal, parts, other))


ONE_CLASS, THREE, NINE = labels_of(1, 60), labels_of(3, 5), labels_of(9, 5)
GROUPED = {"partition": "clustered", "label_groups": 4}


@pytest.mark.parametrize(
    ("labels", "clients", "overrides", "code"),
    [
        (ONE_CLASS, 50, {"partition": "shard"}, "partition"),
        *(
            (labels_of(10, 5), 20, {"partition": p, **given}, "classes-per-client")
            for p in ("shards", "distinct-shards")
            for given in ({"classes_per_client": n} for n in (0, -1, 11))
        ),
        (ONE_CLASS, 50, {**DIRICHLET, "dirichlet_alpha": 0.0}, "dirichlet-alpha"),
        # Nearly all examples belong to one client; 49 of 50 clients have none.
        (ONE_CLASS, 50, {**DIRICHLET, "dirichlet_alpha": 1e-6}, "num-clients"),
        (ONE_CLASS, 50, {"partition": "log-normal", "size_sigma": -1.0}, "size-sigma"),
        # Weights of e^1000 are infinite, and those of e^-1000 are 0.
        (ONE_CLASS, 50, {"partition": "log-normal", "size_sigma": 1e3}, "size-sigma"),
        (ONE_CLASS, 50, {"test_partition": "non"}, "test-partition"),
        *((ONE_CLASS[:3], n, {}, "num-clients") for n in (4, 10**9)),
        # A slice, which has no rows.
        (ONE_CLASS, 2, {"partition": "builtins:slice"}, "partition"),
        (THREE, 9, GROUPED, "label-groups"),
        (NINE, 3, GROUPED, "label-groups"),
    ],
)
def test_impossible_partitions_are_an_error(labels, clients, overrides, code):
    assert code_of(split_of, labels, labels, clients, **overrides) == code


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_unused_settings_do_not_change_the_partition(name):
    train = labels_of(6, 80)
    data, usual = (train, labels_of(6, 20), 12), {"partition": name, "size_sigma": 0.5}
    usual["dirichlet_alpha"] = 5.0
    others = {
        "classes-per-client": {"classes_per_client": 3},
        "dirichlet-alpha": {"dirichlet_alpha": 50.0},
        "size-sigma": {"size_sigma": 0.1},
        "label-groups": {"label_groups": 2},
    }

    def seen(**settings):
        chosen, parts = PartitionSettings(**settings), split_of(*data, **settings)[0]
        return [(p, train[p] + chosen.label_shift(i, 12)) for i, p in enumerate(parts)]

    first, facts = seen(**usual), declared(PartitionSettings)
    for setting, change in others.items():
        pairs = zip(first, seen(**{**usual, **change}), strict=True)
        same = all(
            np.array_equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True)
        )
        assert same == (name in facts[setting].unused_if["partition"]), setting


# Test examples of clients


def test_all_clients_may_test_on_all_examples():
    train, test = labels_of(10, 30), labels_of(10, 7)
    _, tests = split_of(train, test, 10, test_partition="all")
    for held_out in tests:
        assert held_out.tolist() == list(range(70))


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_clients_can_have_fewer_training_examples(name):
    train, test = labels_of(6, 400), labels_of(6, 20)
    usual, usual_tests = split_of(train, test, 12, partition=name)
    for first, spread in ((150, 0), (100, 50), (10_000, 0)):
        limits = {"client_examples": first, "client_examples_spread": spread}
        parts, tests = split_of(train, test, 12, partition=name, **limits)
        for part, full in zip(parts, usual, strict=True):
            low, high = min(first, len(full)), min(first + spread, len(full))
            assert low <= len(part) <= high
            assert len(np.unique(part)) == len(part)
            assert set(part) <= set(full)
        assert all(map(np.array_equal, tests, usual_tests))
        if spread and name == "iid":
            assert len({len(part) for part in parts}) > 4


# Groups of clients with permuted labels


def test_clustered_partition_is_even_and_shifts_labels_of_groups():
    settings = PartitionSettings(partition="clustered", label_groups=3)
    labels = np.repeat(np.arange(4), 6)
    parts, _ = split_of(labels, labels, 6, partition="clustered", label_groups=3)
    assert_disjoint_and_complete(parts, 24)
    for client, part in enumerate(parts):
        assert np.bincount(labels[part]).tolist() == [1, 1, 1, 1]
        assert settings.label_shift(client, 6) == client // 2
    other = PartitionSettings(partition="iid", label_groups=3)
    assert other.label_shift(5, 6) == 0
    plain, task = (
        named_tasks.task_of("digits", 6, partition=name, label_groups=3)
        for name in ("iid", "clustered")
    )
    for examples in ("train_examples", "test_examples"):
        expected = (getattr(plain, examples)(5).targets + 2) % 10
        assert getattr(task, examples)(5).targets.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["shards", "distinct-shards"])
def test_classes_without_examples_have_no_shards(name):
    labels = labels_of(3, 30)
    expected = split_of(labels, labels, 4, partition=name, classes_per_client=3)
    # Labels from 1, and without 2
    other = np.array([1, 3, 4])[labels]
    parts = split_of(other, other, 4, partition=name, classes_per_client=3)
    for mine, theirs in zip(parts, expected, strict=True):
        assert all(map(np.array_equal, mine, theirs))
    four = {"partition": name, "classes_per_client": 4}
    assert code_of(split_of, other, other, 4, **four) == "classes-per-client"


# Data that is split over its clients


def test_data_of_clients_is_not_split_again():
    owners = np.array([2, 0, 1, 0, 0])
    part = ImageSet(np.arange(5), np.zeros(5, np.int64), owners)
    data = Dataset(part, part, ("a",), ("x", "y", "z"))
    train, test = partition(data, 2, PartitionSettings(client_examples=2))
    assert [len(rows) for rows in train] == [2, 1]
    assert [rows.tolist() for rows in test] == [[1, 3, 4], [2]]
    assert code_of(partition, data, 4, PartitionSettings()) == "num-clients"


# Custom functions

CUSTOM = """
import numpy as np

def by_parity(labels, num_clients, seed):
    assert num_clients == 2
    return [np.flatnonzero(labels % 2 == i)[seed:] for i in range(2)]

def fixed(*clients):
    return lambda labels, num_clients, seed: clients

fewer, more, negative = fixed([0, 1]), fixed([0], [99]), fixed([0], [-1])
shared, repeated, empty = fixed([0, 1], [1, 2]), fixed([0, 0], [1]), fixed([0, 1], [])
nothing, number = fixed(), 3
"""


def test_a_custom_function_chooses_the_rows_of_clients(write_module):
    path = f"{write_module('parity', CUSTOM)}:by_parity"
    train, test = np.array([3, 0, 1, 2, 2]), np.array([2, 1, 3])
    trains, tests = split_of(train, test, 2, partition=path, seed=1)
    assert [rows.tolist() for rows in trains] == [[3, 4], [2]]
    assert [rows.tolist() for rows in tests] == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *((name, "partition") for name in ("fewer", "more", "negative", "nothing")),
        *((name, "partition") for name in ("shared", "repeated", "number", "missing")),
        ("empty", "num-clients"),
    ],
)
def test_a_custom_function_must_give_valid_rows(name, code, write_module):
    path = f"{write_module('rows', CUSTOM)}:{name}"
    labels = np.arange(4)
    assert code_of(split_of, labels, labels, 2, partition=path) == code
