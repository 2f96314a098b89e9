"""Statistical tests that compare methods on paired results.

Wilcoxon's signed-rank test of two methods on the same clients or seeds, corrected by
Holm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Differences with a larger p-value are not significant.
LEVEL = 0.05
# With five pairs, the smallest p-value of the signed-rank test is 0.0625.
FEWEST_PAIRS = 6
# Differences are rounded to this many decimals, so that equal ones are ties.
DECIMALS = 12


@dataclass(frozen=True)
class PairedTest:
    """Wilcoxon's signed-rank test of a method against a reference.

    Parameters
    ----------
    pairs : int
        Number of pairs, which are clients or seeds.
    wins, ties, losses : int
        Number of pairs in which the method is better than the reference, equally good,
        and worse.
    difference : float
        Mean of the paired differences, method minus reference.
    effect : float
        Matched-pairs rank-biserial correlation, −1 to 1: the rank sum of the wins minus
        that of the losses, divided by the sum of both. Ties are not ranked; 0 if all
        pairs are ties.
    p : float or None
        Two-sided p-value, after Holm's correction if `holm` has been applied; None with
        fewer than `FEWEST_PAIRS` pairs.
    """

    pairs: int
    wins: int
    ties: int
    losses: int
    difference: float
    effect: float
    p: float | None

    @property
    def differs(self) -> bool | None:
        """Whether the difference is significant; None if it could not be tested."""
        return None if self.p is None else self.p < LEVEL

    @property
    def entries(self) -> dict[str, Any]:
        """The test as entries of a table."""
        if self.p is None:
            p = f"{self.pairs} pairs"
        else:
            p = "<0.001" if self.p < 0.001 else f"{self.p:.3f}"
        return {
            "effect": f"{self.effect:+.2f}",
            "wins/ties/losses": f"{self.wins}/{self.ties}/{self.losses}",
            "p": p,
        }


def paired_test(
    method: Sequence[float], reference: Sequence[float], sign: int = 1
) -> PairedTest:
    """Compare paired results of a method and a reference.

    Parameters
    ----------
    method, reference : sequence of float
        The results of both, in the same order.
    sign : {1, -1}, default 1
        −1 if lower results are better.
    """
    from scipy.stats import rankdata, wilcoxon

    differences = np.round(np.subtract(method, reference), DECIMALS)
    better = sign * differences
    ranks = rankdata(abs(better[better != 0]))
    total = ranks.sum()
    effect = float(np.sign(better[better != 0]) @ ranks / total) if total else 0.0
    p = None
    if len(differences) >= FEWEST_PAIRS:
        p = float(wilcoxon(differences).pvalue) if total else 1.0
    return PairedTest(
        pairs=len(differences),
        wins=int(np.sum(better > 0)),
        ties=int(np.sum(better == 0)),
        losses=int(np.sum(better < 0)),
        difference=float(np.mean(differences)) if len(differences) else math.nan,
        effect=effect,
        p=p,
    )


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p-values with Holm's correction; None stays None and is not counted."""
    tested = sorted((p, i) for i, p in enumerate(values) if p is not None)
    corrected, largest = list(values), 0.0
    for rank, (p, i) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        corrected[i] = largest
    return corrected
