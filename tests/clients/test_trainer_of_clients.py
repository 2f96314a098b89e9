"""Clients train with the learning rate of the round and with class weights."""

import pytest
from client_messages import (
    app_of,
    context_of,
    equal,
    initial_arrays,
    trained,
    values_of,
)
from flwr.app import ArrayRecord

SCHEDULE = {"learning_rate_schedule": "step", "num_server_rounds": 4}


def trained_by(algorithm: str, server_round: int, **settings) -> ArrayRecord:
    app, context = app_of(algorithm=algorithm, **settings), context_of()
    arrays = initial_arrays(app, context)
    return trained(app, arrays, context, server_round=server_round)


# SCAFFOLD divides by the learning rate, and APFL has custom training steps.
@pytest.mark.parametrize("algorithm", ["fedrep", "apfl", "scaffold"])
def test_round_3_of_4_trains_with_a_tenth_of_the_learning_rate(algorithm):
    scheduled = trained_by(algorithm, 3, learning_rate=0.4, **SCHEDULE)
    assert equal(scheduled, trained_by(algorithm, 3, learning_rate=0.4 * 0.1))
    assert not equal(scheduled, trained_by(algorithm, 3, learning_rate=0.4))


@pytest.mark.parametrize("algorithm", ["fedrep", "apfl", "per-fedavg", "fedrod"])
def test_class_weights_of_2_equal_twice_the_learning_rate(algorithm):
    plain = {"momentum": 0.0, "weight_decay": 0.0, "inner_learning_rate": 0.0}
    plain |= {"apfl_adaptive": False}
    doubled = values_of(trained_by(algorithm, 1, **plain, learning_rate=0.04))
    plain |= {"class_weights": ",".join(["2"] * 10)}
    changed = trained_by(algorithm, 1, **plain, learning_rate=0.02)
    for name, array in values_of(changed).items():
        assert array == pytest.approx(doubled[name], abs=1e-5)
