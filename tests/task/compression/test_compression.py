"""Compressors: hand-worked bytes, NumPy references, bounds and malformed messages.

Where an expectation is estimated, the tolerance comes from Hoeffding's inequality, so
that a correct operator fails with probability at most FALSE_ALARM over the seed.
"""

import itertools
import math
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flwr_frl.task.compression.per_tensor import (
    COMPRESSORS,
    QSGD,
    CompressionSettings,
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
    create,
    from_settings,
)
from flwr_frl.task.settings import build, resolve

FALSE_ALARM = 1e-9

OPERATORS: list[Compressor] = [
    Identity(),
    TopK(0.01),
    TopK(7),
    RandK(0.05),
    QSGD(1),
    QSGD(15),
    QSGD(300, scaled=True),
    Sign(),
    SignTopK(0.01),
    SignTopK(3),
    QSGDTopK(0.1, levels=4),
    SignRandK(0.05),
    QSGDRandK(0.1, levels=4),
]
by_operator = pytest.mark.parametrize("operator", OPERATORS, ids=repr)
short = settings(max_examples=200, deadline=None)
vectors = hnp.arrays(
    np.float32,
    st.integers(1, 60),
    elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False),
)


def generator(seed=0):
    return np.random.default_rng(seed)


def apply(operator, x, seed=0):
    """Return C(x) as an array, encoded and decoded."""
    data = operator.compress(torch.from_numpy(x), generator(seed))
    return operator.decompress(data, len(x)).numpy()


def normal(d, seed=0):
    return generator(seed).standard_normal(d, dtype=np.float32)


def kept(x, k):
    """Return the indices of the k largest magnitudes, the lower index on ties.

    Independent of the module, which partitions instead of sorting.
    """
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:k])


def hoeffding(width, draws, events=1):
    """Return the deviation that means of bounded draws exceed with FALSE_ALARM."""
    return width * math.sqrt(math.log(2 * events / FALSE_ALARM) / (2 * draws))


# Bytes worked by hand. Floats are little-endian: 1.0 is 00 00 80 3f, 2.0 is
# 00 00 00 40, 3.5 is 00 00 60 40, 3.0 is 00 00 40 40, -4.0 is 00 00 80 c0.


@pytest.mark.parametrize(
    ("operator", "x", "message", "result"),
    [
        (Identity(), [1, 2], "0000803f 00000040", [1, 2]),
        # Mean (1 + 2 + 0 + 5) / 4 = 2; bits + - + - and four of padding: 1010 0000.
        (Sign(), [1, -2, 0, -5], "00000040 a0", [2, -2, 2, -2]),
        # Nine signs take two bytes: 1111 1111 and 0 with seven of padding.
        (Sign(), [1] * 8 + [-1], "0000803f ff00", [1] * 8 + [-1]),
        # d = 4: two bits an index. Indices 0, 1: 00 01, padded: 0001 0000.
        (TopK(2), [3, -4, 0, 1], "10 00004040 000080c0", [3, -4, 0, 0]),
        # The same with mean (3 + 4) / 2 = 3.5 and signs + -: 10, padded: 1000 0000.
        (SignTopK(2), [3, -4, 0, 1], "10 00006040 80", [3.5, -3.5, 0, 0]),
        # Equals: the first ones are kept. d = 3: two bits; indices 0, 1.
        (TopK(2), [1, 1, -1], "10 0000803f 0000803f", [1, 1, 0]),
        # Norm 5, s = 5: levels 3, 4 and 0 in three bits and the sign: 0110 1001 0000,
        # padded; beta = min(3/25, ...) is below 1.
        (QSGD(5), [3, -4, 0], "0000a040 6900", [3, -4, 0]),
        # Norm 2, s = 2: all levels are exactly 2 * 1 / 2 = 1, two bits 01 and the sign:
        # 010 011 010 010, padded: 0100 1101 0010 0000. beta = min(4/4, 2/2) = 1: half.
        (QSGD(2), [1, -1, 1, 1], "00000040 4d20", [0.5, -0.5, 0.5, 0.5]),
        # beta = min(1/4, 1/2), so 4/5 of it where that is asked for.
        (QSGD(2), [5], "0000a040 80", [5]),
        (QSGD(2, scaled=True), [5], "0000a040 80", [4]),
        # d = 8: indices 1, 4, 5, 7 in three bits: 001 100 101 111, padded:
        # 0011 0010 1111 0000; the rest as before.
        (
            QSGDTopK(4, levels=2),
            [0, 1, 0, 0, -1, 1, 0.5, 1],
            "32f0 00000040 4d20",
            [0, 0.5, 0, 0, -0.5, 0.5, 0, 0.5],
        ),
    ],
    ids=lambda value: repr(value) if isinstance(value, Compressor) else "",
)
def test_messages_match_hand_worked_bytes(operator, x, message, result):
    x = torch.tensor(x, dtype=torch.float32)
    data = operator.compress(x, generator())
    assert data == bytes.fromhex(message)
    assert operator.decompress(data, len(x)).tolist() == result


