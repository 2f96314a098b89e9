"""FedTGP (Zhang et al., AAAI 2024): the server trains global prototypes."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from flwr_frl.common.messages import PROTOTYPE_COUNTS, PROTOTYPES
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Round, stored
from flwr_frl.strategies.fedproto import FedProto


class FedTGP(FedProto, uses_mean="never"):
    """Algorithm 1: train the global prototypes against those of a round's clients.

    The prototypes are F(e_c) with trainable vectors e_c and a network F of two linear
    layers with a ReLU. A client's prototype P of class c has the loss
    −log(exp(−(d_c + δ)) / (exp(−(d_c + δ)) + Σ_{c' ≠ c} exp(−d_c'))), where d_c' is the
    Euclidean distance between P and F(e_c'). The margin δ is the minimum of
    ``fedtgp-threshold`` and the largest of the classes' distances to their nearest
    neighbour, where a class is the mean of the clients' prototypes; this is the margin
    of the authors' code (HtFLlib). F and all e_c continue in the next round, and are in
    the checkpoint.

    Clients use the prototypes as in FedProto, with ``fedproto-lambda`` as λ; HtFLlib's
    predict all classes, as with ``fedproto-predicted="all"``. ``weighting`` has no
    effect.

    Parameters
    ----------
    fedtgp_learning_rate : float, default 0.01
        Step size of F and e_c (HtFLlib).
    fedtgp_epochs : int, default 100
        Epochs on a round's prototypes (HtFLlib).
    fedtgp_threshold : float, default 100
        τ, the largest margin.
    batch_size : int, default 10
        Prototypes per step.
    """

    fedtgp_learning_rate: float = setting(0.01, gt=0)
    fedtgp_epochs: int = setting(100, ge=1)
    fedtgp_threshold: float = setting(100.0, ge=0)
    batch_size: int = setting(10, ge=1)
    # The generator's parameters
    trained: Arrays = stored("generator")

    def generator(self, classes: int, width: int) -> nn.Sequential:
        """Return e and F as one model, which maps a class to its prototype."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.settings.seed)
            first, last = (nn.Linear(width, width) for _ in range(2))
            embedding = nn.Embedding(classes, width)
        model = nn.Sequential(embedding, first, nn.ReLU(), last)
        if saved := self.trained:
            model.load_state_dict({n: torch.tensor(a) for n, a in saved.items()})
        return model

    def aggregate(self, round: Round) -> Arrays:
        """Train the generator; return its prototypes, and the numbers of clients."""
        known, means = round.stack(PROTOTYPE_COUNTS) > 0, round.stack(PROTOTYPES)
        before = round.centre()
        if not known.any():
            return before
        model = self.generator(*means.shape[1:])
        y = torch.from_numpy(known.nonzero()[1])
        prototypes = torch.from_numpy(means[known])
        margin = min(largest_gap(means, known), self.fedtgp_threshold)
        every, parameters = torch.arange(means.shape[1]), list(model.parameters())
        rng = torch.Generator().manual_seed(self.settings.seed + round.number)
        for _ in range(self.fedtgp_epochs):
            order = torch.randperm(len(y), generator=rng)
            for rows in torch.split(order, self.batch_size):
                batch = prototypes[rows], y[rows], model(every)
                gradients = torch.autograd.grad(contrast(*batch, margin), parameters)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.data.sub_(gradient, alpha=self.fedtgp_learning_rate)
        with torch.no_grad():
            global_prototypes = model(every).numpy()
        if not np.isfinite(global_prototypes).all():
            return before
        self.trained = {n: value.numpy() for n, value in model.state_dict().items()}
        counts = np.where(known.any(0), known.sum(0), before[PROTOTYPE_COUNTS])
        return {PROTOTYPES: global_prototypes, PROTOTYPE_COUNTS: counts}


def contrast(p: Tensor, y: Tensor, every: Tensor, margin: float) -> Tensor:
    """Return the mean loss of clients' prototypes.

    Parameters
    ----------
    p : Tensor, shape (n, width)
        The prototypes.
    y : Tensor of int64, shape (n,)
        Their classes.
    every : Tensor, shape (classes, width)
        The global prototypes F(e_c).
    margin : float
        δ, added to the distance from the prototype of the same class.
    """
    distances = torch.cdist(p, every, compute_mode="donot_use_mm_for_euclid_dist")
    return cross_entropy(-distances - margin * one_hot(y, len(every)), y)


def largest_gap(means: npt.NDArray[Any], known: npt.NDArray[np.bool_]) -> float:
    """Return the largest distance of a class to the nearest other one.

    Parameters
    ----------
    means : ndarray, shape (n, classes, width)
        Prototypes of each client; a class is at the mean of those of its clients.
    known : ndarray of bool, shape (n, classes)
        Whether a client has the class. If all have the same single class, the gap is ∞.
    """
    totals = (means * known[..., None]).sum(0, dtype=np.float64)
    centres = (totals / known.sum(0).clip(min=1)[:, None])[known.any(0)]
    distances = np.linalg.norm(centres[:, None] - centres, axis=2)
    np.fill_diagonal(distances, np.inf)
    return float(distances.min(1).max())
