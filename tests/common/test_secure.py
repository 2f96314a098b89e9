"""Secure aggregation: sums with drop-outs, refusals, hostile members."""

import math
import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import TypeAdapter, ValidationError
from refusals import code_of
from scipy import stats

from flwr_frl.common.secure import primitives
from flwr_frl.common.secure.fixed_point import Plan
from flwr_frl.common.secure.primitives import SEED
from flwr_frl.common.secure.protocol import (
    BOX,
    DROPPED,
    SURVIVED,
    Coordinator,
    Member,
    threshold_of,
)

SENT = b"model and config"


def refuses(call, *arguments, **named) -> bool:
    return code_of(call, *arguments, **named) == "secure-round"


class Round:
    """A round of ``n`` members with drawn words; ``lost`` ones drop out of a step."""

    def __init__(self, n=10, neighbours=0, size=50, fraction=0.67):
        self.server = Coordinator(n, fraction, neighbours)
        rng = np.random.default_rng(n)
        drawn = rng.integers(0, 2**32, (n, size), dtype=np.uint32)
        self.words = dict(enumerate(drawn, 1))
        session, threshold = self.server.session, self.server.threshold
        self.members = {i: Member(i, session, threshold) for i in self.words}
        self.sent = dict.fromkeys(self.words, SENT)

    def keys(self, lost=()):
        keys = {i: m.keys()[i] for i, m in self.members.items() if i not in lost}
        return self.server.take_keys(keys)

    def shares(self, keys, lost=(), change=lambda i, shares: shares):
        return self.server.take_shares(
            {
                i: change(i, self.members[i].shares(group))
                for i, group in keys.items()
                if i not in lost
            }
        )

    def mask(self, boxes, lost=()):
        masked = {}
        for i, of in boxes.items():
            masked[i] = self.members[i].masked(self.words[i], of, self.sent[i])
            if i not in lost:
                assert self.server.take_masked(i, masked[i])
        return masked

    def unmask(self, lost=(), change=lambda i, shares: shares):
        asked = self.server.ask_unmask().items()
        answers = {
            i: change(i, self.members[i].unmask(fates))
            for i, fates in asked
            if i not in lost
        }
        return self.server.take_unmask(answers, SENT)

    def run(self, keys=(), shares=(), masked=(), unmask=()):
        boxes = self.shares(self.keys(keys), shares)
        self.mask(boxes, masked)
        return self.unmask(unmask)

    def total(self, without=()):
        # Unsigned integers wrap.
        return sum(w for i, w in self.words.items() if i not in without)


@pytest.mark.parametrize("neighbours", [0, 8])
@pytest.mark.parametrize(
    "lost",
    [
        {},
        {"keys": (1, 2)},
        {"shares": (3, 4)},
        {"masked": (5, 9)},
        {"unmask": (6, 7)},
        {"keys": (1,), "masked": (10,)},
    ],
)
def test_the_sum_is_exact_whoever_drops_out(neighbours, lost):
    round = Round(neighbours=neighbours)
    without = {i for step, nodes in lost.items() if step != "unmask" for i in nodes}
    assert np.array_equal(round.run(**lost), round.total(without))
    assert round.server.survived == round.words.keys() - without


def test_a_ring_of_neighbours_needs_few_shares():
    round = Round(n=30, neighbours=10)
    keys = round.keys()
    assert {len(group) for group in keys.values()} == {11}
    boxes = round.shares(keys, lost=[2])
    round.mask(boxes, lost=[5, 20])
    assert np.array_equal(round.unmask(), round.total((2, 5, 20)))


@pytest.mark.parametrize("step", ["keys", "shares", "masked", "unmask"])
def test_fewer_than_the_threshold_get_no_sum(step):
    round = Round()
    assert round.server.threshold == 7
    assert refuses(round.run, **{step: range(1, 5)})


@pytest.mark.parametrize(
    ("group", "fraction", "in_ring", "expected"),
    [
        (3, 0.67, False, 3),
        (4, 0.51, False, 3),
        (10, 0.67, False, 7),
        (10, 0.51, False, 6),
        (10, 1.0, False, 10),
        (5, 0.51, True, 4),
        (2, 0.67, False, 3),
    ],
)
def test_thresholds(group, fraction, in_ring, expected):
    assert threshold_of(group, fraction, in_ring) == expected


