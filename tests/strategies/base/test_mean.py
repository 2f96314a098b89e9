"""What is averaged: by hand, and the same to the last bit in any order."""

from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Context, Message, MessageType
from function_clients import (
    START,
    averaging,
    grid_of,
    honest,
    partition_of,
    reply_with,
    train_once,
)

from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.server.evaluation import mean_metrics
from flwr_frl.strategies.server.replies import check_metrics


def test_uniform_mean_by_hand():
    # 1, 2, 3 and 4 added to 0: 2.5. Losses 0, 1, 2, 3 by examples 1 to 4: 20/10.
    arrays, metrics = train_once(averaging(), grid_of(4))
    assert list(arrays) == ["w", "b"]
    assert arrays["w"].numpy().tolist() == [[2.5] * 3] * 2
    assert arrays["b"].numpy().dtype == np.float32
    assert metrics["train-loss"] == 2.0
    assert metrics["clients"] == 4
    assert metrics["rejected"] == 0
    assert metrics["unanswered"] == 0


def test_mean_by_examples_by_hand():
    # (1*1 + 2*2 + 3*3 + 4*4) / 10 = 3.
    arrays, _ = train_once(averaging(weighting="examples"), grid_of(4))
    assert arrays["b"].numpy().tolist() == [3.0] * 4


def test_another_number_of_fit_is_in_a_row_where_the_strategy_adds_it():
    class Counting(FedAvg):
        def train_metrics(self, replies):
            steps = mean_metrics(map(check_metrics, replies))["steps"]
            return {**super().train_metrics(replies), "steps": steps}

    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        return reply_with(message, START, num_examples=1, steps=partition_of(context))

    _, metrics = train_once(Counting(fraction_train=1.0), grid_of(4, client))
    assert metrics["steps"] == 1.5
    _, metrics = train_once(averaging(), grid_of(4, client))
    assert "steps" not in metrics


def shuffled(seed: int) -> Callable[[list], list]:
    def shuffle(replies: list) -> list:
        order = np.random.default_rng(seed).permutation(len(replies))
        return [replies[i] for i in order]

    return shuffle


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_the_order_of_arrival_does_not_change_a_bit(weighting):
    def noisy(message: Message, context: Context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        i = partition_of(context)
        # Over 20 orders of magnitude, so that every order of summation rounds anew.
        rng = np.random.default_rng(i)
        values = rng.standard_normal(500) * 10.0 ** rng.integers(-10, 10, 500)
        return reply_with(message, {"x": values}, num_examples=i + 3, train_loss=1 / 3)

    start = {"x": np.zeros(500)}
    results = [
        train_once(averaging(weighting=weighting), grid_of(17, noisy), start, order)
        for order in (list, shuffled(1), shuffled(2))
    ]
    sums = [arrays["x"].data for arrays, _ in results]
    assert sums[0] == sums[1] == sums[2]
    assert len({metrics["train-loss"] for _, metrics in results}) == 1


def test_node_ids_do_not_change_a_bit():
    first, _ = train_once(FedAvg(fraction_train=0.5, seed=4), grid_of(6))
    mapping = {901: 3, 17: 0, 555: 5, 18: 1, 7: 4, 90: 2}
    second, _ = train_once(
        FedAvg(fraction_train=0.5, seed=4), grid_of(6, partitions=mapping)
    )
    assert first["w"].data == second["w"].data


def test_integers_are_rounded():
    def counting(message: Message, context: Context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        steps = np.array([[1, 2, 4][partition_of(context)]])
        return reply_with(message, {"n": steps}, num_examples=1, train_loss=0.0)

    # 7/3 = 2.33.
    arrays, _ = train_once(averaging(), grid_of(3, counting), {"n": np.array([0])})
    assert arrays["n"].numpy().tolist() == [2]
    assert arrays["n"].numpy().dtype == np.int64


def test_no_examples_at_all():
    def without(message: Message, context: Context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        return reply_with(message, START, num_examples=0, train_loss=0.0)

    arrays, metrics = train_once(averaging(), grid_of(3, without))
    assert arrays["w"].numpy().tolist() == [[0.0] * 3] * 2
    assert metrics["train-loss"] == 0.0
    # By examples there is nothing to weigh with: the old arrays stay.
    arrays, _ = train_once(averaging(weighting="examples"), grid_of(3, without))
    assert arrays is None
