"""Compressors: hand-computed bytes, NumPy references, bounds and malformed messages.

Where an expectation is estimated, the tolerance comes from Hoeffding's inequality, so
that a correct operator fails for at most a fraction FALSE_ALARM of all seeds.
"""

import math
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from named_tasks import dashed
from operators import OPERATORS, apply, generator, normal
from refusals import code_of

from flwr_frl.common.compression import (
    QSGD,
    CompressionSettings,
    Compressor,
    Identity,
    PerTensor,
    RandK,
    Sign,
    TopK,
    from_settings,
)
from flwr_frl.common.settings import build, resolve

FALSE_ALARM = 1e-9
by_operator = pytest.mark.parametrize("operator", OPERATORS, ids=repr)
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
        (TopK(2, Sign()), [3, -4, 0, 1], "10 00006040 80", [3.5, -3.5, 0, 0]),
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
        (
            TopK(4, QSGD(2, scaled=True)),
            [0, 1, 0, 0, -1, 1, 0.5, 1],
            "32f0 00000040 4d20",
            HALVES,
        ),
    ],
    ids=lambda value: repr(value) if isinstance(value, Compressor) else "",
)
def test_messages_match_hand_computed_bytes(operator, x, message, result):
    x = np.array(x, np.float32)
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
    assert np.array_equal(apply(TopK(k, Sign()), x), sign_top)


def test_rand_k_draw_is_stable_across_numpy_versions():
    # Indices of the 3 smallest of ten raw 64-bit words of Philox with this key, whose
    # stream NumPy guarantees; the words differ in their upper 60 bits.
    words = np.random.Philox(key=5).random_raw(10)
    data = struct.pack("<Q3f", 5, 1, 2, 3)
    expected = np.zeros(10, np.float32)
    expected[np.sort(np.argsort(words)[:3])] = [1, 2, 3]
    assert np.array_equal(RandK(3).decompress(data, 10), expected)


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
        data = operator.compress(x, shared)
        total += operator.decompress(data, 20)
    # Given x, an entry is one of two levels, which are ||x|| / s apart.
    allowed = hoeffding(np.linalg.norm(x) / s, draws, events=20)
    assert np.abs(total / draws - x).max() < allowed


# Sizes


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
    for operator in (Identity(), TopK(k), Sign(), TopK(k, Sign()), TopK(0.1, Sign())):
        error = np.square(apply(operator, x).astype(np.float64) - x).sum()
        at = operator.omega_at(x) if x.any() else operator.omega(len(x))
        assert 0 < operator.omega(len(x)) <= at * (1 + 1e-9) <= 1 + 1e-6
        assert error <= (1 - at) * square + 1e-6 * square
        # For these operators, omega(x) is exact and not only a bound.
        assert error >= (1 - at) * square - 1e-6 * square or square == 0


@pytest.mark.parametrize(
    "operator",
    [
        *(RandK(0.1), RandK(0.2, Sign()), PerTensor(RandK(0.1), (30, 70))),
        *(QSGD(15), QSGD(4), QSGD(30, scaled=True)),
        *(TopK(0.2, QSGD(2, scaled=True)), RandK(0.2, QSGD(2, scaled=True))),
    ],
    ids=repr,
)
def test_random_operators_contract(operator):
    d, draws = 100, 1500
    x = generator(2).standard_t(2, d).astype(np.float32)
    shared, errors = generator(3), []
    for _ in range(draws):
        result = operator.decompress(operator.compress(x, shared), d)
        errors.append(np.square((result - x).astype(np.float64)).sum())
    square = np.square(x.astype(np.float64)).sum()
    # An entry is off by at most ||x|| / s, or is dropped, so errors are within
    # [0, (1 + d / s^2) ||x||^2].
    quantiser = getattr(operator, "entries", operator)
    quantiser = quantiser if isinstance(quantiser, QSGD) else None
    width = 1 + (d / quantiser.levels**2 if quantiser else 0)
    mean = np.mean(errors) / square
    for omega in (operator.omega(d), operator.omega_at(x)):
        assert mean <= 1 - omega + hoeffding(width, draws)


def test_omega_of_hand_computed_examples():
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
    assert TopK(4, QSGD(4, scaled=True)).omega(16) == pytest.approx(0.2)
    # x = (3, -4, 0, 0): Sign 7^2 / (4 * 25), Top_1 16 / 25, SignTop_2 7^2 / (2 * 25).
    x = np.array([3, -4, 0, 0], np.float32)
    assert Sign().omega_at(x) == 0.49
    assert TopK(1).omega_at(x) == 0.64
    assert TopK(2, Sign()).omega_at(x) == pytest.approx(0.98)
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


# Malformed messages


NO, MINUS_ONE, INFINITE, ONE = (
    struct.pack("<f", value) for value in (math.nan, -1, math.inf, 1)
)


