"""Compression: edge cases, malformed messages, per-tensor use, and construction."""

import math
import struct
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from named_tasks import dashed
from operators import OPERATORS, apply, generator, normal
from refusals import code_of

from flwr_frl.common.settings import build, resolve
from flwr_frl.task.compression.per_tensor import (
    QSGD,
    CompressionSettings,
    Identity,
    PerTensor,
    QSGDRandK,
    QSGDTopK,
    RandK,
    Sign,
    SignTopK,
    TopK,
    create,
    from_settings,
)

NAN, LEVELS, BITS = math.nan, "compressor-levels", {"compressor_levels": 2**15}
by_operator = pytest.mark.parametrize("operator", OPERATORS, ids=repr)


@by_operator
@pytest.mark.parametrize("d", [1, 2, 9, 1000])
def test_zero_stays_zero(operator, d):
    result = apply(operator, np.zeros(d, np.float32))
    assert result.shape == (d,)
    assert np.array_equal(result, np.zeros(d))
    assert not np.signbit(result).any()


@by_operator
def test_vector_with_one_entry(operator):
    # Scaled quantisers divide by 1 + beta, and beta_{1,s} = 1 / s^2.
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
        *((torch.tensor([1.0, bad]), "not finite") for bad in (NAN, math.inf)),
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


# Malformed messages


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
        (SignTopK(2), 3, b"\x30" + ONE + b"\x80", "strictly increasing"),
        (SignTopK(2), 3, b"\x10" + NO + b"\x80", "norm is nan"),
        (RandK(2), 3, bytes(8) + ONE + NO, "not finite"),
        # s = 2 takes two bits: a level of 3, 110, and padding
        (QSGD(2), 1, ONE + b"\xc0", "a level is 3, above 2"),
        (QSGD(2), 1, ONE + b"\x01", "last byte"),
        (QSGD(2), 1, INFINITE + b"\0", "norm is inf"),
        (QSGDTopK(1, 2), 2, b"\0" + ONE + b"\xc0", "a level is 3, above 2"),
        (PerTensor(Sign(), (1, 1)), 2, ONE + b"\0" + NO + b"\0", "norm is nan"),
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


@by_operator
def test_per_tensor_applies_the_operator_to_each_tensor(operator):
    sizes = (300, 1, 50)
    x = torch.from_numpy(normal(351))
    together, one_by_one = generator(4), generator(4)
    split = PerTensor(operator, sizes)
    data = split.compress(x, together)
    parts = [operator.compress(tensor, one_by_one) for tensor in x.split(sizes)]
    assert data == b"".join(parts)
    expected = [
        operator.decompress(part, size) for part, size in zip(parts, sizes, strict=True)
    ]
    assert torch.equal(split.decompress(data, 351), torch.cat(expected))


def test_per_tensor_rejects_another_dimension():
    operator = PerTensor(Sign(), (4, 2))
    for call, argument in (
        (lambda x: operator.compress(x, generator()), torch.ones(5)),
        (lambda n: operator.decompress(b"", n), 5),
        (operator.num_bytes, 5),
        (operator.omega, 5),
    ):
        with pytest.raises(ValueError, match=r"5 entries .* tensors of 6 entries"):
            call(argument)


def from_names(sizes=(640, 10), **settings):
    given_settings = resolve(dashed(settings))
    return from_settings(build(CompressionSettings, given_settings), sizes)


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
        ({"compressor": "qsgd-top-k", "compressor_levels": 4}, QSGDTopK(0.1, levels=4)),
        ({"compressor": "sign", "per_tensor": True}, PerTensor(Sign(), (640, 10))),
        ({"per_tensor": True}, PerTensor(SignTopK(0.1), (640, 10))),
    ],
)
def test_from_settings(given_settings, expected):
    operator = from_names(**given_settings)
    assert operator == expected
    assert type(getattr(operator, "k", 1)) is type(getattr(expected, "k", 1))


@pytest.mark.parametrize(
    ("call", "values", "code"),
    [
        (partial(create, "topk"), {}, "compressor"),
        *((partial(create, "top-k"), {"k": k}, "k") for k in (0, 1.5, -3, "3", NAN)),
        *((partial(create, "qsgd"), {"levels": n}, "levels") for n in (0, 2**15, 2.0)),
        (partial(create, "qsgd-top-k"), {"levels": 2**15}, "levels"),
        (from_names, {"compressor": "topk"}, "compressor"),
        (from_names, {"compressor": ""}, "compressor"),
        (partial(from_names, compressor="qsgd"), {"compressor_levels": 0}, LEVELS),
        (partial(from_names, compressor="qsgd-top-k"), BITS, "levels"),
        *(
            (partial(from_names, compressor=name), {"compressor_k": k}, "compressor-k")
            for name in ("top-k", "sign")
            for k in (0.0, -0.5, -3.0, 1.5, math.inf, -math.inf, NAN)
        ),
    ],
)
def test_bad_parameters_and_settings(call, values, code):
    assert code_of(call, **values) == code


@by_operator
def test_compress_rows_encodes_each_row_separately(operator):
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    generators = [np.random.default_rng(i) for i in range(3)]
    messages = operator.compress_rows(rows, generators)
    one_by_one = zip(rows, range(3), strict=True)
    assert messages == [
        operator.compress(row, np.random.default_rng(i)) for row, i in one_by_one
    ]


@by_operator
def test_only_exact_operators_return_every_vector(operator):
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    decoded = operator.decompress(operator.compress(x, np.random.default_rng(0)), 50)
    assert operator.is_exact == torch.equal(decoded, x)
