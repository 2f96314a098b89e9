"""Clients train with the learning rate of the round."""

import pytest
from client_messages import app_of, context_of, equal, initial_arrays, trained
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
