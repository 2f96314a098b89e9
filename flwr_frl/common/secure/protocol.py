"""The protocol of secure aggregation: SecAgg on all pairs or a ring of neighbours.

Bonawitz et al., CCS 2017; Bell et al., CCS 2020 (SecAgg+). `Member` is a client in one
round and `Coordinator` the server; messages are up to the caller. In each step, what is
sent is a mapping from nodes to bytes:

1. *keys*: a member sends two public keys, one to seal shares and one for pair masks.
2. *shares*: it sends each neighbour a sealed share of two seeds: of its key for pair
   masks, and of its own mask. The server receives a mark of each share.
3. *masked*: it sends its words plus its own mask, plus or minus the pair masks.
4. *unmask*: for each neighbour it reveals one share: of the seed of the own mask if the
   neighbour's words have arrived, and of the key for pair masks if they have not.

The server can then remove the masks of the sum, and of nothing else. The keys of pair
masks depend on what the member has received, so a server that sends different models
to different members receives noise. By the marks, wrong shares are recognised.
"""

import os
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, cast

import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ConfigDict

from flwr_frl.common.errors import SettingsError
from flwr_frl.common.secure import primitives as crypto
from flwr_frl.common.secure.primitives import KEY, MARK, SEED, Words, mark

Texts = Mapping[int, bytes]
# Bytes of the two public keys, with and without a public key and a signature.
UNSIGNED, SIGNED = 2 * KEY, 5 * KEY
# Bytes of a sealed share.
BOX = crypto.NONCE + 2 * SEED + 16
# Fewest clients in a sum.
FEWEST = 3
# State of a neighbour in the last step, as sent by the server.
SURVIVED, DROPPED = b"1", b"0"


class RefusedError(SettingsError):
    """A member or the server does not continue with a round, for a reason."""


def demand(condition: bool, reason: str) -> None:
    """Raise `RefusedError` unless a condition holds."""
    if not condition:
        raise RefusedError(reason, "secure-round")


def demand_enough(count: int, threshold: int, what: str) -> None:
    """Raise `RefusedError` if a count is below the threshold."""
    demand(count >= threshold, f"{count} {what}; expected at least {threshold}")


def number(node: int) -> bytes:
    """Return a node's id as bytes."""
    return node.to_bytes(8, "big")


def threshold_of(group: int, fraction: float, in_ring: bool = False) -> int:
    """Return how many of a group of clients must remain in each step.

    It is more than ``fraction`` of them, and more than half, so that no two disjoint
    sets of clients can reveal one share of each kind. In a ring it is one more, so that
    the clients that remain are connected: else the server could learn partial sums.
    """
    half = group // 2 + (2 if in_ring else 1)
    return max(FEWEST, half, min(group, int(group * fraction + 1e-9) + 1))


