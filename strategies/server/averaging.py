"""From the replies that count to one model: weights, the rule, what is no model."""

import math
from collections.abc import Sequence
from functools import partial
from logging import WARNING
from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.common import log

from flwr_frl.strategies.server.aggregation import (
    CENTERED_CLIP,
    CENTRED,
    Reply,
    Rule,
    bucketed,
    capped,
)
from flwr_frl.strategies.server.client_manager import ClientManager
from flwr_frl.strategies.server.pending_round import PendingRound
from flwr_frl.strategies.server.privacy import ClientPrivacy, client_privacy
from flwr_frl.strategies.server.replies import (
    Arrays,
    as_float32,
    check_metrics,
    is_finite,
    to_record,
)
from flwr_frl.task.messages import NUM_EXAMPLES
from flwr_frl.task.settings import SettingsError, require

# Tells the draws of buckets from others of the same seed.
BUCKETS = 0xB0C4


class Averaging:
    """The part of a strategy that makes one model of many."""

    # Whether anything is averaged, so that a rule for it can be chosen.
    averages: ClassVar[bool] = True
    # Whether all that others get to know of a client is its part of a `mean`. A class
    # with an `aggregate` or `mean` of its own has to say so again: noise is refused for
    # it otherwise.
    supports_client_dp: ClassVar[bool] = True

    # Whether replies are changes of what was sent, and not what has come of it.
    replies_are_changes: ClassVar[bool] = False
    # Whether the shared arrays keep their names, shapes and dtypes all along.
    fixed_shapes: ClassVar[bool] = True

    arrayrecord_key: str
    aggregation: str
    bucket_size: int
    seed: int
    privacy: ClientPrivacy | None
    server_dp_noise: float
    server_dp_clip: float
    server_dp_delta: float
    pending: PendingRound
    # What the last training began with.
    trained_from: ArrayRecord | None = None
    largest_share: float
    clients: ClientManager
    _rule: Rule
    # By how much `centered-clip` has moved the model in the last round that counted.
    _last_change: Arrays
    # Settings that the last `aggregate` has used, and those of which it is said that it
    # did not.
    _used: set[str]
    _idle: set[str]
    transport: str
    weighting: str

    def aggregate(
        self, server_round: int, replies: list[Message]
    ) -> ArrayRecord | None:
        """Return the new shared arrays; the mean by default.

        Parameters
        ----------
        server_round : int
            The round.
        replies : list of Message
            Those that count, at least one, in the order of the clients' names.

        Returns
        -------
        ArrayRecord or None
            The new arrays; None keeps the old ones.
        """
        arrays = self.mean(replies)
        return None if arrays is None else to_record(arrays)

    def mean(self, replies: list[Message]) -> Arrays | None:
        """Return what ``aggregation`` makes of replies; None if all weights are 0.

        It is their mean, as ``weighting`` weighs it, unless another rule is chosen;
        with ``server-dp-noise`` a private one.
        """
        self._used |= {"aggregation", "weighting"}
        decoded = [partial(self.arrays, reply) for reply in replies]
        if self.privacy:
            return self.privacy.mean(self.counted(replies), decoded, self.centre())
        weights = self.weights(replies)
        if self.aggregation == CENTERED_CLIP:
            return self._clipped_about_last(weights, decoded)
        centre = self.centre() if self.aggregation in CENTRED else {}
        return self.rule(weights, decoded, centre)

    def _clipped_about_last(
        self, weights: Sequence[float], decoded: Sequence[Reply]
    ) -> Arrays | None:
        """Return x + v, where v is the last round's and then this round's change.

        Centered clipping with one iteration a round (Karimireddy, He and Jaggi, ICML
        2021): v ← v + mean_i (Δ_i − v) min(1, τ / ‖Δ_i − v‖), of the clients' changes
        Δ_i of what was sent, x. That is `clip` about x + v. The server alone remembers:
        v is 0 in the first round. In the paper workers send momentum besides; here a
        Δ_i is what a client's local epochs add up to, and is not averaged over rounds.
        """
        sent = self.centre()
        last = self._last_change
        centre = {n: np.add(a, last[n]) if n in last else a for n, a in sent.items()}
        moved = self.rule(weights, decoded, centre)
        if moved is not None:
            self._last_change = {
                name: np.subtract(moved[name], array)
                for name, array in sent.items()
                if array.dtype.kind == "f"
            }
        return moved

    @property
    def rule(self) -> Rule:
        """What ``aggregation`` names, over buckets where ``bucket-size`` asks for them.

        Who is in which follows from the seed and the round alone.
        """
        self._used.add("aggregation")
        if self.bucket_size < 2 or self.aggregation == "mean":
            return self._rule
        entropy = [self.seed, BUCKETS, self.pending.server_round]
        return bucketed(self._rule, self.bucket_size, np.random.default_rng(entropy))

    @rule.setter
    def rule(self, rule: Rule) -> None:
        self._rule = rule

    def counted(self, replies: list[Message]) -> list[str]:
        """Return the names of the clients whose mean change `mean` is.

        A private mean is that of all who were asked: the others have changed nothing.
        """
        if self.privacy:
            return sorted(map(self.pending.name_of, self.pending.asked))
        return self.pending.names(replies)

    def centre(self) -> Arrays:
        """Return that from which the replies differ by the clients' changes.

        It is what was sent, or zeros where replies are changes themselves.
        """
        sent = self.pending.expected[self.arrayrecord_key]
        arrays = {name: array.numpy() for name, array in sent.items()}
        if self.transport != "float32":
            arrays = as_float32(arrays)
        if self.replies_are_changes:
            return {name: np.zeros_like(array) for name, array in arrays.items()}
        return arrays

    def weights(self, replies: list[Message]) -> list[float]:
        """Return checked replies' weights: 1, or numbers of examples.

        Nobody has more examples than it said in the beginning, or ``largest-share``.
        """
        self._used.add("weighting")
        if self.weighting == "uniform":
            return [1.0] * len(replies)
        said = []
        for reply in replies:
            now = check_metrics(reply)[NUM_EXAMPLES]
            said.append(min(now, self.declared(reply, NUM_EXAMPLES)))
        return capped(said, self.largest_share)

    def make_privacy(self) -> ClientPrivacy | None:
        """Return what the settings ask for, if it can be counted for this algorithm."""
        noise, clip = self.server_dp_noise, self.server_dp_clip
        allowed = "0 for this algorithm: more is told of a client than a share of means"
        valid = self.averages and self._tells_only_means()
        require(valid or not noise, "server-dp-noise", noise, allowed)
        for name, value, only in (
            ("weighting", self.weighting, "uniform"),
            ("aggregation", self.aggregation, "mean"),
        ):
            allowed = f"{only} with server-dp-noise"
            require(value == only or not noise, name, value, allowed)
        return client_privacy(noise, clip, self.server_dp_delta)

    @classmethod
    def _tells_only_means(cls) -> bool:
        for base in cls.__mro__:
            if "supports_client_dp" in vars(base):
                return bool(vars(base)["supports_client_dp"])
            if {"aggregate", "mean"} & vars(base).keys():
                break
        return False

    def check_private(self, arrays: ArrayRecord) -> None:
        """Raise `SettingsError` if noise would make a model of these arrays useless."""
        if self.privacy is None:
            return
        for name, array in arrays.items():
            if not array.dtype.startswith("float"):
                raise SettingsError(
                    f"server-dp-noise is {self.server_dp_noise}, but the shared model "
                    f"has {name!r}, of {array.dtype}: there must be no batch norms in "
                    "what is shared, as their statistics bear no noise"
                )

    def declared(self, reply: Message, name: str) -> float:
        """Return a number of examples that a reply's client said in the beginning.

        It is infinite for one that has said none.
        """
        known = self.clients.known.get(reply.metadata.src_node_id)
        return float(known.properties.get(name, math.inf)) if known else math.inf

    def arrays(self, reply: Message) -> Arrays:
        """Return a checked reply's arrays, float16 ones of ``transport`` as float32."""
        arrays = self.pending.arrays(reply, self.arrayrecord_key)
        return arrays if self.transport == "float32" else as_float32(arrays)

    def aggregate_checked(
        self, server_round: int, replies: list[Message]
    ) -> ArrayRecord | None:
        """Return what `aggregate` makes of replies, unless it is no model."""
        self._used.clear()
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                arrays = self.aggregate(server_round, replies)
            self._warn_about_unused()
        except np.linalg.LinAlgError as error:
            log(WARNING, "round %d: %s; the old arrays stay", server_round, error)
            return None
        if arrays is None:
            text = "round %d: nothing came of %d valid replies; the old arrays stay"
            log(WARNING, text, server_round, len(replies))
            return None
        if not isinstance(arrays, ArrayRecord):
            raise SettingsError(
                f"{type(self).__name__}.aggregate returns a {type(arrays).__name__}; "
                "it must be an ArrayRecord, as `to_record` makes it, or None"
            )
        self._check_like_sent(arrays)
        if not is_finite({name: array.numpy() for name, array in arrays.items()}):
            log(WARNING, "round %d is not finite; the old arrays stay", server_round)
            return None
        return arrays

    def _warn_about_unused(self) -> None:
        """Warn once of a setting that is given and that `aggregate` has not used."""
        for name, value, usual, call in (
            ("aggregation", self.aggregation, "mean", "self.mean"),
            ("weighting", self.weighting, "uniform", "self.mean or self.weights"),
        ):
            if value != usual and name not in self._used | self._idle:
                self._idle.add(name)
                text = "%s=%s does nothing: %s.aggregate does not call %s"
                log(WARNING, text, name, value, type(self).__name__, call)

    def _check_like_sent(self, arrays: ArrayRecord) -> None:
        """Raise `SettingsError` unless clients can take arrays as they took the last.

        Otherwise every later reply would be refused, as if the clients were wrong.
        """
        sent = self.trained_from
        if sent is None or not self.fixed_shapes:
            return
        name = f"{type(self).__name__}.aggregate"
        if arrays.keys() != sent.keys():
            missing, extra = sorted({*sent} - {*arrays}), sorted({*arrays} - {*sent})
            raise SettingsError(
                f"{name} lacks arrays {missing} and has unknown arrays {extra}; it "
                "must return those that were sent, under their names"
            )
        for key, like in sent.items():
            found = arrays[key]
            if (found.dtype, tuple(found.shape)) != (like.dtype, tuple(like.shape)):
                raise SettingsError(
                    f"{name} returns {key!r} as {found.dtype}{list(found.shape)}; it "
                    f"must be {like.dtype}{list(like.shape)}, as it was sent"
                )
