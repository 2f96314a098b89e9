"""Rules by which replies become one model, whatever some of them say.

All get the replies in the order of the clients' names. `mean` and `clip` hold one
running sum, whatever the number of clients. `median`, `trimmed_mean`, `multi_krum` and
`geometric_median` look at all clients' values of an array at once: besides the replies
themselves, which lie in memory anyway, that takes n times the largest array in float64.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt

from flwr_frl.strategies.server.replies import Arrays, NDArray, mean, rounded_to

Floats = npt.NDArray[np.float64]
# One client's arrays, decoded when they are asked for.
Reply = Callable[[], Arrays]
Sent = Mapping[str, NDArray]
Rule = Callable[[Sequence[float], Sequence[Reply], Sent], Arrays | None]

# `clip` about the point where the model would be if it moved as in the last round.
CENTERED_CLIP = "centered-clip"
RULES = (
    "mean",
    "median",
    "trimmed-mean",
    "clip",
    CENTERED_CLIP,
    "multi-krum",
    "geometric-median",
)
# Those that can weigh clients; in the others each has one vote.
WEIGHED = ("mean", "clip", CENTERED_CLIP, "geometric-median")
# Those that need to know what was sent.
CENTRED = ("clip", CENTERED_CLIP, "multi-krum", "geometric-median")
# The smoothed Weiszfeld algorithm's ν, as in its authors' experiments, and its
# iterations: they make do with 3, as each is an exchange with the clients there.
SMOOTHING, ITERATIONS = 1e-6, 100


def make_rule(name: str, byzantine_fraction: float, clip_norm: float) -> Rule:
    """Return the rule of this name.

    Parameters
    ----------
    name : str
        One of `RULES`.
    byzantine_fraction : float
        Share of the replies that may be lies, for `trimmed_mean` and `multi_krum`.
    clip_norm : float
        For `clip`, of both names.
    """
    rules: dict[str, Rule] = {
        "mean": weighted_mean,
        "median": by_coordinate(median),
        "trimmed-mean": by_coordinate(partial(trimmed_mean, share=byzantine_fraction)),
        "clip": partial(clip, bound=clip_norm),
        CENTERED_CLIP: partial(clip, bound=clip_norm),
        "multi-krum": partial(multi_krum, share=byzantine_fraction),
        "geometric-median": geometric_median,
    }
    return rules[name]


def weighted_mean(
    weights: Sequence[float], replies: Sequence[Reply], sent: Sent
) -> Arrays | None:
    """Return the mean; one liar moves it wherever it likes."""
    return mean((w, reply()) for w, reply in zip(weights, replies, strict=True))


def by_coordinate(combine: Callable[[Floats], Floats]) -> Rule:
    """Return the rule that combines the values of each entry by themselves.

    ``combine`` takes values of shape (n, …), which it may sort, to shape (…).
    """

    def rule(weights: Sequence[float], replies: Sequence[Reply], sent: Sent) -> Arrays:
        # The replies are views of what was received, and not copied as a whole.
        decoded = [reply() for reply in replies]
        found: Arrays = {}
        for name, like in decoded[0].items():
            stacked = np.stack([d[name] for d in decoded]).astype(np.float64)
            found[name] = rounded_to(like.dtype, combine(stacked))
        return found

    return rule


def median(values: Floats) -> Floats:
    """Return the median over the first axis (Yin et al., ICML 2018)."""
    return np.asarray(np.median(values, axis=0, overwrite_input=True))


def trimmed_mean(values: Floats, share: float) -> Floats:
    """Return the mean without the largest and smallest values of each entry.

    Of n, as many as `assumed_byzantine` says are left out at either end (Yin et al.).
    """
    cut = assumed_byzantine(len(values), share)
    values.sort(axis=0)
    return np.asarray(values[cut : len(values) - cut].mean(axis=0))


def clip(
    weights: Sequence[float],
    replies: Sequence[Reply],
    sent: Sent,
    bound: float,
) -> Arrays | None:
    """Return what was sent and the mean of the clients' changes, none of them long.

    A change is scaled down to the norm ``bound``; where that is 0, to the median of
    this round's norms, so that the more than half that are honest say how long a change
    may be (cf. Karimireddy et al., ICML 2021). Of counters, as batch norms have them,
    the median counts: they have no length beside weights.
    """
    centre = {name: value.astype(np.float64) for name, value in sent.items()}

    def changes() -> Iterable[dict[str, Floats]]:
        for reply in replies:
            yield {n: np.subtract(v, centre[n]) for n, v in reply().items()}

    weighed = [name for name in sent if _is_float(sent[name])]
    norms = [norm({n: change[n] for n in weighed}) for change in changes()]
    bound = bound or float(np.median(norms))
    factors = [min(1.0, bound / length) if length else 1.0 for length in norms]
    scaled: Iterable[Arrays] = (
        {name: value * factor for name, value in change.items()}
        for change, factor in zip(changes(), factors, strict=True)
    )
    step = mean(zip(weights, scaled, strict=True))
    if step is None:
        return None
    likes = replies[0]()
    for name in (n for n in step if not _is_float(sent[n])):
        step[name] = np.median([change[name] for change in changes()], axis=0)
    return {n: rounded_to(likes[n].dtype, np.add(centre[n], step[n])) for n in step}


def multi_krum(
    weights: Sequence[float],
    replies: Sequence[Reply],
    sent: Sent,
    share: float,
) -> Arrays | None:
    """Return the mean of the n − f replies that lie closest together.

    f is what `assumed_byzantine` says; closest are those with the smallest sums of
    squared distances to their n − f − 2 nearest (Blanchard et al., NeurIPS 2017).
    Counters, as batch norms have them, are no part of a distance.
    """
    decoded = [reply() for reply in replies]
    n = len(decoded)
    f = assumed_byzantine(n, share)
    distances = np.zeros((n, n))
    for flat in _changes(decoded, sent):
        squares = np.square(flat).sum(axis=1)
        distances += squares[:, None] + squares[None] - 2 * (flat @ flat.T)
    np.fill_diagonal(distances, np.inf)
    nearest = np.sort(distances, axis=1)[:, : max(1, n - f - 2)]
    scores = nearest.sum(axis=1) if n > 1 else np.zeros(1)
    chosen = sorted(np.argsort(scores, kind="stable")[: n - f])
    return mean((1.0, decoded[i]) for i in chosen)


def geometric_median(
    weights: Sequence[float], replies: Sequence[Reply], sent: Sent
) -> Arrays | None:
    """Return the point v with the least weighted sum of distances to the replies x_i.

    The smoothed Weiszfeld algorithm of RFA (Pillutla, Kakade and Harchaoui, IEEE
    Transactions on Signal Processing 2022): v becomes the mean of the replies with the
    weights w_i / max(ν, ‖v − x_i‖), again and again. It starts at what was sent, which
    no reply can move. Of counters, as batch norms have them, the median counts.
    """
    decoded = [reply() for reply in replies]
    n = len(decoded)
    # Every v but the first is a mean of the replies. With c_i as its weights, its
    # distances to them follow from the inner products of the changes.
    products = np.zeros((n, n))
    for flat in _changes(decoded, sent):
        products += flat @ flat.T
    c, votes = np.zeros(n), np.asarray(weights, np.float64)
    if votes.sum() == 0:
        return None
    for _ in range(ITERATIONS):
        along = products @ c
        squares = products.diagonal() - 2 * along + c @ along
        c = votes / np.maximum(np.sqrt(np.maximum(squares, 0)), SMOOTHING)
        c /= c.sum()
    found = cast(Arrays, mean(zip(c, decoded, strict=True)))
    for name in (name for name in sent if not _is_float(sent[name])):
        values = np.stack([d[name] for d in decoded]).astype(np.float64)
        found[name] = rounded_to(found[name].dtype, median(values))
    return found


def bucketed(rule: Rule, size: int, rng: np.random.Generator) -> Rule:
    """Return a rule that gets the means of buckets of replies in the replies' place.

    The replies are put into buckets of ``size`` in a random order (Karimireddy, He and
    Jaggi, ICLR 2022). So what differs from client to client because its data do is
    averaged out before the rule takes it for a lie. The last bucket may have fewer; a
    bucket weighs as much as its replies together.
    """

    def rule_of_buckets(
        weights: Sequence[float], replies: Sequence[Reply], sent: Sent
    ) -> Arrays | None:
        order = rng.permutation(len(replies))
        buckets = [order[i : i + size] for i in range(0, len(order), size)]
        totals = [float(sum(weights[i] for i in bucket)) for bucket in buckets]

        def mean_of(bucket: npt.NDArray[np.int_]) -> Arrays:
            return cast(Arrays, mean((weights[i], replies[i]()) for i in bucket))

        # Clients that all weigh nothing have no mean.
        weighty = [i for i, total in enumerate(totals) if total]
        if not weighty:
            return None
        means = [partial(mean_of, buckets[i]) for i in weighty]
        return rule([totals[i] for i in weighty], means, sent)

    return rule_of_buckets


def _changes(decoded: Sequence[Arrays], sent: Sent) -> Iterator[Floats]:
    """Yield the clients' changes of each array that has lengths, of shape (n, size).

    Differences to what was sent, as sums of large squares say little of small
    distances.
    """
    for name, value in sent.items():
        if _is_float(value):
            flat = np.stack([d[name].astype(np.float64).ravel() for d in decoded])
            flat -= value.astype(np.float64).ravel()
            yield flat


def assumed_byzantine(n: int, share: float) -> int:
    """Return how many of n replies may be lies: the share, rounded up, below half."""
    return min(int(np.ceil(share * n - 1e-9)), (n - 1) // 2)


def _is_float(array: NDArray) -> bool:
    return array.dtype.kind == "f"


def norm(arrays: Mapping[str, NDArray]) -> float:
    """Return the Euclidean norm of all arrays together."""
    return float(np.sqrt(sum(np.square(a).sum() for a in arrays.values())))


def capped(weights: Sequence[float], share: float) -> list[float]:
    """Return weights of which none is more than a share of their sum.

    The largest are cut down to the same weight, the others stay. Where there are too
    few for the share, all that are not 0 become equal. Of one or two nobody can say
    who has too much: they stay.
    """
    if len(weights) < 3:
        return list(weights)
    total, ordered = sum(weights), sorted(weights, reverse=True)
    for count, weight in enumerate(ordered):
        rest = total - sum(ordered[:count])
        if count * share >= 1 or (count and rest <= 0):
            break
        limit = share * rest / (1 - count * share)
        if weight <= limit * (1 + 1e-12):
            return [min(w, limit) for w in weights] if count else list(weights)
    return [float(w > 0) for w in weights]
