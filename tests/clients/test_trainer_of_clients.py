"""Clients train with the learning rate of the round and with class weights."""

import pytest
from client_messages import (
    app_of,
    context_of,
    equal,
    initial_arrays,
    message_of,
    values_of,
)
from flwr.app import ArrayRecord

SCHEDULE = {"learning_rate_schedule": "step:1:0.5", "num_server_rounds": 4}


def trained(algorithm: str, server_round: int, **settings) -> ArrayRecord:
    app, context = app_of(algorithm=algorithm, **settings), context_of()
    arrays = initial_arrays(app, context)
    message = message_of("train", arrays, server_round=server_round)
    return app(message, context).content.array_records["arrays"]


# SCAFFOLD divides by the learning rate, and APFL has custom training steps.
@pytest.mark.parametrize("algorithm", ["fedrep", "apfl", "scaffold"])
def test_round_2_trains_with_half_the_learning_rate(algorithm):
    scheduled = trained(algorithm, 2, learning_rate=0.04, **SCHEDULE)
    assert equal(scheduled, trained(algorithm, 2, learning_rate=0.02))
    assert not equal(scheduled, trained(algorithm, 2, learning_rate=0.04))


def test_fine_tuning_before_evaluation_ignores_the_schedule():
    losses = []
    for more in ({}, SCHEDULE):
        app = app_of(algorithm="fedavg-ft", finetune_epochs=1, **more)
        arrays = initial_arrays(app, context_of())
        message = message_of("evaluate", arrays, server_round=3)
        metrics = app(message, context_of()).content.metric_records["metrics"]
        losses.append(metrics["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("algorithm", ["fedrep", "apfl", "per-fedavg", "fedrod"])
def test_class_weights_of_2_equal_twice_the_learning_rate(algorithm):
    plain = {"momentum": 0.0, "weight_decay": 0.0, "inner_learning_rate": 0.0}
    plain |= {"apfl_adaptive": False}
    doubled = trained(algorithm, 1, **plain, learning_rate=0.04)
    weights = ",".join(["2"] * 10)
    changed = trained(algorithm, 1, **plain, learning_rate=0.02, class_weights=weights)
    for name, array in values_of(changed).items():
        assert array == pytest.approx(values_of(doubled)[name], abs=1e-5)