@dataclass
class Member:
    """A client in one round.

    Parameters
    ----------
    node : int
        Its node.
    session : bytes
        Unique for each round and attempt; the server chooses it.
    threshold : int
        Fewest clients of its group that must remain in each step.
    seeds : list of bytes
        Seeds of the two key pairs and of the own mask; by default random.
    publics : dict of int to bytes
        Public keys of its group: of its neighbours and of itself.
    held : dict of int to bytes
        Shares that it holds, by owner.
    step : int
        Number of steps that it has taken. It takes none twice.
    about : dict of str to str
        Further entries, which the caller reads and writes.
    """

    # Seeds and shares are no text.
    __pydantic_config__ = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    node: int
    session: bytes
    threshold: int
    seeds: list[bytes] = field(
        default_factory=lambda: [os.urandom(SEED) for _ in range(3)]
    )
    publics: dict[int, bytes] = field(default_factory=dict)
    held: dict[int, bytes] = field(default_factory=dict)
    step: int = 0
    about: dict[str, str] = field(default_factory=dict)

    def _begin(self, step: int) -> None:
        demand(self.step == step, f"step {step + 1} follows step {self.step}")
        self.step += 1

    def keys(
        self, least: int = FEWEST, signing: Ed25519PrivateKey | None = None
    ) -> dict[int, bytes]:
        """Return the public keys, signed if there is a key to sign with.

        ``least`` is the client's own limit of the clients in a sum.
        """
        self._begin(0)
        reason = f"a sum may have {self.threshold} clients; expected secure-min-clients"
        demand(self.threshold >= max(least, FEWEST), f"{reason}, {least}")
        keys = self._public()
        signed = crypto.sign(signing, self.session + keys) if signing else b""
        return {self.node: keys + signed}

    def _public(self) -> bytes:
        return b"".join(crypto.key_pair(seed)[1] for seed in self.seeds[:2])

    def shares(
        self, keys: Texts, peers: frozenset[bytes] | None = None
    ) -> dict[int, bytes]:
        """Return a sealed share for each neighbour, and its marks.

        In place of a share for itself, there is a mark of the seed of its own mask.

        Parameters
        ----------
        keys : mapping of int to bytes
            The keys of the group, its own among them.
        peers : frozenset of bytes, optional
            Public keys of the clients that it trusts to sign; by default any.
        """
        self._begin(1)
        self.publics = {node: keys[node][:UNSIGNED] for node in sorted(keys)}
        single = {half for k in self.publics.values() for half in (k[:KEY], k[KEY:])}
        usable = len(single) == 2 * len(keys) and all(map(crypto.is_key, single))
        demand(usable, "two clients have the same public key, or a key is weak")
        own = self.publics.get(self.node) == self._public()
        demand(own, "the server reports another public key of this client")
        half = len(keys) < 2 * self.threshold <= 2 * len(keys)
        demand(half, f"{self.threshold} of {len(keys)} clients may unmask a sum")
        if peers is not None:
            signed = [
                (self.session + k[:UNSIGNED], k[UNSIGNED:]) for k in keys.values()
            ]
            signers = {signature[:KEY] for _, signature in signed}
            valid = signers <= peers and len(signers) == len(keys)
            valid = valid and all(crypto.is_signed(s, text) for text, s in signed)
            demand(valid, "keys are not signed by distinct clients of secure-peers")
        of_seeds = [crypto.split(s, self.threshold, len(keys)) for s in self.seeds[1:]]
        sent = {}
        for node, of_key, of_own in zip(self.publics, *of_seeds, strict=True):
            pair = number(self.node), number(node)
            if node == self.node:
                self.held = {node: of_key + of_own}
                box = mark(b"seed", self.session, self.seeds[2]).ljust(BOX, b"\0")
            else:
                box = crypto.seal(self._channel(node), of_key + of_own, b"".join(pair))
            box += mark(b"key", self.session, *pair, of_key)
            sent[node] = box + mark(b"own", self.session, *pair, of_own)
        return sent

    def _channel(self, node: int) -> bytes:
        private, _ = crypto.key_pair(self.seeds[0])
        return crypto.agree(private, self.publics[node][:KEY], b"shares", self.session)

    def masked(self, words: Words, boxes: Texts, sent: bytes) -> Words:
        """Return the masked words.

        Parameters
        ----------
        words : ndarray
            The words.
        boxes : mapping of int to bytes
            Sealed shares for this member, by sender. Those who sent none are out.
        sent : bytes
            Identifies everything that all members have received.
        """
        self._begin(2)
        neighbours = boxes.keys() <= self.publics.keys() - {self.node}
        demand(neighbours, "shares come from clients that are no neighbours")
        demand_enough(len(boxes) + 1, self.threshold, "clients are left")
        words = words.copy()
        own = crypto.derive(self.seeds[2], b"own mask", self.session)
        crypto.add_mask(words, own, 1)
        private, _ = crypto.key_pair(self.seeds[1])
        for node, box in boxes.items():
            # A hostile neighbour's share is empty; its mask is added all the same.
            about = number(node) + number(self.node)
            self.held[node] = crypto.unseal(self._channel(node), box, about)
            of_pair = b"pair mask", self.session, sent
            key = crypto.agree(private, self.publics[node][KEY:], *of_pair)
            crypto.add_mask(words, key, 1 if self.node < node else -1)
        return words

    def unmask(self, fates: Texts) -> dict[int, bytes]:
        """Return one share of each of the group, by whether it has `SURVIVED`."""
        self._begin(3)
        same = fates.keys() == self.held.keys() and fates[self.node] == SURVIVED
        demand(same, "the server names other clients than have sent shares")
        survived = {node for node, fate in fates.items() if fate == SURVIVED}
        demand_enough(len(survived), self.threshold, "clients are left")
        shares = {
            node: share[SEED:] if node in survived else share[:SEED]
            for node, share in self.held.items()
        }
        # Nothing of the round can be revealed afterwards.
        self.seeds, self.held = [], {}
        return shares