# The same operators in plain NumPy.


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


def test_rand_k_draws_every_entry_equally_often():
    d, k, draws = 10, 3, 3000
    x, shared = torch.ones(d), generator()
    operator = RandK(k)
    mean = sum(
        operator.decompress(operator.compress(x, shared), d) for _ in range(draws)
    )
    # Each entry is 1 with probability k / d.
    assert np.abs(mean.numpy() / draws - k / d).max() < hoeffding(1, draws, d)


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
    # From d = s^2 on it is divided by 1 + beta, with beta = min(d / s^2, sqrt(d) / s).
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


# Sizes.


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
    # A vector of exactly k entries comes back as it is: 16 and 17 bits an index.
    x = np.zeros(d, np.float32)
    x[[0, 1, d // 2, d - 2, d - 1]] = [1, -2, 3, -4, 5]
    assert np.array_equal(apply(TopK(5), x), x)


# The contraction property, equation 2.5.


@short
@given(vectors, st.integers(1, 70))
def test_deterministic_operators_contract(x, k):
    square = np.square(x.astype(np.float64)).sum()
    for operator in (Identity(), TopK(k), Sign(), SignTopK(k), SignTopK(0.1)):
        error = np.square(apply(operator, x).astype(np.float64) - x).sum()
        at = operator.omega_at(x) if x.any() else operator.omega(len(x))
        assert 0 < operator.omega(len(x)) <= at * (1 + 1e-9) <= 1 + 1e-6
        assert error <= (1 - at) * square + 1e-6 * square
        # For these four omega(x) is not only a bound.
        assert error >= (1 - at) * square - 1e-6 * square or square == 0


@pytest.mark.parametrize(
    "operator",
    [
        RandK(0.1),
        QSGD(15),
        QSGD(4),
        QSGD(30, scaled=True),
        QSGDTopK(0.2, levels=2),
        SignRandK(0.2),
        QSGDRandK(0.2, levels=2),
        PerTensor(RandK(0.1), (30, 70)),
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
    # An entry strays by ||x|| / s at most, or is dropped: errors are within
    # [0, (1 + d / s^2) ||x||^2].
    quantiser = operator if isinstance(operator, QSGD | QSGDTopK | QSGDRandK) else None
    width = 1 + (d / quantiser.levels**2 if quantiser else 0)
    mean = np.mean(errors) / square
    for omega in (operator.omega(d), operator.omega_at(x)):
        assert mean <= 1 - omega + hoeffding(width, draws)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_error_of_sign_rand_k_is_its_mean_over_all_draws(k):
    # All subsets of k of 3 entries, each as likely: E ||x - C(x)||² by enumeration.
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


def test_omega_worked_by_hand():
    assert Identity().omega(10) == 1
    assert TopK(3).omega(10) == RandK(3).omega(10) == 0.3
    assert Sign().omega(10) == 0.1
    # d = 16, s = 8: beta = min(16/64, 4/8) = 1/4. s = 2: min(16/4, 4/2) = 2.
    assert QSGD(8).omega(16) == 0.75
    assert QSGD(2).omega(16) == QSGD(2, scaled=True).omega(16) == 1 / 3
    # The last and the first dimension of 15 levels on either side of beta = 1.
    assert QSGD(15).omega(224) == pytest.approx(1 / 225)
    assert QSGD(15).omega(225) == 0.5
    # 650 entries: beta = sqrt(650) / 15 = 25.4951 / 15 = 1.69967.
    assert QSGD(15).omega(650) == pytest.approx(0.370415, rel=1e-5)
    assert QSGD(8, scaled=True).omega(16) == 0.8
    # k = 4, s = 4: beta = min(4/16, 2/4) = 1/4, omega = 4/16 / (5/4).
    assert QSGDTopK(4, levels=4).omega(16) == pytest.approx(0.2)
    # min(1/k, k/d): the dissertation's k = 10 of 7,850, and k large. Equal entries
    # attain k/d, and a single one attains 1/k.
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
    # s = 2, beta = min(2/4, 1.4/2): (3, 4) / 5 has the levels 1.2 and 1.6, and of its
    # square (0.2 * 0.8 + 0.6 * 0.4) / 4 = 0.1 is lost.
    assert QSGD(2).omega_at(x[:2]) == pytest.approx(0.9)
    assert QSGD(2, scaled=True).omega_at(x[:2]) == 1 / 1.5
    # A Gaussian vector of 15² - 1: in the worst case 1/225 would be left of it, but no
    # rounding loses more than 224 quarters of a level's square.
    assert QSGD(15).typical_omega(224) >= 1 - 224 / 4 / 15**2
    # Two tensors (3, -4) and (0, 0): 49/50 of everything.
    assert PerTensor(Sign(), (2, 2)).omega_at(x) == pytest.approx(0.98)
    assert PerTensor(TopK(1), (2, 5)).omega(7) == 0.2


# Edges.


@by_operator
@pytest.mark.parametrize("d", [1, 2, 9, 1000])
def test_zero_stays_zero(operator, d):
    result = apply(operator, np.zeros(d, np.float32))
    assert result.shape == (d,)
    assert np.array_equal(result, np.zeros(d))
    assert not np.signbit(result).any()


@by_operator
def test_vector_with_one_entry(operator):
    # beta_{1,s} = 1 / s^2 is what is left of a scaled quantiser's error.
    result = apply(operator, np.array([-2.5], np.float32))[0]
    scaled = {QSGD(1): 1, QSGD(300, scaled=True): 300}
    scaled |= {QSGDTopK(0.1, levels=4): 4, QSGDRandK(0.1, levels=4): 4}
    s = scaled.get(operator, math.inf)
    assert result == pytest.approx(-2.5 / (1 + 1 / s**2), rel=1e-6)


@pytest.mark.parametrize("k", [5, 6, 1000, 1.0])
def test_k_of_at_least_d_keeps_every_entry(k):
    x = normal(5)
    assert np.array_equal(apply(TopK(k), x), x)
    assert np.array_equal(apply(RandK(k), x), x)
    assert np.array_equal(apply(SignTopK(k), x), apply(Sign(), x))


def test_fractional_k_is_rounded_to_at_least_one_entry():
    # 0.07 * 100 is 7.000000000000001 in floating point and 0.29 * 100 is 28.999...
    lengths = [TopK(k).num_bytes(100) for k in (0.07, 0.29, 0.001)]
    assert lengths == [TopK(k).num_bytes(100) for k in (7, 29, 1)]


@by_operator
@pytest.mark.parametrize(
    ("x", "reason"),
    [
        *(
            (torch.tensor([1.0, bad, 2.0]), "not finite")
            for bad in (math.nan, math.inf)
        ),
        *((torch.zeros(shape), "expected float32") for shape in ((2, 2), (0,), ())),
        (torch.zeros(2).double(), "expected float32"),
    ],
)
def test_only_finite_float32_vectors_are_accepted(operator, x, reason):
    with pytest.raises(ValueError, match=reason):
        operator.compress(x, generator())


def test_extreme_float32_values():
    largest = np.finfo(np.float32).max
    tiny = np.float32(1e-45)
    x = np.full(4, largest)
    assert np.array_equal(apply(Sign(), x), x)
    with pytest.raises(ValueError, match=r"norm 6\.81e\+38"):
        QSGD().compress(torch.from_numpy(x), generator())
    for operator in (QSGD(), Sign(), TopK(1), SignTopK(1)):
        assert apply(operator, np.array([tiny, 0], np.float32))[0] >= 0


# Malformed messages.


@by_operator
def test_wrong_lengths_are_rejected_without_allocating(operator):
    data = operator.compress(torch.from_numpy(normal(50)), generator())
    wrong = [data[:length] for length in range(len(data))] + [data + b"\0", data * 2]
    for message in wrong:
        with pytest.raises(ValueError, match=f"has {len(data)} bytes, not"):
            operator.decompress(message, 50)
    tracemalloc.start()
    with pytest.raises(ValueError, match="bytes, not"):
        operator.decompress(data, 2**32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**5


NAN, MINUS_ONE = struct.pack("<f", math.nan), struct.pack("<f", -1)
INFINITE, ONE = struct.pack("<f", math.inf), struct.pack("<f", 1)


@pytest.mark.parametrize(
    ("operator", "d", "data", "reason"),
    [
        (Identity(), 2, ONE + NAN, "an? .*entry is not finite"),
        (Sign(), 2, NAN + b"\0", "norm is nan"),
        (Sign(), 2, INFINITE + b"\0", "norm is inf"),
        (Sign(), 2, MINUS_ONE + b"\0", "norm is -1.0"),
        (Sign(), 2, ONE + b"\x01", "last byte"),
        # Two-bit indices: 0 0, 1 0, 0 3, and 0 1 with a padding bit set.
        (TopK(2), 3, b"\x00" + ONE + ONE, "strictly increasing numbers below 3"),
        (TopK(2), 3, b"\x40" + ONE + ONE, "strictly increasing numbers below 3"),
        (TopK(2), 3, b"\x30" + ONE + ONE, "strictly increasing numbers below 3"),
        (TopK(2), 3, b"\x11" + ONE + ONE, "last byte"),
        (TopK(2), 3, b"\x10" + ONE + INFINITE, "not finite"),
        (SignTopK(2), 3, b"\x30" + ONE + b"\x80", "strictly increasing"),
        (SignTopK(2), 3, b"\x10" + NAN + b"\x80", "norm is nan"),
        (RandK(2), 3, bytes(8) + ONE + NAN, "not finite"),
        # s = 2 in two bits: a level of 3, 110, and padding.
        (QSGD(2), 1, ONE + b"\xc0", "a level is 3, above 2"),
        (QSGD(2), 1, ONE + b"\x01", "last byte"),
        (QSGD(2), 1, INFINITE + b"\0", "norm is inf"),
        (QSGDTopK(1, 2), 2, b"\0" + ONE + b"\xc0", "a level is 3, above 2"),
        (PerTensor(Sign(), (1, 1)), 2, ONE + b"\0" + NAN + b"\0", "norm is nan"),
    ],
)
def test_malformed_messages_are_rejected(operator, d, data, reason):
    with pytest.raises(ValueError, match=reason) as refusal:
        operator.decompress(data, d)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("operator", [TopK(10), SignTopK(10), RandK(10), Sign()])
def test_checks_run_before_the_decoded_vector_is_allocated(operator):
    d = 10**6
    data = b"\xff" * operator.num_bytes(d)  # All floats are NaN, all indices equal.
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"finite|indices|norm"):
        operator.decompress(data, d)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < d  # The vector itself takes 4 d bytes.


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
    assert result.dtype == torch.float32
    assert torch.isfinite(result).all()


# Per-tensor compression and construction by name.


@pytest.mark.parametrize("operator", OPERATORS, ids=repr)
def test_per_tensor_applies_the_operator_to_each_tensor(operator):
    sizes = (300, 1, 50)
    x = torch.from_numpy(normal(351))
    whole, one_by_one = generator(4), generator(4)
    split = PerTensor(operator, sizes)
    data = split.compress(x, whole)
    parts = [operator.compress(tensor, one_by_one) for tensor in x.split(sizes)]
    assert data == b"".join(parts)
    expected = [
        operator.decompress(part, size) for part, size in zip(parts, sizes, strict=True)
    ]
    assert torch.equal(split.decompress(data, 351), torch.cat(expected))


def test_per_tensor_rejects_another_dimension():
    operator = PerTensor(Sign(), (4, 2))
    for call in (
        lambda: operator.compress(torch.ones(5), generator()),
        lambda: operator.decompress(b"", 5),
        lambda: operator.num_bytes(5),
        lambda: operator.omega(5),
    ):
        with pytest.raises(ValueError, match=r"5 entries .* tensors of 6 entries"):
            call()


def test_create_by_name():
    assert create("identity") == Identity()
    assert create("top-k", k=10) == TopK(10)
    assert create("rand-k", k=0.5) == RandK(0.5)
    assert create("qsgd", levels=7, scaled=True) == QSGD(7, True)
    assert create("sign") == Sign()
    assert create("sign-top-k", k=0.25) == SignTopK(0.25)
    assert create("qsgd-top-k", k=3, levels=4) == QSGDTopK(3, 4)
    assert all(isinstance(create(name), kind) for name, kind in COMPRESSORS.items())


@pytest.mark.parametrize(
    ("name", "parameters", "code"),
    [
        ("topk", {}, "compressor"),
        *(("top-k", {"k": k}, "k") for k in (0, 1.5, -3, "3", math.nan)),
        *(("qsgd", {"levels": n}, "levels") for n in (0, 2**15, 2.0)),
        ("qsgd-top-k", {"levels": 2**15}, "levels"),
    ],
)
def test_bad_parameters(code_of, name, parameters, code):
    assert code_of(lambda: create(name, **parameters)) == code


# Construction from settings


def from_names(sizes=(640, 10), **settings):
    names = {name.replace("_", "-"): value for name, value in settings.items()}
    return from_settings(build(CompressionSettings, resolve(names)), sizes)


@pytest.mark.parametrize(
    ("given_settings", "expected"),
    [
        ({}, SignTopK(0.1)),
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
            {"compressor": "qsgd-top-k", "compressor_k": 0.2, "compressor_levels": 4},
            QSGDTopK(0.2, levels=4),
        ),
        ({"compressor": "sign", "per_tensor": True}, PerTensor(Sign(), (640, 10))),
        ({"per_tensor": True}, PerTensor(SignTopK(0.1), (640, 10))),
    ],
)
def test_from_settings(given_settings, expected):
    operator = from_names(**given_settings)
    assert operator == expected
    assert type(getattr(operator, "k", 1)) is type(getattr(expected, "k", 1))


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"compressor": "topk"}, "compressor"),
        ({"compressor": ""}, "compressor"),
        ({"compressor": "qsgd", "compressor_levels": 0}, "compressor-levels"),
        ({"compressor": "qsgd-top-k", "compressor_levels": 32768}, "levels"),
        *(
            ({"compressor": name, "compressor_k": k}, "compressor-k")
            for name in ("top-k", "sign")
            for k in (0.0, -0.5, -3.0, 1.5, math.inf, -math.inf, math.nan)
        ),
    ],
)
def test_bad_compressor_settings(code_of, values, code):
    assert code_of(lambda: from_names(**values)) == code


@by_operator
def test_rows_are_encoded_as_vectors_one_by_one(operator):
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    generators = [np.random.default_rng(i) for i in range(3)]
    found = operator.compress_rows(rows, generators)
    one_by_one = zip(rows, range(3), strict=True)
    assert found == [
        operator.compress(row, np.random.default_rng(i)) for row, i in one_by_one
    ]


@by_operator
def test_only_exact_operators_return_every_vector(operator):
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    decoded = operator.decompress(operator.compress(x, np.random.default_rng(0)), 50)
    assert operator.is_exact == torch.equal(decoded, x)