@pytest.mark.parametrize(
    ("operator", "d", "data", "reason"),
    [
        (Identity(), 2, ONE + NO, "an? .*entry is not finite"),
        (Sign(), 2, NO + b"\0", "norm is nan"),
        (Sign(), 2, INFINITE + b"\0", "norm is inf"),
        (Sign(), 2, MINUS_ONE + b"\0", "norm is -1.0"),
        (Sign(), 2, ONE + b"\x01", "last byte"),
        # Two-bit indices: 0 0, 1 0, 0 3, and 0 1 with a padding bit set.
        (TopK(2), 3, b"\x00" + ONE + ONE, "strictly increasing numbers below 3"),
        (TopK(2), 3, b"\x40" + ONE + ONE, "strictly increasing numbers below 3"),
        (TopK(2), 3, b"\x30" + ONE + ONE, "strictly increasing numbers below 3"),
        (TopK(2), 3, b"\x11" + ONE + ONE, "last byte"),
        (TopK(2), 3, b"\x10" + ONE + INFINITE, "not finite"),
        (TopK(2, Sign()), 3, b"\x30" + ONE + b"\x80", "strictly increasing"),
        (TopK(2, Sign()), 3, b"\x10" + NO + b"\x80", "norm is nan"),
        (RandK(2), 3, bytes(8) + ONE + NO, "not finite"),
        # s = 2 takes two bits: a level of 3, 110, and padding
        (QSGD(2), 1, ONE + b"\xc0", "a level is 3, above 2"),
        (QSGD(2), 1, ONE + b"\x01", "last byte"),
        (QSGD(2), 1, INFINITE + b"\0", "norm is inf"),
        (
            TopK(1, QSGD(2, scaled=True)),
            2,
            b"\0" + ONE + b"\xc0",
            "a level is 3, above 2",
        ),
        (PerTensor(Sign(), (1, 1)), 2, ONE + b"\0" + NO + b"\0", "norm is nan"),
    ],
)
def test_malformed_messages_are_rejected(operator, d, data, reason):
    with pytest.raises(ValueError, match=reason) as refusal:
        operator.decompress(data, d)
    assert "\n" not in str(refusal.value)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(OPERATORS), st.integers(1, 40), st.data())
def test_random_bytes_give_a_finite_vector_or_a_value_error(operator, d, draw):
    length = operator.num_bytes(d)
    size = draw.draw(st.sampled_from([length, length, length, length + 1, length // 2]))
    data = draw.draw(st.binary(min_size=size, max_size=size))
    try:
        result = operator.decompress(data, d)
    except ValueError:
        return
    assert result.shape == (d,)
    assert result.dtype == np.float32
    assert np.isfinite(result).all()


@by_operator
def test_per_tensor_applies_the_operator_to_each_tensor(operator):
    sizes = (300, 1, 50)
    x = normal(351)
    together, one_by_one = generator(4), generator(4)
    split = PerTensor(operator, sizes)
    data = split.compress(x, together)
    tensors = np.split(x, [300, 301])
    parts = [operator.compress(tensor, one_by_one) for tensor in tensors]
    assert data == b"".join(parts)
    expected = [
        operator.decompress(part, size) for part, size in zip(parts, sizes, strict=True)
    ]
    assert np.array_equal(split.decompress(data, 351), np.concatenate(expected))


@pytest.mark.parametrize(
    ("given_settings", "expected"),
    [
        ({}, TopK(0.1, Sign())),
        ({"compressor": "identity"}, Identity()),
        ({"compressor": "sign"}, Sign()),
        ({"compressor": "top-k"}, TopK(0.1)),
        ({"compressor": "top-k", "compressor_k": 0.5}, TopK(0.5)),
        # Values of at least 1 are counts.
        ({"compressor": "top-k", "compressor_k": 1.0}, TopK(1)),
        ({"compressor": "top-k", "compressor_k": 10}, TopK(10)),
        ({"compressor": "rand-k", "compressor_k": 7.0}, RandK(7)),
        ({"compressor": "qsgd"}, QSGD(15)),
        ({"compressor": "qsgd", "compressor_levels": 3}, QSGD(3)),
        (
            {"compressor": "qsgd-top-k", "compressor_levels": 4},
            TopK(0.1, QSGD(4, scaled=True)),
        ),
        ({"compressor": "sign", "per_tensor": True}, PerTensor(Sign(), (640, 10))),
        ({"per_tensor": True}, PerTensor(TopK(0.1, Sign()), (640, 10))),
    ],
)
def test_from_settings(given_settings, expected):
    settings = build(CompressionSettings, resolve(dashed(given_settings)))
    operator = from_settings(settings, (640, 10))
    assert operator == expected
    assert type(getattr(operator, "k", 1)) is type(getattr(expected, "k", 1))
    # Neither a fraction nor a count
    settings = CompressionSettings(compressor_k=1.5)
    assert code_of(from_settings, settings, (3,)) == "compressor-k"


@by_operator
def test_messages_of_another_length_are_rejected_without_allocating(operator):
    data = operator.compress(normal(50), generator())
    assert len(data) == operator.num_bytes(50)
    tracemalloc.start()
    for message in (data[:-1], b"", data + b"\0"):
        with pytest.raises(ValueError, match="bytes, not"):
            operator.decompress(message, 50)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**5


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_only_finite_vectors_are_compressed(value):
    with pytest.raises(ValueError, match="not finite"):
        Sign().compress(np.array([1.0, value], np.float32), generator())
