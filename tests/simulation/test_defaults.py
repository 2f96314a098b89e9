"""Defaults of tasks and algorithms in simulation, which the user's settings replace."""

import pytest

from flwr_frl.running import check


def settings_of(*algorithms: str, **given):
    found = check(algorithms, {"num-clients": 5, **given}, "inline")
    return [found[n] for n in ("learning-rate", "num-server-rounds", "saddle-step")]


@pytest.mark.parametrize(
    ("algorithms", "given", "expected"),
    [
        (["fedrep"], {}, [0.01, 30, 0.001]),
        (["fedrep", "flute"], {"task": "linear"}, [0.03, 200, 0.001]),
        (["flute"], {"task": "linear", "learning-rate": 0.2}, [0.2, 200, 0.001]),
        (["multi-task"], {"task": "qcqp"}, [0.01, 500, 0.003]),
        (["dpsgd"], {}, [0.1, 100, 0.001]),
        # Algorithms that are compared have the same rate and number of rounds.
        (["dpsgd", "fedavg"], {}, [0.01, 30, 0.001]),
        (["multi-task", "fedavg"], {}, [0.01, 30, 0.03]),
    ],
)
def test_defaults_are_those_of_the_task_and_the_algorithms(algorithms, given, expected):
    assert settings_of(*algorithms, **given) == expected
