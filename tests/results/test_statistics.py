"""Paired tests, Holm's correction and mean ranks, on numbers worked by hand."""

import math

import pytest

from flwr_frl.results.statistics import holm, paired_test, rank


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


# Results of methods a to d on eight tasks
TASKS = [
    *([0.126, 0.368, 1.64, 1.605], [-0.536, 0.862, 2.304, 2.447]),
    *([-0.704, -0.765, 0.377, 1.541], [-2.325, 0.281, -0.246, 0.768]),
    *([-0.544, 0.184, 1.412, 2.543], [-0.129, 1.866, 0.335, 1.851]),
    *([0.903, 0.594, 0.257, 0.578], [-0.457, 0.72, -0.009, 1.24]),
]


def test_ranks_of_four_methods_on_eight_tasks():
    ranking = rank("abcd", TASKS)
    # Ranks by hand, e.g. of the first task: 1.64, 1.605, 0.368, 0.126 are c, d, b, a.
    assert ranking.methods == ("d", "b", "c", "a")
    assert ranking.ranks == pytest.approx([1.5, 2.5, 2.5, 3.5])
    # 12 n / (k (k + 1)) * sum of (rank - 2.5)^2 = 12 * 8 / 20 * 2
    assert ranking.statistic == pytest.approx(9.6)
    # χ² with three degrees of freedom
    tail = math.erfc(math.sqrt(4.8)) + math.sqrt(19.2 / math.pi) * math.exp(-4.8)
    assert ranking.p == pytest.approx(tail)
    # Demšar's table 5: q = 2.569 for four methods
    assert ranking.critical_difference == pytest.approx(2.569 * (20 / 48) ** 0.5, 1e-4)
    # autorank 1.3 on the same rows
    assert ranking.critical_difference == pytest.approx(1.658292, rel=1e-5)
    # Where less is better
    assert rank("abcd", TASKS, sign=-1).methods == ("a", "b", "c", "d")


def test_methods_that_always_tie_do_not_differ():
    ranking = rank("abc", [[1.0, 1.0, 1.0]] * 4)
    assert (ranking.ranks, ranking.p) == ((2.0, 2.0, 2.0), 1.0)
