"""Aggregation rules: the mean, and rules that are robust to Byzantine clients.

All rules get the replies in the order of the clients' names. `mean` and `clip`
hold one running sum, regardless of the number of clients. `median`, `trimmed_mean`,
`multi_krum` and `geometric_median` hold all clients' values of an array at once:
besides the replies themselves, that takes n times the largest array in float64.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, cast, get_args

import numpy as np

from flwr_frl.common.arrays import is_finite
from flwr_frl.strategies.server.replies import Arrays, Floats, NDArray, mean, rounded_to

Sent = Mapping[str, NDArray]
Rule = Callable[[Sequence[float], Sequence[Arrays], Sent], Arrays | None]

# `clip` around the model that repeating the last round's change would give.
CENTERED_CLIP = "centered-clip"
RuleName = Literal[
    "mean",
    "median",
    "trimmed-mean",
    "clip",
    "centered-clip",
    "multi-krum",
    "geometric-median",
]
RULES = get_args(RuleName)
# ν of the smoothed Weiszfeld algorithm, as in its authors' experiments, and its number
# of iterations. The authors use 3, as there each is a round with the clients.
SMOOTHING, ITERATIONS = 1e-6, 100


def make_rule(name: str, byzantine_fraction: float, clip_norm: float) -> Rule:
    """Return the rule of this name.

    Parameters
    ----------
    name : str
        One of `RULES`.
    byzantine_fraction : float
        Fraction of Byzantine replies, for `trimmed_mean` and `multi_krum`.
    clip_norm : float
        Bound of ``clip`` and ``centered-clip``.
    """
    trimmed = partial(trimmed_mean, share=byzantine_fraction)
    rules: dict[str, Rule] = {
        "mean": lambda weights, replies, sent: mean(zip(weights, replies, strict=True)),
        "median": lambda weights, replies, sent: by_coordinate(median, replies),
        "trimmed-mean": lambda weights, replies, sent: by_coordinate(trimmed, replies),
        "clip": partial(clip, bound=clip_norm),
        CENTERED_CLIP: partial(clip, bound=clip_norm),
        "multi-krum": partial(multi_krum, share=byzantine_fraction),
        "geometric-median": geometric_median,
    }
    return rules[name]


def by_coordinate(
    combine: Callable[[Floats], Floats], replies: Sequence[Arrays]
) -> Arrays:
    """Combine the values of each entry independently.

    ``combine`` maps values of shape (n, …), which it may sort in place, to shape (…).
    """
    combined: Arrays = {}
    for name, like in replies[0].items():
        stacked = np.stack([r[name] for r in replies]).astype(np.float64)
        combined[name] = rounded_to(like.dtype, combine(stacked))
    return combined


def median(values: Floats) -> Floats:
    """Return the median over the first axis (Yin et al., ICML 2018)."""
    return np.asarray(np.median(values, axis=0, overwrite_input=True))


def trimmed_mean(values: Floats, share: float) -> Floats:
    """Return the mean without the largest and smallest values of each entry.

    `assumed_byzantine` of them are left out at either end (Yin et al.).
    """
    cut = assumed_byzantine(len(values), share)
    values.sort(axis=0)
    return np.asarray(values[cut : len(values) - cut].mean(axis=0))


def clip(
    weights: Sequence[float], replies: Sequence[Arrays], sent: Sent, bound: float
) -> Arrays | None:
    """Return the sent arrays plus the mean of the clients' clipped changes.

    A change is scaled down to the norm ``bound``. If that is 0, it is scaled to the
    median of this round's norms, which an honest majority determines (cf. Karimireddy
    et al., ICML 2021). Integer arrays, such as batch norms' counters, have no part in
    the norm; their median is used.
    """
    centre = {name: value.astype(np.float64) for name, value in sent.items()}

    def client_changes() -> Iterable[dict[str, Floats]]:
        for reply in replies:
            yield {n: np.subtract(v, centre[n]) for n, v in reply.items()}

    weighed = [name for name in sent if _is_float(sent[name])]
    norms = [norm({n: change[n] for n in weighed}) for change in client_changes()]
    bound = bound or float(np.median(norms))
    factors = [min(1.0, bound / length) if length else 1.0 for length in norms]
    scaled: Iterable[Arrays] = (
        {name: value * factor for name, value in change.items()}
        for change, factor in zip(client_changes(), factors, strict=True)
    )
    step = mean(zip(weights, scaled, strict=True))
    if step is None:
        return None
    for name in (n for n in step if not _is_float(sent[n])):
        step[name] = np.median([change[name] for change in client_changes()], axis=0)
    moved = {name: np.add(centre[name], change) for name, change in step.items()}
    return {n: rounded_to(replies[0][n].dtype, value) for n, value in moved.items()}


def about_last_change(
    combine: Callable[[Sent], Arrays | None], sent: Sent, last: Sent
) -> tuple[Arrays | None, Arrays]:
    """Return x + v and v, the last round's change, updated by this round's replies.

    Centered clipping with one iteration a round (Karimireddy, He and Jaggi, ICML 2021):
    v ← v + mean_i (Δ_i − v) min(1, τ / ‖Δ_i − v‖), where Δ_i are the clients' changes
    of x, which was sent. This equals `clip` about x + v, with v = 0 in the first round.
    In the paper workers send momentum; here Δ_i is a client's total change in this
    round, without momentum across rounds. ``combine`` is `clip` about its argument.
    """
    centre = {n: np.add(a, last[n]) if n in last else a for n, a in sent.items()}
    moved = combine(centre)
    if moved is None:
        return None, {}
    floats = (name for name, array in sent.items() if _is_float(array))
    # The difference of two scalars is no array.
    change = {n: np.asarray(np.subtract(moved[n], sent[n])) for n in floats}
    # An infinite v would make the results of all later rounds unusable.
    return moved, change if is_finite(*change.values()) else {}


def multi_krum(
    weights: Sequence[float], replies: Sequence[Arrays], sent: Sent, share: float
) -> Arrays | None:
    """Return the mean of the n − f replies that lie closest together.

    f is `assumed_byzantine`. The closest replies have the smallest sums of squared
    distances to their n − f − 2 nearest ones (Blanchard et al., NeurIPS 2017). Integer
    arrays, such as batch norms' counters, have no part in the distance.
    """
    n = len(replies)
    f = assumed_byzantine(n, share)
    distances = np.zeros((n, n))
    for flat in changes(replies, sent):
        squares = np.square(flat).sum(axis=1)
        distances += squares[:, None] + squares[None] - 2 * (flat @ flat.T)
    np.fill_diagonal(distances, np.inf)
    nearest = np.sort(distances, axis=1)[:, : max(1, n - f - 2)]
    scores = nearest.sum(axis=1) if n > 1 else np.zeros(1)
    chosen = sorted(np.argsort(scores, kind="stable")[: n - f])
    return mean((1.0, replies[i]) for i in chosen)


def geometric_median(
    weights: Sequence[float], replies: Sequence[Arrays], sent: Sent
) -> Arrays | None:
    """Return the point v with the least weighted sum of distances to the replies x_i.

    The smoothed Weiszfeld algorithm of RFA (Pillutla, Kakade and Harchaoui, IEEE
    Transactions on Signal Processing 2022): v is repeatedly replaced by the mean of the
    replies with the weights w_i / max(ν, ‖v − x_i‖). It starts at the sent arrays,
    which no reply can move. For integer arrays the median is used.
    """
    n = len(replies)
    # Every v but the first is a mean of the replies. With c_i as its weights, its
    # distances to them follow from the inner products of the changes.
    products = inner_products(replies, sent)
    c, votes = np.zeros(n), np.asarray(weights, np.float64)
    if votes.sum() == 0:
        return None
    for _ in range(ITERATIONS):
        along = products @ c
        squares = products.diagonal() - 2 * along + c @ along
        c = votes / np.maximum(np.sqrt(np.maximum(squares, 0)), SMOOTHING)
        c /= c.sum()
    result = cast(Arrays, mean(zip(c, replies, strict=True)))
    integers = [name for name in sent if not _is_float(sent[name])]
    counters = [{name: reply[name] for name in integers} for reply in replies]
    return result | by_coordinate(median, counters)


def changes(replies: Sequence[Arrays], sent: Sent) -> Iterator[Floats]:
    """Yield the clients' changes of each floating-point array, of shape (n, size).

    Changes rather than values, as small distances vanish in sums of large squares.
    """
    for name, value in sent.items():
        if _is_float(value):
            flat = np.stack([r[name].astype(np.float64).ravel() for r in replies])
            flat -= value.astype(np.float64).ravel()
            yield flat


def inner_products(replies: Sequence[Arrays], sent: Sent) -> Floats:
    """Return the inner products of the replies' changes, over all float arrays."""
    zeros = np.zeros((len(replies), len(replies)))
    return sum((flat @ flat.T for flat in changes(replies, sent)), zeros)


