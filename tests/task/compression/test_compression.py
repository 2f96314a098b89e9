"""Compressors: hand-computed bytes, NumPy references, bounds and malformed messages.

Where an expectation is estimated, the tolerance comes from Hoeffding's inequality, so
that a correct operator fails for at most a fraction FALSE_ALARM of all seeds.
"""

import itertools
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from operators import OPERATORS, apply, generator, normal

from flwr_frl.task.compression.per_tensor import (
    QSGD,
    Compressor,
    Identity,
    PerTensor,
    QSGDRandK,
    QSGDTopK,
    RandK,
    Sign,
    SignRandK,
    SignTopK,
    TopK,
)

FALSE_ALARM = 1e-9
short = settings(max_examples=200, deadline=None)
vectors = hnp.arrays(
    np.float32,
    st.integers(1, 60),
    elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False),
)


def kept(x, k):
    """Return the indices of the k largest magnitudes, the lower index on ties.

    Independent of the module, which partitions instead of sorting.
    """
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:k])


def hoeffding(width, draws, events=1):
    """Return the deviation that means of bounded draws exceed with FALSE_ALARM."""
    return width * math.sqrt(math.log(2 * events / FALSE_ALARM) / (2 * draws))


# Bytes computed by hand. Floats are little-endian: 1.0 is 00 00 80 3f, 2.0 is
# 00 00 00 40, 3.5 is 00 00 60 40, 3.0 is 00 00 40 40, -4.0 is 00 00 80 c0.


HALVES = [0, 0.5, 0, 0, -0.5, 0.5, 0, 0.5]


@pytest.mark.parametrize(
    ("operator", "x", "message", "result"),
    [
        (Identity(), [1, 2], "0000803f 00000040", [1, 2]),
        # Mean (1 + 2 + 0 + 5) / 4 = 2; signs + - + - and four padding bits: 1010 0000.
        (Sign(), [1, -2, 0, -5], "00000040 a0", [2, -2, 2, -2]),
        # Nine signs take two bytes: 1111 1111 and 0 with seven padding bits.
        (Sign(), [1] * 8 + [-1], "0000803f ff00", [1] * 8 + [-1]),
        # d = 4: two bits per index. Indices 0, 1: 00 01, padded: 0001 0000.
        (TopK(2), [3, -4, 0, 1], "10 00004040 000080c0", [3, -4, 0, 0]),
        # The same with mean (3 + 4) / 2 = 3.5 and signs + -: 10, padded: 1000 0000.
        (SignTopK(2), [3, -4, 0, 1], "10 00006040 80", [3.5, -3.5, 0, 0]),
        # Ties: the first entries are kept. d = 3: two bits per index; indices 0, 1.
        (TopK(2), [1, 1, -1], "10 0000803f 0000803f", [1, 1, 0]),
        # Norm 5, s = 5: levels 3, 4 and 0 in three bits and the sign: 0110 1001 0000,
        # padded; beta = min(3/25, ...) is below 1.
        (QSGD(5), [3, -4, 0], "0000a040 6900", [3, -4, 0]),
        # Norm 2, s = 2: all levels are exactly 2 * 1 / 2 = 1, two bits 01 and the sign:
        # 010 011 010 010, padded: 0100 1101 0010 0000. beta = min(4/4, 2/2) = 1: half.
        (QSGD(2), [1, -1, 1, 1], "00000040 4d20", [0.5, -0.5, 0.5, 0.5]),
        # beta = min(1/4, 1/2) = 1/4, so the scaled operator returns 4/5 of the value.
        (QSGD(2), [5], "0000a040 80", [5]),
        (QSGD(2, scaled=True), [5], "0000a040 80", [4]),
        # d = 8: indices 1, 4, 5, 7 in three bits: 001 100 101 111, padded:
        # 0011 0010 1111 0000; the rest as before.
        (QSGDTopK(4, 2), [0, 1, 0, 0, -1, 1, 0.5, 1], "32f0 00000040 4d20", HALVES),
    ],
    ids=lambda value: repr(value) if isinstance(value, Compressor) else "",
)
def test_messages_match_hand_computed_bytes(operator, x, message, result):
    x = torch.tensor(x, dtype=torch.float32)
    data = operator.compress(x, generator())
    assert data == bytes.fromhex(message)
    assert operator.decompress(data, len(x)).tolist() == result


