"""Attacks of Byzantine clients match hand-computed values."""

from argparse import Namespace

import numpy as np
import pytest
import torch

from benchmarks.attacks import ATTACKS, Known, least_suspicious
from benchmarks.backdoor import triggered
from benchmarks.liars import Cell, outcome
from flwr_frl.task.examples import ExampleSet

# Two honest clients have moved from (10, 10) by (1, 0) and (3, 4).
HONEST = np.array([[11.0, 10.0], [13.0, 14.0]])
KNOWN = Known(np.array([10.0, 10.0]), np.array([12.0, 9.0]), HONEST, 2)


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        ("1e30", [1e30, 1e30]),
        ("sign flip", [-12, -9]),
        # The mean is (12, 12), the standard deviations are (1, 2).
        ("ALIE 1.5", [10.5, 9]),
        ("ALIE z", [12, 12]),
        ("IPM 0.5", [9, 9]),
        ("IPM 3", [4, 4]),
        # Two of ten clients replace the model: five times the change.
        ("backdoor", [20, 5]),
    ],
)
def test_attacks_match_hand_computed_values(attack: str, expected: list[float]) -> None:
    np.testing.assert_allclose(ATTACKS[attack](KNOWN), expected)


def test_z_matches_the_paper() -> None:
    # 50 workers, 12 of them corrupted: s = 14 and Φ(z) = 24/38.
    assert least_suspicious(50, 12) == pytest.approx(0.3360, abs=1e-4)
    assert least_suspicious(10, 1) == pytest.approx(-0.1397, abs=1e-4)
    assert least_suspicious(10, 2) == 0
    assert least_suspicious(10, 3) == pytest.approx(0.1800, abs=1e-4)


def test_a_trigger_adds_a_patch_and_changes_the_label() -> None:
    plain = ExampleSet(torch.ones(2, 4, 4, 1, dtype=torch.uint8), torch.tensor([3, 5]))
    poisoned = triggered(plain, torch.tensor([False, True]))
    assert poisoned.targets.tolist() == [3, 0]
    white = torch.ones(4, 4, dtype=torch.uint8)
    assert torch.equal(poisoned.inputs[0, ..., 0], white)
    white[2:, 2:] = 255
    assert torch.equal(poisoned.inputs[1, ..., 0], white)
    assert plain.inputs.max() == 1


def test_a_backdoor_succeeds_with_the_mean_but_not_with_the_median() -> None:
    arguments = Namespace(rounds=3, last=1, seed=0)
    backdoor = ("backdoor", 1)
    fooled = outcome(arguments, Cell("fedavg", "mean", 0, *backdoor))
    assert fooled.success > 0.8
    resisting = outcome(arguments, Cell("fedavg", "median", 0, *backdoor))
    assert resisting.success < 0.2
    honest = outcome(arguments, Cell("fedavg", "mean", 0))
    assert honest.success < 0.1
    assert min(resisting.accuracy, honest.accuracy) > 0.5
