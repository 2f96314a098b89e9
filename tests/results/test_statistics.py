"""Paired tests and Holm's correction, on numbers worked by hand."""

import pytest

from flwr_frl.results.statistics import holm, paired_test


def test_signed_rank_test_of_eight_pairs():
    # Differences 3, -1, 2, 4, 5, 6, 7 and a tie. Without the tie, the ranks of the
    # seven sizes are 3, 1, 2, 4, 5, 6, 7: W- = 1, W+ = 27. Of 2^7 signs, W- is 0 or 1
    # for two: the two-sided p-value is 2 * 2 / 128.
    better = [3.0, -1.0, 2.0, 4.0, 5.0, 6.0, 7.0]
    test = paired_test(better, [0.0] * 7)
    assert (test.pairs, test.wins, test.ties, test.losses) == (7, 6, 0, 1)
    assert test.difference == pytest.approx(26 / 7)
    assert test.effect == pytest.approx((27 - 1) / 28)
    assert test.p == pytest.approx(4 / 128)
    assert test.differs is True
    # Where less is better, wins are losses.
    error = paired_test(better, [0.0] * 7, sign=-1)
    assert (error.wins, error.losses, error.p) == (1, 6, test.p)
    assert error.effect == -test.effect
    assert error.difference == test.difference


def test_rounding_errors_are_ties():
    # 0.1 + 0.2 is not 0.3.
    test = paired_test([0.1 + 0.2, *[0.5] * 6], [0.3, *[0.5] * 6])
    assert (test.ties, test.effect, test.p) == (7, 0.0, 1.0)
    assert test.differs is False


@pytest.mark.parametrize("pairs", [0, 1, 5])
def test_fewer_than_six_pairs_are_not_tested(pairs):
    test = paired_test([1.0] * pairs, [0.0] * pairs)
    assert (test.pairs, test.wins, test.p, test.differs) == (pairs, pairs, None, None)
    assert test.entries["p"] == f"{pairs} pairs"


def test_holm_multiplies_the_smallest_first():
    # 4 * 0.005, 3 * 0.01, 2 * 0.03, and 1 * 0.04, which must not be below 0.06.
    corrected = holm([0.01, 0.04, 0.03, 0.005])
    assert corrected == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([None, 0.6, 0.02, None]) == [None, 0.6, 0.04, None]
    assert holm([0.7, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