# The same operators in NumPy


@short
@given(vectors, st.integers(1, 70))
def test_deterministic_operators_equal_plain_numpy(x, k):
    top = kept(x, min(k, len(x)))
    wide = np.abs(x).astype(np.float64)

    sparse = np.zeros_like(x)
    sparse[top] = x[top]
    signs = np.where(x >= 0, np.float32(1), np.float32(-1))
    sign = np.float32(wide.sum() / len(x)) * signs
    sign_top = np.zeros_like(x)
    sign_top[top] = np.float32(wide[top].sum() / len(top)) * signs[top]

    assert np.array_equal(apply(Identity(), x), x)
    assert np.array_equal(apply(TopK(k), x), sparse)
    assert np.array_equal(apply(Sign(), x), sign)
    assert np.array_equal(apply(SignTopK(k), x), sign_top)


def test_rand_k_draw_is_stable_across_numpy_versions():
    # Indices of the 3 smallest of ten raw 64-bit words of Philox with this key, whose
    # stream NumPy guarantees; the words differ in their upper 60 bits.
    words = np.random.Philox(key=5).random_raw(10)
    data = struct.pack("<Q3f", 5, 1, 2, 3)
    expected = np.zeros(10, np.float32)
    expected[np.sort(np.argsort(words)[:3])] = [1, 2, 3]
    assert np.array_equal(RandK(3).decompress(data, 10).numpy(), expected)


@short
@given(vectors, st.integers(1, 1000), st.integers(0, 2**32))
def test_qsgd_rounds_to_a_neighbouring_level(x, s, seed):
    norm = np.linalg.norm(x.astype(np.float64))
    result = apply(QSGD(s), x, seed).astype(np.float64)
    # From d = s^2 on, results are divided by 1 + beta, with
    # beta = min(d / s^2, sqrt(d) / s).
    if len(x) >= s**2:
        result *= 1 + math.sqrt(len(x)) / s
    assert (np.abs(result - x) <= norm / s * (1 + 1e-5)).all()
    assert (result * x >= 0).all()
    assert not np.signbit(result[result == 0]).any()
    if norm:
        level = np.abs(result) * s / norm
        assert np.allclose(level, np.rint(level), atol=1e-3)
        assert level.max() < s + 1e-3


def test_qsgd_is_unbiased():
    x, s, draws = normal(20), 5, 4000
    shared, operator, total = generator(1), QSGD(s), np.zeros(20)
    for _ in range(draws):
        data = operator.compress(torch.from_numpy(x), shared)
        total += operator.decompress(data, 20).numpy()
    # Given x, an entry is one of two levels, which are ||x|| / s apart.
    allowed = hoeffding(np.linalg.norm(x) / s, draws, events=20)
    assert np.abs(total / draws - x).max() < allowed


# Sizes


