"""CCVR (Luo et al., NeurIPS 2021): fit the head to virtual features in the end."""

import numpy as np

from flwr_frl.common.messages import CALIBRATE
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Reply, Round, Strategy
from flwr_frl.strategies.fedgh import HEAD, trained_head
from flwr_frl.strategies.fedproto import LARGEST_ENTRY, check_range
from flwr_frl.strategies.server.replies import Floats

COUNTS, MEANS, COVARIANCES = (
    f"statistics.{name}" for name in ("counts", "means", "covariances")
)
# Distinguishes the draws of virtual features from others of the same seed.
VIRTUAL = 0xCC74


class CCVR(
    Strategy,
    client="flwr_frl.clients.ccvr:CCVRClient",
    # The calibrated head is that of the last round.
    evaluate_last_round_only=True,
):
    """FedAvg, whose head is calibrated in the last round (algorithm 1).

    In the last round nothing is trained: all connected clients send the number, the
    mean and the covariance of their features of each class. From these follow the mean
    μ_c and the covariance Σ_c of all clients' features of class c (equations 3 and 4).
    The server draws virtual features from N(μ_c, Σ_c), in proportion to the examples of
    each class, and trains the head on them by SGD, from its last value. The
    representation stays as it is. All arithmetic is in NumPy.

    The paper calibrates after the last round, and also after other methods than FedAvg;
    here a run of T rounds trains in T − 1 of them. A run that is stopped early is not
    calibrated, and one that is resumed with more rounds continues from the calibrated
    head. Clients send covariances with d² numbers for each class and d features.

    Parameters
    ----------
    ccvr_features : int, default 500
        Mean number of virtual features of a class.
    ccvr_epochs : int, default 10
        Epochs on the virtual features; 0 keeps the head.
    ccvr_learning_rate : float, default 0.01
        Step size of the head.
    batch_size : int, default 10
        Virtual features per step.
    num_server_rounds : int, default 30
        The round of the calibration.
    **base
        Arguments of `Strategy`. ``aggregation`` and ``weighting`` apply to the other
        rounds.
    """

    ccvr_features: int = setting(500, ge=1)
    ccvr_epochs: int = setting(10, ge=0)
    ccvr_learning_rate: float = setting(0.01, gt=0)
    batch_size: int = setting(10, ge=1)
    num_server_rounds: int = setting(30, ge=1, may_differ="on resume")

    def sample(self, server_round: int, nodes: list[int]) -> list[int]:
        """Return all nodes in the last round."""
        if server_round == self.num_server_rounds:
            return nodes
        return super().sample(server_round, nodes)

    def begin(self, round: Round) -> None:
        """Ask for statistics in the last round."""
        round.need(*HEAD)
        if round.number != self.num_server_rounds:
            return
        round.config[CALIBRATE] = True
        classes, width = round.arrays["head.weight"].shape
        shapes = {MEANS: (classes, width), COVARIANCES: (classes, width, width)}
        round.expected = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
        round.expected[COUNTS] = np.zeros(classes, np.int64)

    def check_reply(self, reply: Reply) -> None:
        """Reject negative numbers of examples and huge statistics."""
        if COUNTS in reply.read():
            check_range(reply, COUNTS, 0, np.inf)
            check_range(reply, MEANS, -LARGEST_ENTRY, LARGEST_ENTRY)
            check_range(reply, COVARIANCES, -(LARGEST_ENTRY**2), LARGEST_ENTRY**2)

    def aggregate(self, round: Round) -> Arrays | None:
        """Return the mean of the models; in the last round the calibrated model."""
        if round.expected is None:
            return round.mean()
        stacked = (round.stack(name) for name in (COUNTS, MEANS, COVARIANCES))
        counts, means, covariances = pooled(*(a.astype(np.float64) for a in stacked))
        if not counts.any():
            return None
        rng = np.random.default_rng([self.settings.seed, VIRTUAL, round.number])
        shares = counts / counts.sum() * len(counts)
        drawn = np.rint(self.ccvr_features * shares).astype(int)
        x, y = list[Floats](), np.repeat(np.arange(len(drawn)), drawn)
        for count, mean, covariance in zip(drawn, means, covariances, strict=True):
            normal = rng.standard_normal((count, len(mean)))
            x.append(mean + normal @ root(covariance))
        how = self.ccvr_epochs, self.batch_size, self.ccvr_learning_rate
        head = trained_head(round.arrays, np.concatenate(x), y, rng, *how)
        return {**round.arrays, **head}


def pooled(
    counts: Floats, means: Floats, covariances: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return number, mean and covariance of each class over all clients.

    The covariance is that of equation 4, written as the sum of the scatter within the
    clients and between their means, over n_c − 1; 0 if there is one example.

    Parameters
    ----------
    counts, means, covariances : ndarray, shapes (n, C), (n, C, d) and (n, C, d, d)
        The statistics of n clients.
    """
    total = counts.sum(0)
    pooled_means = np.einsum("kc,kcd->cd", counts, means)
    pooled_means /= np.maximum(total, 1)[:, None]
    gaps = means - pooled_means
    within = np.einsum("kc,kcde->cde", np.maximum(counts - 1, 0), covariances)
    between = np.einsum("kc,kcd,kce->cde", counts, gaps, gaps)
    divisor = np.maximum(total - 1, 1)[:, None, None]
    return total, pooled_means, (within + between) / divisor


def root(covariance: Floats) -> Floats:
    """Return the symmetric square root; negative eigenvalues count as 0."""
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T)