def test_a_member_that_received_another_model_sends_noise():
    round = Round()
    round.sent[4] = b"another model"
    assert np.mean(round.run() == round.total()) < 0.1


# Hostile members: the sum stays right, or the sender is blamed.


def noise(i, shares):
    return {node: os.urandom(SEED) for node in shares}


def garbled(i, shares):
    return {node: bytes(BOX) + text[BOX:] for node, text in shares.items()}


def no_seed(i, shares):
    return shares | {i: bytes(BOX) + shares[i][BOX:]}


@pytest.mark.parametrize(
    ("senders", "sealed", "revealed"),
    [
        # As many as may drop out
        ((1, 2, 3), None, noise),
        ((1, 2, 3, 4), None, noise),
        # Boxes that do not open, and shares of no seed
        ((8, 9), garbled, None),
        ((8,), no_seed, None),
    ],
)
def test_senders_of_wrong_shares_change_nothing_or_are_blamed(
    senders, sealed, revealed
):
    def by_some(change):
        return lambda i, shares: change(i, shares) if i in senders else shares

    round, true = Round(), lambda i, shares: shares
    boxes = round.shares(round.keys(), change=by_some(sealed or true))
    round.mask(boxes)
    unmask = by_some(revealed or true)
    if senders == (1, 2, 3):
        assert np.array_equal(round.unmask(change=unmask), round.total())
    else:
        assert refuses(round.unmask, change=unmask)
        assert round.server.blamed == set(senders)


@pytest.mark.parametrize("key", [bytes(64), b"short", b"", "that of 4"])
def test_unusable_and_repeated_keys_are_left_out(key):
    round = Round()
    keys = {i: member.keys()[i] for i, member in round.members.items()}
    is_repeated = isinstance(key, str)
    keys[3] = keys[4] if is_repeated else key
    out = {3, 4} if is_repeated else {3}
    assert round.server.take_keys(keys).keys() == round.words.keys() - out


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: {node: sent[node] for node in (1, 2, 3)},
        lambda sent: {node: text[1:] for node, text in sent.items()},
        lambda sent: sent | {1: bytes(999)},
        lambda sent: sent | {99: sent[1]},
        lambda sent: {},
    ],
)
def test_shares_of_wrong_sizes_are_left_out(change):
    round = Round()
    keys = round.keys()
    shares = {i: round.members[i].shares(group) for i, group in keys.items()}
    shares[3] = change(shares[3])
    assert round.server.take_shares(shares).keys() == round.words.keys() - {3}


def test_words_count_once():
    round = Round()
    round.mask(round.shares(round.keys()))
    assert not round.server.take_masked(1, round.words[1])
    assert not round.server.take_masked(99, round.words[1])


# The client does not trust the server.


def test_a_member_has_a_minimum_of_clients():
    assert refuses(Member(1, b"session", 4).keys, least=5)
    assert refuses(Member(1, b"session", 2).keys, least=1)


def group_of(n, threshold):
    members = {i: Member(i, b"session", threshold) for i in range(1, n + 1)}
    return members, {i: member.keys()[i] for i, member in members.items()}


def other_key(keys):
    return keys | Member(1, b"session", 3).keys()


def weak_key(keys):
    return keys | {2: bytes(32) + keys[2][32:]}


@pytest.mark.parametrize(
    "change", [other_key, weak_key, lambda keys: keys | {2: keys[3]}]
)
def test_a_member_checks_the_keys(change):
    members, keys = group_of(5, 3)
    assert refuses(members[1].shares, change(keys))


@pytest.mark.parametrize(("n", "valid"), [(3, True), (5, True), (6, False), (2, False)])
def test_more_than_half_must_unmask(n, valid):
    members, keys = group_of(n, 3)
    if valid:
        members[1].shares(keys)
    else:
        assert refuses(members[1].shares, keys)


@pytest.mark.parametrize(
    ("survived", "dropped"),
    [
        ((1, 2, 3, 4), ()),
        ((1, 2, 3, 4, 5, 6), ()),
        ((2, 3, 4, 5), (1,)),
        ((1, 2, 3), (4, 5)),
    ],
    ids=["one missing", "one more", "not itself", "too few"],
)
def test_a_member_reveals_one_share_of_those_that_take_part(survived, dropped):
    round = Round(n=5)
    round.mask(round.shares(round.keys()))
    assert refuses(round.members[1].unmask, fates(survived, dropped))


