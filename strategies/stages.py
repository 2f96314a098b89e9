"""The lengths of SRPFL's stages (Tziotis et al., TMLR 2023, section 4 and appendix B).

`flwr_frl.strategies.srpfl.FirstReplies` waits for n0 replies in the first stage, and
for twice as many in each further one.
"""

import math

from flwr_frl.common.settings import require
from flwr_frl.strategies.grids.speeds import Times


def theory_stages(
    initial_nodes: int, expected_arrivals: Times, contraction: float
) -> list[int]:
    """Return the lengths of all stages but the last by the theory (section 4).

    Stage r, with n = 2^r n0 replies, has
    2 log(2 (E[T_(2n)] − E[T_(n)]) / (E[T_(n)] − E[T_(n/2)])) / log(1/(1 − a)) rounds,
    rounded up and at least 1, where a is the contraction. ``expected_arrivals`` are
    E[T_(n)], the expected time of the n-th reply, for n = 1 … N.
    """
    total = len(expected_arrivals)

    def arrival(n: int) -> float:
        return float(expected_arrivals[min(n, total) - 1]) if n else 0.0

    lengths, n = [], initial_nodes
    while n < total:
        later, earlier = arrival(2 * n) - arrival(n), arrival(n) - arrival(n // 2)
        ratio = 2 * later / earlier if earlier > 0 else 1.0
        rounds = 2 * math.log(max(ratio, 1.0)) / -math.log1p(-contraction)
        lengths.append(max(1, math.ceil(rounds)))
        n *= 2
    return lengths or [1]


def exact_stages(
    initial_nodes: int,
    expected_arrivals: Times,
    contraction: float,
    communication_time: float = 0.0,
) -> list[int]:
    """Return the lengths of all stages but the last by equations (202) and (207).

    With n = 2^r n0 replies, a round takes E[T_(n)] + C and changes the distance X to
    X √(1 − a) + a / √(2^r (1 − a)) (199). Doubling pays off below
    X_{r+1} = F_r (1 + (E[T_(n)] + C) (1 − 1/√2) / (E[T_(2n)] − E[T_(n)])), where
    F_r = a / (√(2^r (1 − a)) (1 − √(1 − a))) is the limit of the stage (202).
    Stage r has the fewest rounds from X_r to X_{r+1}:
    log((X_r − F_r) / (X_{r+1} − F_r)) / log(1 / √(1 − a)), rounded up (207). The first
    stage begins at the largest distance, 1. `theory_stages` is an upper bound of this.

    Parameters
    ----------
    initial_nodes, expected_arrivals, contraction
        See `theory_stages`.
    communication_time : float, default 0
        C, in the unit of the arrivals.
    """
    total, root = len(expected_arrivals), math.sqrt(1 - contraction)

    def arrival(n: int) -> float:
        return float(expected_arrivals[min(n, total) - 1])

    lengths, n, distance = list[int](), initial_nodes, 1.0
    while n < total:
        # F_r, where a / (1 − √(1 − a)) is 1 + √(1 − a).
        limit = (1 + root) / (root * math.sqrt(2 ** len(lengths)))
        later = arrival(2 * n) - arrival(n)
        saved = (arrival(n) + communication_time) * (1 - 1 / math.sqrt(2))
        # If 2 n clients take no longer than n, doubling pays off at any distance.
        last = limit * (1 + saved / later) if later > 0 else distance
        rounds = 0.0
        if last < distance:
            allowed = "above 0 with rounds-per-stage='theory-exact', as otherwise the "
            allowed += f"first {n} clients, who need no time, would train alone"
            require(last > limit, "communication-time", communication_time, allowed)
            ratio = (distance - limit) / (last - limit)
            rounds = 2 * math.log(ratio) / -math.log1p(-contraction)
        lengths.append(math.ceil(rounds))
        n, distance = 2 * n, last
    return lengths or [1]
