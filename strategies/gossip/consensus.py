"""The consensus step γ, and the distance between the nodes' models."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from logging import INFO, WARNING

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from flwr_frl.strategies.gossip.mixing import Weights, consensus_step
from flwr_frl.task.settings import SettingsError

# Rules that derive γ.
RULES = ("auto", "theory")
ALLOWED = "auto, theory or a number in (0, 1]"
# A smaller step needs thousands of rounds to bring the nodes together.
SMALL = 1e-3
# In training, the distance between nodes never grows by this factor while the number of
# rounds doubles.
GROWTH = 30.0


def practical_step(omega: float) -> float:
    """Return ω / (2 − ω): 1 for exact messages, and about ω / 2 for small ω.

    Twice this step is too large for some operators (``benchmarks/consensus_step.py``).
    """
    return omega / (2 - omega)


class ConsensusStep:
    """The consensus step γ, fixed or derived from the compression operator's ω.

    Parameters
    ----------
    setting : float or str
        γ in (0, 1]; ``auto`` for `practical_step` with ω at a Gaussian vector; or
        ``theory`` for `consensus_step` with the worst-case ω.

    Attributes
    ----------
    value : float
        γ; 0 before `derive` if not fixed.
    """

    def __init__(self, setting: float | str) -> None:
        self.rule = str(setting)
        self.value = 0.0
        if self.rule not in RULES:
            with suppress(ValueError):
                self.value = float(setting)
            if not 0 < self.value <= 1:
                raise SettingsError(f"consensus-step is {setting}; expected {ALLOWED}")
        # Rounds and distances of the evaluations so far.
        self._rounds: list[int] = []
        self._distances: list[float] = []
        self._warned = False

    def derive(self, weights: Weights, omega: float, typical_omega: float) -> None:
        """Set γ unless it is fixed, and warn if it is very small.

        Parameters
        ----------
        weights : ndarray, shape (n, n)
            The mixing matrix W.
        omega, typical_omega : float
            ω in the worst case and at a Gaussian vector, in (0, 1].
        """
        practical = practical_step(typical_omega)
        if self.value == 0:
            theory = self.rule == "theory"
            self.value = consensus_step(weights, omega) if theory else practical
            log(INFO, "consensus step: %.3g (%s)", self.value, self.rule)
        if self.value < SMALL:
            text = "consensus step %.3g is so small that messages have almost no "
            text += "effect; consensus-step='auto' would be %.3g"
            log(WARNING, text, self.value, practical)

    def watch(self, server_round: int, distance: float) -> None:
        """Warn once if the consensus distance grows exponentially.

        This indicates that γ is too large. Training alone makes the distance grow at
        most fourfold while the number of rounds doubles.
        """
        if self._warned:
            return
        half = bisect_right(self._rounds, server_round // 2) - 1
        if half >= 0 and 0 < self._distances[half] * GROWTH < distance:
            self._warned = True
            text = "the consensus distance has grown from %.3g in round %d to %.3g in "
            text += "round %d; choose a consensus-step below %.3g"
            before = self._distances[half], self._rounds[half]
            log(WARNING, text, *before, distance, server_round, self.value)
        self._rounds.append(server_round)
        self._distances.append(distance)


def consensus_distance(sketches: Sequence[NDArray[np.float32]]) -> float:
    """Estimate (1/n) Σ_i ‖x_i − x̄‖² from sketches of the models x_i.

    Sketches whose length differs from the most common one are ignored.
    """
    length = Counter(map(len, sketches)).most_common(1)[0][0]
    stacked = np.stack([s for s in sketches if len(s) == length])
    deviations = stacked - stacked.mean(axis=0, dtype=np.float64)
    return float(np.square(deviations).sum(1).mean())