def fates(survived, dropped=()):
    return dict.fromkeys(survived, SURVIVED) | dict.fromkeys(dropped, DROPPED)


def test_no_step_is_taken_twice_or_out_of_order():
    round = Round(n=3)
    member = round.members[1]
    assert refuses(member.unmask, fates([1, 2, 3]))
    boxes = round.shares(round.keys())
    assert refuses(member.keys)
    round.mask(boxes)
    assert refuses(member.masked, round.words[1], boxes[1], SENT)
    member.unmask(fates([1, 2, 3]))
    assert not member.seeds
    assert not member.held
    assert refuses(member.unmask, fates([1, 2], [3]))


def test_too_few_shares_or_strangers_end_a_members_round():
    round = Round(n=5)
    boxes = round.shares(round.keys())[1]
    for wrong in ({2: boxes[2]}, {**boxes, 9: b""}, {**boxes, 1: b""}):
        member = Member(**vars(round.members[1]))
        assert refuses(member.masked, round.words[1], wrong, SENT)


def signed_group(signers):
    members = {i: Member(i, b"session", 3) for i in range(1, len(signers) + 1)}
    return members, {
        i: members[i].keys(signing=key)[i] for i, key in enumerate(signers, 1)
    }


def test_keys_are_signed_by_distinct_peers():
    signers = [Ed25519PrivateKey.generate() for _ in range(3)]
    peers = frozenset(key.public_key().public_bytes_raw() for key in signers)
    members, keys = signed_group(signers)
    members[1].shares(keys, peers)
    stranger = Ed25519PrivateKey.generate()
    for others in ([stranger], [signers[0]], [None]):
        members, keys = signed_group(signers[:2] + others)
        assert refuses(members[1].shares, keys, peers)
    members, keys = signed_group(signers)
    # Signed keys of another client
    forged = {**keys, 3: keys[2][:64] + keys[3][64:]}
    assert refuses(members[1].shares, forged, peers)


# What the server sees


