"""Means of replies: hand-computed values, bit-identical in any order."""

from collections.abc import Callable, Iterator

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


def test_uniform_mean_matches_hand_computed_values():
    # The clients add 1, 2, 3 and 4 to 0: 2.5. Losses 0, 1, 2 and 3, weighted by 1 to 4
    # examples: 20/10.
    arrays, metrics = train_once(averaging(), grid_of(4))
    assert list(arrays) == ["w", "b"]
    assert arrays["w"].numpy().tolist() == [[2.5] * 3] * 2
    assert arrays["b"].numpy().dtype == np.float32
    assert metrics["train-loss"] == 2.0
    assert metrics["clients"] == 4
    assert metrics["rejected"] == 0
    assert metrics["unanswered"] == 0


def shuffled(seed: int) -> Callable[[list], list]:
    def shuffle(replies: list) -> list:
        order = np.random.default_rng(seed).permutation(len(replies))
        return [replies[i] for i in order]

    return shuffle


def as_they_arrive(replies: list) -> Iterator:
    """Yield replies; check that earlier ones, except the invalid one, are freed."""
    former: list[Message] = []
    for reply in replies:
        assert sum("arrays" in message.content for message in former) <= 1
        former.append(reply)
        yield reply


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_mean_does_not_depend_on_the_order_of_arrival(weighting):
    def noisy(message: Message, context: Context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        i = partition_of(context)
        # Values of 20 orders of magnitude: sums in another order round differently.
        rng = np.random.default_rng(i)
        values = rng.standard_normal((300, 300)) * 10.0 ** rng.integers(-10, 10, 300)
        if i == 2:
            values[0, 0] = np.nan
        arrays = {"x": values.astype(np.float32), "n": np.array(i)}
        return reply_with(message, arrays, num_examples=i + 3, train_loss=1 / 3)

    start = {"x": np.zeros((300, 300), np.float32), "n": np.array(0)}
    (listed, about), *others = [
        train_once(averaging(weighting=weighting), grid_of(7, noisy), start, order)
        for order in (list, shuffled(1), as_they_arrive)
    ]
    assert about["rejected"] == 1
    for arrays, metrics in others:
        assert metrics == about
        assert {n: a.data for n, a in arrays.items()} == {
            n: a.data for n, a in listed.items()
        }


def test_strategy_with_a_custom_aggregate_gets_all_arrays():
    class Largest(FedAvg):
        def aggregate(self, round):
            arrays = [reply.arrays for reply in round.replies]
            return {n: np.max([a[n] for a in arrays], 0) for n in arrays[0]}

    assert FedAvg()._averages_on_arrival
    assert not Largest()._averages_on_arrival
    assert not FedAvg(aggregation="median")._averages_on_arrival
    arrays, _ = train_once(Largest(fraction_train=1.0), grid_of(3), order=iter)
    assert arrays is not None


def test_round_in_which_no_client_has_examples():
    def without(message: Message, context: Context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        return reply_with(message, START, num_examples=0, train_loss=0.0)

    arrays, metrics = train_once(averaging(), grid_of(3, without))
    assert arrays["w"].numpy().tolist() == [[0.0] * 3] * 2
    assert metrics["train-loss"] == 0.0
    # Weighted by examples all weights are 0, so the old arrays stay.
    arrays, _ = train_once(averaging(weighting="examples"), grid_of(3, without))
    assert arrays is None
