"""Attacks of Byzantine clients match hand-computed values."""

import numpy as np
import pytest
import torch

from benchmarks.attacks import ATTACKS, Known
from benchmarks.backdoor import triggered
from benchmarks.liars import run
from benchmarks.run import read
from flwr_frl.task.examples import ExampleSet

# Two honest clients have moved from (10, 10) by (1, 0) and (3, 4), the attacker by
# (2, -1). The honest mean is (2, 2), and the standard deviations are (1, 2).
HONEST = np.array([[1.0, 0.0], [3.0, 4.0]])
LAST = np.array([5.0, -1.0])
KNOWN = Known(np.array([10.0, 10.0]), LAST, np.array([2.0, -1.0]), HONEST)


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        ("1e30", [1e30, 1e30]),
        ("sign flip", [-22, -19]),
        ("ALIE", [0.5, -1]),
        ("IPM 0.5", [-1, -1]),
        ("IPM 3", [-6, -6]),
        # The median norm is 3.
        ("ascent", [-3 / 2**0.5, -3 / 2**0.5]),
        # The squared distance of the honest clients is 20.
        ("min-max", [2 - (156**0.5 - 6) / 4] * 2),
        ("min-sum", [2 - 2.5**0.5] * 2),
        ("label flip", [2, -1]),
        # Three of ten clients replace the model.
        ("backdoor", [20 / 3, -10 / 3]),
        ("constrained backdoor", [2, 2 - (171**0.5 - 6) / 3]),
    ],
)
def test_attacks_match_hand_computed_values(attack: str, expected: list[float]) -> None:
    np.testing.assert_allclose(ATTACKS[attack](KNOWN), expected)


def test_mimicry_copies_the_client_with_the_most_different_change() -> None:
    known = KNOWN._replace(honest=np.array([[0.0, 0.0], [0.0, 5.0], [0.0, 1.0]]))
    np.testing.assert_array_equal(ATTACKS["mimic"](known), [0, 5])


def test_relocation_is_orthogonal_and_as_far_as_the_median_client() -> None:
    step = ATTACKS["ROP"](KNOWN) - LAST
    assert step @ (0.9 * LAST + 0.1 * HONEST.mean(axis=0)) == pytest.approx(0)
    radius = np.median(np.linalg.norm(HONEST - LAST, axis=1))
    assert np.linalg.norm(step) == pytest.approx(radius)


def test_a_trigger_adds_a_patch_and_changes_the_label() -> None:
    plain = ExampleSet(torch.ones(2, 4, 4, 1, dtype=torch.uint8), torch.tensor([3, 5]))
    poisoned = triggered(plain, torch.tensor([False, True]))
    assert poisoned.targets.tolist() == [3, 0]
    white = torch.ones(4, 4, dtype=torch.uint8)
    assert torch.equal(poisoned.inputs[0, ..., 0], white)
    white[2:, 2:] = 255
    assert torch.equal(poisoned.inputs[1, ..., 0], white)
    assert plain.inputs.max() == 1


def test_a_backdoor_succeeds_with_the_mean_but_not_with_the_median(tmp_path):
    config = read("liars")

    def outcome(attack: str, rule: str) -> dict:
        own = {"algorithm": "fedavg", "classes-per-client": 10, "aggregation": rule}
        small = {"num-server-rounds": 3, "last": 1, "seed": 0, "attack": attack}
        return run({**config.common, **own, **small}, tmp_path)

    assert outcome("backdoor", "mean")["success"] > 0.8
    resisting = outcome("backdoor", "median")
    assert resisting["success"] < 0.2
    honest = outcome("", "mean")
    assert honest["success"] < 0.1
    assert min(resisting["accuracy"], honest["accuracy"]) > 0.5