def test_what_the_server_sees_looks_uniform():
    round = Round(n=10, size=8192)
    # A constant is as far from uniform as can be.
    round.words = {i: np.full(8192, i, np.uint32) for i in round.words}
    masked = round.mask(round.shares(round.keys()))
    own = {}
    for i, member in round.members.items():
        own[i] = masked[i].copy()
        primitives.add_mask(
            own[i], primitives.derive(member.seeds[2], b"own mask", member.session), -1
        )
    views = {
        "masked": masked[1],
        "without its own mask": own[1],
        "all but one": sum(own[i] for i in range(1, 10)),
    }
    for words in views.values():
        counts = np.bincount(words >> 24, minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4
        assert stats.kstest(words / 2.0**32, "uniform").pvalue > 1e-4
    assert np.array_equal(round.unmask(), np.full(8192, 55))


def test_streams_and_keys_stay_the_same():
    # HKDF-SHA256 and AES-256-CTR by OpenSSL and Python's hmac; versions must agree.
    import hmac

    about = b"".join(
        len(part).to_bytes(8, "big") + part for part in (primitives.DOMAIN, b"test")
    )
    extracted = hmac.digest(bytes(32), b"secret", "sha256")
    expected = hmac.digest(extracted, about + b"\1", "sha256")
    assert primitives.derive(b"secret", b"test") == expected
    words = np.zeros(4, np.uint32)
    # SP 800-38A's key of AES-256 (F.5.5) with a zero counter block
    key = bytes.fromhex(
        "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"
    )
    primitives.add_mask(words, key, 1)
    assert words.tobytes().hex() == "e568f68194cf76d6174d4cc04310a854"
    primitives.add_mask(words, key, -1)
    assert not words.any()


# Fixed point


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_a_mean_is_off_by_half_a_quantum(bits):
    rng = np.random.default_rng(0)
    plan = Plan(3, bits, 8.0, 5)
    before = {"w": rng.normal(size=(3, 4)), "n": np.array(7)}
    replies = [
        {"w": before["w"] + rng.uniform(-8, 8, (3, 4)), "n": np.array(7 + i)}
        for i in range(5)
    ]
    total = sum(plan.encode(before, reply) for reply in replies)
    mean = plan.decode(total, before, 5)
    off = mean["w"] - np.mean([r["w"] - before["w"] for r in replies], axis=0)
    assert np.abs(off).max() <= plan.quantum / 2 + 1e-14
    assert mean["n"] == 2
    assert len(plan.zeros(before)) == len(total) == 13


def test_quanta_are_those_of_the_range_and_the_number_of_clients():
    # 2^15 - 1 = 32767 = 5 * 6553 + 2
    assert Plan(3, 16, 8.0, 5).largest == 6553
    assert Plan(3, 16, 8.0, 5).quantum == 8 / 6553


def test_examples_weight_changes():
    plan = Plan(3, 32, 8.0, 3, most=30)
    before = {"w": np.zeros(2), "n": np.array(0)}
    replies = [
        ({"w": np.array([1.0, -2.0]) * i, "n": np.array(i)}, 10 * i) for i in (1, 2, 3)
    ]
    total = sum(plan.encode(before, reply, n) for reply, n in replies)
    mean = plan.decode(total, before, 3)
    # (1·10 + 2·20 + 3·30) / 60 = 7/3
    assert np.allclose(mean["w"], np.array([1, -2]) * 7 / 3, atol=plan.quantum * 2)
    assert np.isclose(mean["n"], 7 / 3)


@pytest.mark.parametrize("value", [8.1, -9.0, math.nan, math.inf])
def test_a_change_beyond_the_range_is_refused(value):
    before = {"head.bias": np.zeros(2), "head.weight": np.zeros(2)}
    after = {**before, "head.weight": np.array([0, value])}
    assert code_of(Plan(3, 32, 8.0, 5).encode, before, after) == "secure-range"


def test_more_examples_than_declared_are_refused():
    plan, same = Plan(3, 32, 8.0, 5, most=30), {"w": np.zeros(1)}
    assert code_of(plan.encode, same, same, 31) == "secure-bits"


def test_changes_are_clipped_before_noise():
    plan = Plan(3, 32, 8.0, 5, clip=1.0)
    before = {"v": np.zeros(1), "w": np.zeros(1)}
    after = {"v": np.array([3.0]), "w": np.array([-4.0])}
    mean = plan.decode(plan.encode(before, after), before, 1)
    assert np.allclose([mean["v"][0], mean["w"][0]], [0.6, -0.8], atol=plan.quantum)


def test_any_threshold_of_clients_carries_the_noise():
    t, z, clip, size = 4, 0.5, 2.0, 40_000
    plan = Plan(3, 32, 8.0, 5, clip=clip, noise=z / math.sqrt(t))
    before = {"w": np.zeros(size)}
    total = sum(plan.encode(before, before) for _ in range(t))
    noise = plan.decode(total, before, 1)["w"]
    # Rounding adds √d/2 = 100 quanta of 5e-7, which is far less.
    assert np.isclose(noise.std(), z * clip, rtol=0.02)
    assert stats.kstest(noise / noise.std(), "norm").pvalue > 1e-4


@pytest.mark.parametrize("order", [1.1, 2, 3.5, 10])
@pytest.mark.parametrize("multiplier", [0.5, 1, 4])
def test_skellam_noise_is_as_private_as_gaussian_noise(order, multiplier):
    # The divergence of two Skellam distributions, summed directly
    sensitivity = 5
    variance = multiplier**2 * sensitivity**2 + 4
    support = np.arange(-400, 401)
    shifted = stats.skellam.logpmf(support - sensitivity, variance / 2, variance / 2)
    plain = stats.skellam.logpmf(support, variance / 2, variance / 2)
    kept = np.isfinite(shifted) & np.isfinite(plain)
    terms = order * shifted[kept] + (1 - order) * plain[kept]
    divergence = np.logaddexp.reduce(terms) / (order - 1)
    assert divergence <= order / (2 * multiplier**2)


def test_a_plan_is_read_as_it_was_written():
    plan = Plan(3, 16, 0.5, 5, 30, 1.0, 0.25)
    assert TypeAdapter(Plan).validate_json(plan.text) == plan


@pytest.mark.parametrize(
    "change", [{"bits": 8}, {"bound": 0}, {"clients": 0}, {"most": -1}]
)
def test_an_invalid_plan_is_refused(change):
    with pytest.raises(ValidationError):
        TypeAdapter(Plan).validate_python(vars(Plan(3, 32, 8.0, 5)) | change)