class Coordinator:
    """The server in one round.

    Parameters
    ----------
    asked : int
        Number of clients that are asked.
    fraction : float
        ``secure-threshold``.
    neighbours : int, default 0
        Number of neighbours on a random ring; 0 for all.
    expected : float, default inf
        Number of clients whose words close the round, if these are not all.

    Attributes
    ----------
    survived : set of int
        Nodes whose words are in the sum.
    blamed : set of int
        Nodes that have sent wrong shares.
    """

    def __init__(
        self, asked: int, fraction: float, neighbours: int = 0, expected: float = inf
    ) -> None:
        self.neighbours, self.session = neighbours, os.urandom(MARK)
        in_ring = 0 < neighbours < asked - 1
        group = neighbours + 1 if in_ring else asked
        least = max(FEWEST, group // 2 + 1, expected)
        self.threshold = int(min(threshold_of(group, fraction, in_ring), least))
        self.survived, self.blamed = set[int](), set[int]()
        self._groups: dict[int, list[int]] = {}
        self._total: Any = 0

    def take_keys(self, keys: Texts) -> dict[int, dict[int, bytes]]:
        """Return for each node the keys of its group.

        Unusable keys are left out, and those that another client has sent as well.
        """
        halves = {n: (k[:KEY], k[KEY:UNSIGNED]) for n, k in keys.items()}
        count = Counter(key for pair in halves.values() for key in pair)
        self._keys = {
            node: keys[node]
            for node, pair in halves.items()
            if len(keys[node]) in (UNSIGNED, SIGNED)
            and all(count[key] == 1 and crypto.is_key(key) for key in pair)
        }
        n = len(self._keys)
        demand_enough(n, self.threshold, "clients have sent keys")
        order = random.SystemRandom().sample([*self._keys], n)
        half = self.neighbours // 2 if 0 < self.neighbours < n - 1 else n
        for i, node in enumerate(order):
            ring = {order[(i + step) % n] for step in range(-half, half + 1)}
            self._groups[node] = sorted(ring)
        return {
            node: {other: self._keys[other] for other in group}
            for node, group in self._groups.items()
        }

    def take_shares(self, shares: Mapping[int, Texts]) -> dict[int, dict[int, bytes]]:
        """Return for each node the boxes that its neighbours have sent for it."""
        self._shares = {
            node: sent
            for node, sent in shares.items()
            if sorted(sent) == self._groups.get(node)
            and {len(text) for text in sent.values()} == {BOX + 2 * MARK}
        }
        demand_enough(len(self._shares), self.threshold, "clients have sent shares")
        return {
            node: {o: self._shares[o][node][:BOX] for o in self._group(node) - {node}}
            for node in self._shares
        }

    def _group(self, node: int) -> set[int]:
        """Return those of a node's group that have sent shares."""
        return self._shares.keys() & self._groups[node]

    def take_masked(self, node: int, words: npt.NDArray[Any]) -> bool:
        """Add a node's words; return whether they count."""
        if node not in self._shares or node in self.survived:
            return False
        self._total += words
        self.survived.add(node)
        return True

    def ask_unmask(self) -> dict[int, dict[int, bytes]]:
        """Return for each survivor which of its group survived, and which did not."""
        demand_enough(len(self.survived), self.threshold, "clients have sent words")
        fates = {n: SURVIVED if n in self.survived else DROPPED for n in self._shares}
        return {
            node: {other: fates[other] for other in self._group(node)}
            for node in self.survived
        }

    def take_unmask(self, answers: Mapping[int, Texts], sent: bytes) -> Words:
        """Return the sum of the survivors' words.

        Raises `RefusedError` if too few shares are right; ``blamed`` then has the nodes
        that most of the wrong ones have in common.
        """
        needed = {owner for node in self.survived for owner in self._group(node)}
        right = {owner: dict[int, bytes]() for owner in needed}
        wrong = Counter[int]()
        for helper in answers.keys() & self.survived:
            for owner in self._group(helper):
                share = answers[helper].get(owner, b"")
                if self._is_right(owner, helper, share):
                    right[owner][self._groups[owner].index(helper) + 1] = share
                else:
                    wrong.update({owner, helper})
        seeds: dict[int, bytes] = {}
        for owner, shares in right.items():
            if len(shares) < self.threshold:
                # One hostile node is in all pairs. If the pair is a single one, either
                # could have lied, to have the other one blamed.
                most = max(wrong.values(), default=0)
                self.blamed |= {node for node, times in wrong.items() if times == most}
            demand_enough(len(shares), self.threshold, "shares are right")
            seeds[owner] = crypto.combine(shares, self.threshold)
            if not self._is_seed(owner, seeds[owner]):
                self.blamed.add(owner)
        demand(not self.blamed, f"the shares of {len(self.blamed)} clients are wrong")
        for owner, seed in seeds.items():
            if owner in self.survived:
                own = crypto.derive(seed, b"own mask", self.session)
                crypto.add_mask(self._total, own, -1)
                continue
            private, _ = crypto.key_pair(seed)
            for other in self._group(owner) & self.survived:
                about = b"pair mask", self.session, sent
                key = crypto.agree(private, self._keys[other][KEY:UNSIGNED], *about)
                # The reverse of what the survivor has added.
                crypto.add_mask(self._total, key, -1 if other < owner else 1)
        return cast(Words, self._total)

    def _is_right(self, owner: int, helper: int, share: bytes) -> bool:
        is_own, marks = owner in self.survived, self._shares[owner][helper][BOX:]
        kind, expected = (b"own", marks[MARK:]) if is_own else (b"key", marks[:MARK])
        found = mark(kind, self.session, number(owner), number(helper), share)
        return len(share) == SEED and found == expected

    def _is_seed(self, owner: int, seed: bytes) -> bool:
        if owner in self.survived:
            found = mark(b"seed", self.session, seed)
            return found == self._shares[owner][owner][:MARK]
        return crypto.key_pair(seed)[1] == self._keys[owner][KEY:UNSIGNED]
