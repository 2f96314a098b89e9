"""Server optimizers compared with NumPy and with Flower's strategies."""

import json

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import strategy as flower
from function_clients import (
    averaging,
    grid_of,
    honest,
    partition_of,
    reply_with,
    train_once,
)

from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.server.checkpoint import State
from flwr_frl.strategies.server.replies import to_record

BETA1, BETA2, TAU, ROUNDS, CLIENTS = 0.8, 0.9, 0.02, 10, 3
START = {
    "w": np.array([[1.0, -2.0, 0.5]], np.float32),
    "b": np.array(3.0, np.float32),
    # These are averaged.
    "norm.running_var": np.array([4.0], np.float32),
    "gaussian.covariance": np.eye(2, dtype=np.float32),
    "norm.num_batches_tracked": np.array(5),
}
PARAMETERS = ("w", "b")
RATES = {"momentum": 0.7, "adam": 0.05, "yogi": 0.05, "adagrad": 0.3}
FLOWER = {
    "adam": flower.FedAdam(eta=0.05, beta_1=BETA1, beta_2=BETA2, tau=TAU),
    "yogi": flower.FedYogi(eta=0.05, beta_1=BETA1, beta_2=BETA2, tau=TAU),
    "adagrad": flower.FedAdagrad(eta=0.3, tau=TAU),
    "momentum": flower.FedAvgM(server_learning_rate=0.7, server_momentum=BETA1),
}


def optimized(kind: str, **more):
    names = {"beta1": 0.0 if kind == "adagrad" else BETA1, "beta2": BETA2, "tau": TAU}
    names["rate"] = RATES[kind]
    chosen = {f"server_optimizer_{name}": value for name, value in names.items()}
    chosen = {"server_optimizer": kind, "weighting": "examples", **chosen, **more}
    return averaging(**chosen)


def noisy(message: Message, context) -> Message:
    """Return arrays that move by amounts of very different sizes."""
    if message.metadata.message_type != "train":
        return honest(message, context)
    i = partition_of(context)
    rng = np.random.default_rng([i, int(message.content["config"]["server-round"])])
    arrays = {}
    for name, array in message.content["arrays"].items():
        change = rng.normal(0, 10.0 ** rng.integers(-3, 1), array.shape)
        moved = array.numpy() + (change if array.dtype == "float32" else i)
        arrays[name] = np.asarray(moved).astype(array.dtype)
    return reply_with(message, arrays, num_examples=i + 1)


def rounds_of(strategy, rounds, start=START):
    """Yield the replies and the new arrays of each round."""
    grid, arrays = grid_of(CLIENTS, noisy), to_record(start)
    for number in rounds:
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        replies = list(grid.send_and_receive(messages))
        arrays, _ = strategy.aggregate_train(number, replies)
        yield replies, values(arrays)


def values(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy().copy() for name, array in record.items()}


def mean_of(replies: list[Message], name: str) -> np.ndarray:
    models = [reply.content["arrays"][name].numpy() for reply in replies]
    examples = [reply.content["metrics"]["num-examples"] for reply in replies]
    return np.average(np.float64(models), axis=0, weights=examples)


@pytest.mark.parametrize("kind", RATES)
def test_every_round_matches_the_papers(kind):
    beta1, rate = 0 if kind == "adagrad" else BETA1, RATES[kind]
    x, m = {name: START[name] for name in PARAMETERS}, dict.fromkeys(PARAMETERS, 0)
    v = dict.fromkeys(PARAMETERS, TAU**2)
    for replies, new in rounds_of(optimized(kind), range(1, ROUNDS + 1)):
        for name in new.keys() - x.keys():
            mean = mean_of(replies, name)
            is_counter = name.endswith("tracked")
            np.testing.assert_allclose(new[name], np.rint(mean) if is_counter else mean)
        for name in PARAMETERS:
            change = mean_of(replies, name) - x[name]
            if kind == "momentum":
                m[name] = beta1 * m[name] + change
                step = m[name]
            else:
                m[name] = beta1 * m[name] + (1 - beta1) * change
                v[name] = {
                    "adagrad": v[name] + change**2,
                    "adam": BETA2 * v[name] + (1 - BETA2) * change**2,
                    "yogi": v[name]
                    - (1 - BETA2) * change**2 * np.sign(v[name] - change**2),
                }[kind]
                step = m[name] / (np.sqrt(v[name]) + TAU)
            np.testing.assert_allclose(new[name], x[name] + rate * step, 1e-6, 1e-7)
            x[name] = new[name]


@pytest.mark.parametrize("kind", RATES)
def test_ten_rounds_equal_flowers(kind):
    theirs, current = FLOWER[kind], to_record({n: START[n] for n in PARAMETERS})
    if kind != "momentum":
        # Flower starts v at 0.
        start = {name: np.full_like(START[name], TAU**2) for name in PARAMETERS}
        theirs.v_t = start
    for number, (replies, ours) in enumerate(
        rounds_of(optimized(kind), range(1, ROUNDS + 1)), 1
    ):
        theirs.current_arrays = current if kind == "momentum" else values(current)
        if kind == "adam":
            # Flower corrects the bias.
            corrected = np.sqrt(1 - BETA2 ** (number + 1)) / (1 - BETA1 ** (number + 1))
            theirs.eta = RATES[kind] / corrected
        for reply in replies:
            sent = reply.content["arrays"]
            reply.content["arrays"] = ArrayRecord({n: sent[n] for n in PARAMETERS})
        current, _ = theirs.aggregate_train(number, replies)
        for name in PARAMETERS:
            np.testing.assert_allclose(ours[name], current[name].numpy(), 2e-5, 1e-7)


def test_resumed_optimizer_continues_with_its_moments():
    strategy = optimized("adam")
    *_, (_, middle) = rounds_of(strategy, range(1, 4))
    arrays, saved = strategy._snapshot()
    *_, (_, end) = rounds_of(strategy, range(4, 7), middle)
    resumed = optimized("adam")
    resumed._restore(State(arrays, json.loads(json.dumps(saved))))
    *_, (_, again) = rounds_of(resumed, range(4, 7), middle)
    *_, (_, anew) = rounds_of(optimized("adam"), range(4, 7), middle)
    assert again["w"].tolist() == end["w"].tolist() != anew["w"].tolist()


def test_step_that_is_not_finite_changes_nothing():
    strategy = optimized("momentum", server_optimizer_rate=1e300)
    arrays, _ = train_once(strategy, grid_of(CLIENTS, noisy), START)
    assert arrays is None
    assert not strategy.state


def test_second_call_of_mean_makes_no_second_step():
    class Twice(FedAvg, uses_mean="only"):
        def aggregate(self, round):
            round.mean()
            return round.mean()

    chosen = {"server_optimizer": "momentum", "fraction_train": 1.0}
    once, twice = (
        [new["w"].tolist() for _, new in rounds_of(kind(**chosen), range(1, 4))]
        for kind in (FedAvg, Twice)
    )
    assert once == twice