def expected_bytes(operator, d):
    """The formulas of the docstrings, written with logarithms."""
    match operator:
        case PerTensor():
            return sum(expected_bytes(operator.compressor, n) for n in operator.sizes)
        case Identity():
            return 4 * d
        case Sign():
            return 4 + math.ceil(d / 8)
        case QSGD():
            bits = math.ceil(math.log2(operator.levels + 1)) + 1
            return 4 + math.ceil(d * bits / 8)
    k = operator.k if isinstance(operator.k, int) else max(1, round(operator.k * d))
    k = min(k, d)
    indices = math.ceil(k * math.ceil(math.log2(d)) / 8)
    match operator:
        case SignRandK():
            return 8 + expected_bytes(Sign(), k)
        case QSGDRandK():
            return 8 + expected_bytes(QSGD(operator.levels), k)
        case RandK():
            return 8 + 4 * k
        case SignTopK():
            return indices + expected_bytes(Sign(), k)
        case QSGDTopK():
            return indices + expected_bytes(QSGD(operator.levels), k)
    return indices + 4 * k


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10**4) | st.integers(10**5, 3 * 10**5), st.integers(0, 2**32))
def test_num_bytes_equals_message_length(d, seed):
    x = torch.from_numpy(normal(d, seed))
    sizes = (d // 3, d - d // 3) if d >= 3 else (d,)
    for operator in (*OPERATORS, PerTensor(SignTopK(0.01), sizes)):
        length = len(operator.compress(x, generator(seed)))
        assert length == operator.num_bytes(d) == expected_bytes(operator, d)


@pytest.mark.parametrize("d", [2**16 - 1, 2**16, 2**16 + 1, 10**6])
def test_round_trip_at_the_limits_of_an_index(d):
    # A vector with exactly k entries is unchanged; indices take 16, 17 or 20 bits.
    x = np.zeros(d, np.float32)
    x[[0, 1, d // 2, d - 2, d - 1]] = [1, -2, 3, -4, 5]
    assert np.array_equal(apply(TopK(5), x), x)


# The contraction property, equation 2.5


@short
@given(vectors, st.integers(1, 70))
def test_deterministic_operators_contract(x, k):
    square = np.square(x.astype(np.float64)).sum()
    for operator in (Identity(), TopK(k), Sign(), SignTopK(k), SignTopK(0.1)):
        error = np.square(apply(operator, x).astype(np.float64) - x).sum()
        at = operator.omega_at(x) if x.any() else operator.omega(len(x))
        assert 0 < operator.omega(len(x)) <= at * (1 + 1e-9) <= 1 + 1e-6
        assert error <= (1 - at) * square + 1e-6 * square
        # For these operators, omega(x) is exact and not only a bound.
        assert error >= (1 - at) * square - 1e-6 * square or square == 0


@pytest.mark.parametrize(
    "operator",
    [
        *(RandK(0.1), SignRandK(0.2), PerTensor(RandK(0.1), (30, 70))),
        *(QSGD(15), QSGD(4), QSGD(30, scaled=True)),
        *(QSGDTopK(0.2, levels=2), QSGDRandK(0.2, levels=2)),
    ],
    ids=repr,
)
def test_random_operators_contract(operator):
    d, draws = 100, 1500
    x = generator(2).standard_t(2, d).astype(np.float32)
    tensor, shared, errors = torch.from_numpy(x), generator(3), []
    for _ in range(draws):
        result = operator.decompress(operator.compress(tensor, shared), d)
        errors.append(torch.sum((result - tensor).double() ** 2).item())
    square = np.square(x.astype(np.float64)).sum()
    # An entry is off by at most ||x|| / s, or is dropped, so errors are within
    # [0, (1 + d / s^2) ||x||^2].
    quantiser = operator if isinstance(operator, QSGD | QSGDTopK | QSGDRandK) else None
    width = 1 + (d / quantiser.levels**2 if quantiser else 0)
    mean = np.mean(errors) / square
    for omega in (operator.omega(d), operator.omega_at(x)):
        assert mean <= 1 - omega + hoeffding(width, draws)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_omega_of_sign_rand_k_averages_over_all_draws(k):
    # All subsets of k of 3 entries are equally likely: E ||x - C(x)||² by enumeration.
    x, errors = np.array([3.0, -1.0, 2.0], np.float32), []
    for kept in itertools.combinations(range(3), k):
        result = np.zeros(3)
        result[list(kept)] = np.abs(x[list(kept)]).mean() * np.sign(x[list(kept)])
        errors.append(np.square(x - result).sum() / 14)
    assert SignRandK(k).omega_at(x) == pytest.approx(1 - np.mean(errors))
    assert SignRandK(k).omega(3) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("composed", "inner"), [(SignRandK(4), Sign()), (QSGDRandK(4), None)]
)
def test_compositions_apply_their_operator_to_the_entries_of_rand_k(composed, inner):
    x = torch.from_numpy(normal(40, 5))
    kept = RandK(4).decompress(RandK(4).compress(x, generator(6)), 40)
    inner = inner or QSGD(15, scaled=True)
    draws = generator(6)
    draws.integers(2**64, dtype=np.uint64)
    places = kept.nonzero().flatten()
    entries = inner.decompress(inner.compress(x[places], draws), 4)
    result = composed.decompress(composed.compress(x, generator(6)), 40)
    assert torch.equal(result[places], entries)
    assert torch.count_nonzero(result) == torch.count_nonzero(entries)


def test_omega_of_hand_computed_examples():
    assert Identity().omega(10) == 1
    assert TopK(3).omega(10) == RandK(3).omega(10) == 0.3
    assert Sign().omega(10) == 0.1
    # d = 16, s = 8: beta = min(16/64, 4/8) = 1/4. s = 2: min(16/4, 4/2) = 2.
    assert QSGD(8).omega(16) == 0.75
    assert QSGD(2).omega(16) == QSGD(2, scaled=True).omega(16) == 1 / 3
    # With 15 levels, beta reaches 1 at dimension 225.
    assert QSGD(15).omega(224) == pytest.approx(1 / 225)
    assert QSGD(15).omega(225) == 0.5
    # 650 entries: beta = sqrt(650) / 15 = 25.4951 / 15 = 1.69967.
    assert QSGD(15).omega(650) == pytest.approx(0.370415, rel=1e-5)
    assert QSGD(8, scaled=True).omega(16) == 0.8
    # k = 4, s = 4: beta = min(4/16, 2/4) = 1/4, omega = 4/16 / (5/4).
    assert QSGDTopK(4, levels=4).omega(16) == pytest.approx(0.2)
    # min(1/k, k/d): k = 10 of 7,850 as in the dissertation, and a large k. Equal
    # entries attain k/d, and a single nonzero entry attains 1/k.
    assert SignTopK(10).omega(7850) == 10 / 7850
    assert SignTopK(5).omega(10) == 0.2
    assert SignTopK(2).omega_at(np.ones(10, np.float32)) == SignTopK(2).omega(10)
    single = np.array([0, 0, 5, 0], np.float32)
    assert SignTopK(3).omega_at(single) == SignTopK(3).omega(4) == 1 / 3
    # x = (3, -4, 0, 0): Sign 7^2 / (4 * 25), Top_1 16 / 25, SignTop_2 7^2 / (2 * 25).
    x = np.array([3, -4, 0, 0], np.float32)
    assert Sign().omega_at(x) == 0.49
    assert TopK(1).omega_at(x) == 0.64
    assert SignTopK(2).omega_at(x) == pytest.approx(0.98)
    # s = 2, beta = min(2/4, 1.4/2): (3, 4) / 5 has the levels 1.2 and 1.6, and rounding
    # loses (0.2 * 0.8 + 0.6 * 0.4) / 4 = 0.1 of the squared norm.
    assert QSGD(2).omega_at(x[:2]) == pytest.approx(0.9)
    assert QSGD(2, scaled=True).omega_at(x[:2]) == 1 / 1.5
    # A Gaussian vector of dimension 15² - 1: the worst case would leave 1/225, but
    # rounding loses at most 224 quarters of a squared level.
    assert QSGD(15).typical_omega(224) >= 1 - 224 / 4 / 15**2
    # Two tensors (3, -4) and (0, 0): 49/50 of the squared norm remain.
    assert PerTensor(Sign(), (2, 2)).omega_at(x) == pytest.approx(0.98)
    assert PerTensor(TopK(1), (2, 5)).omega(7) == 0.2