def cosines(replies: Sequence[Arrays], sent: Sent) -> Floats:
    """Return the cosines of the replies' changes, of shape (n, n); 0 without change."""
    products = inner_products(replies, sent)
    norms = np.sqrt(np.maximum(products.diagonal(), np.finfo(float).tiny))
    return np.asarray(products / np.outer(norms, norms))


def assumed_byzantine(n: int, share: float) -> int:
    """Return the assumed number of Byzantine replies: ⌈share · n⌉, below n/2."""
    return min(int(np.ceil(share * n - 1e-9)), (n - 1) // 2)


def least_replies(rule: str, n: int, share: float) -> int:
    """Return how many first replies of n clients a rule needs.

    All f = `assumed_byzantine` clients may be the fastest. The others must outvote
    them; Multi-Krum needs 2f + 3 replies (Blanchard et al., NeurIPS 2017), as f equal
    replies otherwise have the best scores. All n replies are enough, as in other
    rounds.
    """
    if rule == "mean":
        return 1
    others = 2 * assumed_byzantine(n, share) + (2 if rule == "multi-krum" else 0)
    return min(others + 1, n)


def _is_float(array: NDArray) -> bool:
    return array.dtype.kind == "f"


def norm(arrays: Mapping[str, NDArray]) -> float:
    """Return the Euclidean norm of all arrays together."""
    return float(np.sqrt(sum(np.square(a).sum() for a in arrays.values())))
