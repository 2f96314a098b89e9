"""Conformal prediction: sets of classes, or intervals, that contain the target.

Split conformal prediction (Papadopoulos et al., 2002; Angelopoulos and Bates, 2023,
section 1): if a client's validation and test examples are exchangeable, the sets
contain the target with a probability of at least the coverage, for any model that was
not trained on them. The nonconformity score of a class is 1 - p (Sadinle et al., 2019),
which gives the smallest sets on average; some are empty if the model is more accurate
than the coverage.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from flwr_frl.common.settings import require
from flwr_frl.task.examples import are_classes
from flwr_frl.task.metrics import brier_score, ece, probabilities

# The outputs of a model and the targets.
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Conformal:
    """How a client makes its prediction sets.

    Parameters
    ----------
    coverage : float
        Probability, between 0 and 1, with which a set contains the target.
    """

    coverage: float

    def calibrated(self, validation: Pair) -> "PredictionSets":
        """Return a client's prediction sets, given its validation examples."""
        return PredictionSets(self.coverage, self.threshold(validation))

    def threshold(self, validation: Pair) -> float:
        """Return the largest nonconformity score in a client's prediction sets.

        With n validation examples, let k = ⌈(n + 1) · coverage⌉. The threshold is the
        k-th smallest of the scores of their targets. If k is above n, which happens for
        n below coverage / (1 - coverage), it is infinite: sets contain everything.
        """
        scores = self._target_scores(validation)
        rank = math.ceil((len(scores) + 1) * self.coverage - 1e-9)
        if rank > len(scores):
            return math.inf
        return scores.kthvalue(rank).values.item()

    def metrics(
        self, validation: Pair, test: Pair, unit: float = 1.0
    ) -> dict[str, float]:
        """Return the coverage and size of prediction sets, and calibration errors.

        Parameters
        ----------
        validation, test : tuple of Tensor
            Outputs and targets.
        unit : float, default 1
            Unit of numbers, in which ``interval-width`` is given.

        Returns
        -------
        dict
            ``coverage``, the share of test targets in their sets. For classes
            ``set-size``, the mean number of classes in a set, ``ece`` and
            ``brier-score``; for numbers ``interval-width``, which may be infinite. It
            is empty without test targets.
        """
        sets = self.calibrated(validation)
        covered = self._target_scores(test) <= sets.threshold
        if not len(covered):
            return {}
        metrics = {"coverage": covered.double().mean().item()}
        if _has_classes(test):
            members = sets.members(probabilities(*test)[0])
            metrics["set-size"] = members.sum(1).double().mean().item()
            return metrics | {"ece": ece(*test), "brier-score": brier_score(*test)}
        return metrics | {"interval-width": 2 * sets.threshold * unit}

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise `SettingsError` unless targets are classes or comparable numbers."""
        valid = _has_classes((outputs, targets)) or outputs.shape == targets.shape
        allowed = f"0 for outputs of shape {tuple(outputs.shape)} and targets of "
        allowed += f"{tuple(targets.shape)}, which are neither classes nor as many"
        require(valid, "coverage", self.coverage, allowed)

    def _target_scores(self, pair: Pair) -> Tensor:
        """Return the scores of targets: for numbers the largest absolute residual."""
        if _has_classes(pair):
            shares, targets = probabilities(*pair)
            return (1 - shares).gather(1, targets[:, None])[:, 0]
        outputs, targets = pair
        return (outputs - targets).abs()[:, None].flatten(1).amax(1)


@dataclass(frozen=True)
class PredictionSets:
    """A client's prediction sets.

    Parameters
    ----------
    coverage : float
        Probability, between 0 and 1, with which a set contains the target.
    threshold : float
        The largest score in a set; for numbers half the length of an interval.
    """

    coverage: float
    threshold: float

    def members(self, shares: Tensor) -> Tensor:
        """Return which classes are in the sets, given probabilities (n, classes)."""
        return 1 - shares <= self.threshold


def _has_classes(pair: Pair) -> bool:
    outputs, targets = pair
    return are_classes(targets, outputs.shape[1:2])
