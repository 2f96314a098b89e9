"""FedCGS (Guan et al., 2025) and Fed3R (Fanì et al., ICML 2024): heads in one round."""

from typing import ClassVar

import numpy as np

from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Round, Strategy
from flwr_frl.strategies.server.replies import Floats

WEIGHT, BIAS, PRIOR = "head.weight", "head.bias", "prior.log"
COUNTS, SUMS, MOMENTS = (f"statistics.{n}" for n in ("counts", "sums", "moments"))
# Added to the bias of a class that no client has.
ABSENT = -100.0


class Fed3R(
    Strategy,
    client="flwr_frl.clients.fedcgs:Fed3RClient",
    uses_mean="also",
    replies_are_changes=True,
):
    """Fit the head by ridge regression of the one-hot classes on the features.

    The head is Yᵀ Z (Zᵀ Z + λ I)⁻¹ for the features Z and the one-hot classes Y of all
    examples (section 3). Clients send sums over their examples, so one round of all
    clients gives the solution of the pooled data, whatever classes they have. A later
    round computes the head again, from the statistics of its clients.

    Here the features have a constant entry 1, whose weight is the bias and is not
    penalised; the paper has no bias, and normalises the rows of the head.

    Parameters
    ----------
    ridge : float, default 0.01
        λ > 0, relative to the mean diagonal entry of Zᵀ Z (for FedCGS: of the features'
        covariance). It makes the head unique with fewer examples than features.
    """

    ridge: float = setting(0.01, gt=0)
    _only = ("weighting", "uniform"), ("aggregation", "mean"), ("server_dp_noise", 0)
    _because = "the head is computed from sums"
    # Shared arrays that the server computes.
    computed: ClassVar[tuple[str, ...]] = (WEIGHT, BIAS)

    def begin(self, round: Round) -> None:
        """Expect statistics instead of a model."""
        round.need(*self.computed)
        classes, width = round.arrays[WEIGHT].shape
        shapes = {COUNTS: (classes,), SUMS: (classes, width), MOMENTS: (width, width)}
        round.expected = {n: np.zeros(s, np.float32) for n, s in shapes.items()}

    def aggregate(self, round: Round) -> Arrays | None:
        """Return the model with the head of the pooled statistics."""
        mean = round.mean()
        if not mean[COUNTS].any():
            return None
        # The sums over all examples
        clients = len(round.replies)
        sums = (clients * mean[n].astype(np.float64) for n in (COUNTS, SUMS, MOMENTS))
        return {**round.arrays, **self.head(*sums)}

    def head(self, counts: Floats, sums: Floats, moments: Floats) -> dict[str, Floats]:
        """Return the arrays of the head.

        Parameters
        ----------
        counts, sums, moments : ndarray, shapes (C,), (C, d) and (d, d)
            Number and Σ z of the examples of each class, and Σ z zᵀ.
        """
        total, n = sums.sum(axis=0)[:, None], counts.sum()
        gram = np.block([[self._with_ridge(moments), total], [total.T, n]])
        weights = np.column_stack([sums, counts]) @ np.linalg.pinv(gram, hermitian=True)
        return {WEIGHT: weights[:, :-1], BIAS: weights[:, -1]}

    def _with_ridge(self, square: Floats) -> Floats:
        scale = self.ridge * np.trace(square) / len(square)
        return np.asarray(square + scale * np.eye(len(square)))


class FedCGS(Fed3R, client="flwr_frl.clients.fedcgs:FedCGSClient"):
    """Use a Gaussian classifier with one covariance Σ for all classes as the head.

    With the class means μ_c and the prior π_c its outputs are the logarithms of
    π_c N(z; μ_c, Σ) up to a common term: μ_cᵀ Σ⁻¹ z − ½ μ_cᵀ Σ⁻¹ μ_c + log π_c. The
    personalised training of the paper's section on personalisation is not included.
    """

    computed = (WEIGHT, BIAS, PRIOR)

    def head(self, counts: Floats, sums: Floats, moments: Floats) -> dict[str, Floats]:
        """Return the head, and log π_c."""
        n = counts.sum()
        means = sums / np.maximum(counts, 1)[:, None]
        covariance = (moments - means.T @ sums) / n
        weight = means @ np.linalg.pinv(self._with_ridge(covariance), hermitian=True)
        log_prior = np.log((counts + 1) / (n + len(counts)))
        bias = log_prior - (weight * means).sum(axis=1) / 2 + ABSENT * (counts == 0)
        return {WEIGHT: weight, BIAS: bias, PRIOR: log_prior}
