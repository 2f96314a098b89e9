"""Rules by which replies become one model, whatever some of them say.

All get the replies in the order of the clients' names. `mean` and `clip` hold one
running sum, whatever the number of clients. `median`, `trimmed_mean` and `multi_krum`
look at all clients' values of an array at once: besides the replies themselves, which
lie in memory anyway, that takes n times the largest array in float64.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from strategies.server.replies import Arrays, NDArray, mean, rounded_to

Floats = npt.NDArray[np.float64]
# One client's arrays, decoded when they are asked for.
Reply = Callable[[], Arrays]
Sent = Mapping[str, NDArray]
Rule = Callable[[Sequence[float], Sequence[Reply], Sent], Arrays | None]

RULES = ("mean", "median", "trimmed-mean", "clip", "multi-krum")
# Those that can weigh clients; in the others each has one vote.
WEIGHED = ("mean", "clip")
# Those that need to know what was sent.
CENTRED = ("clip", "multi-krum")


def make_rule(name: str, liar_share: float, clip_norm: float) -> Rule:
    """Return the rule of this name.

    Parameters
    ----------
    name : str
        One of `RULES`.
    liar_share : float
        Share of the replies that may be lies, for `trimmed_mean` and `multi_krum`.
    clip_norm : float
        For `clip`.
    """
    rules: dict[str, Rule] = {
        "mean": weighted_mean,
        "median": by_coordinate(median),
        "trimmed-mean": by_coordinate(partial(trimmed_mean, share=liar_share)),
        "clip": partial(clip, bound=clip_norm),
        "multi-krum": partial(multi_krum, share=liar_share),
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

    Of n, as many as `assumed_liars` says are left out at either end (Yin et al.).
    """
    cut = assumed_liars(len(values), share)
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

    f is what `assumed_liars` says; closest are those with the smallest sums of squared
    distances to their n − f − 2 nearest (Blanchard et al., NeurIPS 2017). Counters, as
    batch norms have them, are no part of a distance.
    """
    decoded = [reply() for reply in replies]
    n = len(decoded)
    f = assumed_liars(n, share)
    distances = np.zeros((n, n))
    for name, value in sent.items():
        if not _is_float(value):
            continue
        # Differences to what was sent, as sums of large squares say little of small
        # distances.
        flat = np.stack([d[name].astype(np.float64).ravel() for d in decoded])
        flat -= value.astype(np.float64).ravel()
        squares = np.square(flat).sum(axis=1)
        distances += squares[:, None] + squares[None] - 2 * (flat @ flat.T)
    np.fill_diagonal(distances, np.inf)
    nearest = np.sort(distances, axis=1)[:, : max(1, n - f - 2)]
    scores = nearest.sum(axis=1) if n > 1 else np.zeros(1)
    chosen = sorted(np.argsort(scores, kind="stable")[: n - f])
    return mean((1.0, decoded[i]) for i in chosen)


def assumed_liars(n: int, share: float) -> int:
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
