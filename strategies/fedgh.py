"""FedGH (Yi et al., ACM MM 2023): the server trains a head on class means."""

import numpy as np
import numpy.typing as npt

from flwr_frl.common.messages import PROTOTYPE_COUNTS, PROTOTYPES
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Round
from flwr_frl.strategies.fedproto import FedProto
from flwr_frl.strategies.server.replies import Floats

# Distinguishes the draws of batches from others of the same seed.
BATCHES = 0x6A4E
HEAD = "head.weight", "head.bias"


class FedGH(FedProto, client="flwr_frl.clients.fedgh:FedGHClient", uses_mean="never"):
    """Algorithm 1: train the global head by SGD on the clients' class means.

    An example is the mean feature that a client of the round has of a class, with that
    class as the label. As in HtFLlib, they are shuffled into
    batches of ``batch-size`` and used for several epochs; the paper makes one step on
    each. Every client then receives the head. All arithmetic is in NumPy, so a server
    needs no torch.

    Parameters
    ----------
    fedgh_learning_rate : float, default 0.01
        Step size η_θ of the head (HtFLlib).
    fedgh_epochs : int, default 100
        Epochs of the head on a round's class means (HtFLlib); 0 keeps the head.
    batch_size : int, default 10
        Class means per step.
    """

    fedgh_learning_rate: float = setting(0.01, ge=0)
    fedgh_epochs: int = setting(100, ge=0)
    batch_size: int = setting(10, ge=1)

    def begin(self, round: Round) -> None:
        """Require a linear head; expect class means and counts."""
        round.need(*HEAD)
        weight = round.arrays["head.weight"]
        counts = np.zeros(len(weight), np.int64)
        round.expected = {PROTOTYPES: weight, PROTOTYPE_COUNTS: counts}

    def aggregate(self, round: Round) -> Arrays:
        """Return the head after training."""
        known = round.stack(PROTOTYPE_COUNTS) > 0
        x, y = round.stack(PROTOTYPES)[known], known.nonzero()[1]
        rng = np.random.default_rng([self.settings.seed, BATCHES, round.number])
        how = rng, self.fedgh_epochs, self.batch_size, self.fedgh_learning_rate
        return trained_head(round.arrays, x, y, *how)


def trained_head(
    arrays: Arrays,
    x: Floats,
    y: npt.NDArray[np.int64],
    rng: np.random.Generator,
    epochs: int,
    batch_size: int,
    learning_rate: float,
) -> Arrays:
    """Return the arrays of a linear head after SGD on the cross-entropy of features.

    Parameters
    ----------
    arrays : dict of str to ndarray
        Arrays of a model, with those of the head.
    x, y
        As of `gradient`.
    rng : numpy.random.Generator
        Shuffles the features in each epoch.
    epochs, batch_size, learning_rate
        Passes over the features, features per step, and step size.
    """
    head = np.column_stack([arrays[name] for name in HEAD]).astype(np.float64)
    for _ in range(epochs):
        order = rng.permutation(len(y))
        for start in range(0, len(y), batch_size):
            rows = order[start : start + batch_size]
            head -= learning_rate * gradient(head, x[rows], y[rows])
    parts = zip(HEAD, (head[:, :-1], head[:, -1]), strict=True)
    return {name: part.astype(arrays[name].dtype) for name, part in parts}


def gradient(head: Floats, x: Floats, y: npt.NDArray[np.int64]) -> Floats:
    """Return the gradient of the mean cross-entropy of a linear head.

    Parameters
    ----------
    head : ndarray, shape (classes, width + 1)
        The weight, and the bias as the last column.
    x : ndarray, shape (n, width)
        Features.
    y : ndarray of int, shape (n,)
        Classes.
    """
    inputs = np.column_stack([x, np.ones(len(x))])
    scores = inputs @ head.T
    scores = np.exp(scores - scores.max(1, keepdims=True))
    errors = scores / scores.sum(1, keepdims=True)
    errors[np.arange(len(y)), y] -= 1
    return np.asarray(errors.T @ inputs / len(y))
