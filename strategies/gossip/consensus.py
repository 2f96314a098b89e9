"""The consensus step γ: how far nodes move towards what their neighbours sent."""

from bisect import bisect_right
from contextlib import suppress
from logging import INFO, WARNING

from flwr.common import log

from flwr_frl.strategies.gossip.mixing import Weights, consensus_step
from flwr_frl.task.settings import SettingsError

# What γ follows from, where it is no number.
RULES = ("auto", "theory")
ALLOWED = "auto, theory or a number in (0, 1]"
# A step below this brings nodes together over thousands of rounds only.
SMALL = 1e-3
# By so much no training lets the nodes' distance grow in twice the rounds.
GROWTH = 30.0


def practical_step(omega: float) -> float:
    """Return ω / (2 − ω): 1 without any error, and ω / 2 where little comes across.

    Twice of that is too much for some operators (``benchmarks/consensus_step.py``).
    """
    return omega / (2 - omega)


class ConsensusStep:
    """γ, as it is given or follows from the compression operator's ω.

    Parameters
    ----------
    given : float or str
        γ in (0, 1]; ``auto`` for `practical_step` of ω at a Gaussian vector, the
        share of it that one message brings across; ``theory`` for `consensus_step` of
        the worst case.

    Attributes
    ----------
    value : float
        γ; 0 until `follow` where it is not given.
    """

    def __init__(self, given: float | str) -> None:
        self.rule = str(given)
        self.value = 0.0
        if self.rule not in RULES:
            with suppress(ValueError):
                self.value = float(given)
            if not 0 < self.value <= 1:
                raise SettingsError(f"consensus-step is {given}; it must be {ALLOWED}")
        # Of the evaluations so far: rounds, distances, and whether these have grown.
        self._rounds: list[int] = []
        self._distances: list[float] = []
        self._grown = False

    def follow(self, weights: Weights, omega: float, typical: float) -> None:
        """Take the clients' ω, of the worst and of the typical vector, and say γ."""
        if self.value == 0:
            theory = self.rule == "theory"
            self.value = (
                consensus_step(weights, omega) if theory else practical_step(typical)
            )
            log(INFO, "consensus step: %.3g (%s)", self.value, self.rule)
        if self.value < SMALL:
            text = "the consensus step is %.3g: messages cost as ever and change next "
            text += "to nothing; consensus-step='auto' is %.3g"
            log(WARNING, text, self.value, practical_step(typical))

    def watch(self, server_round: int, distance: float) -> None:
        """Warn once of a distance that grows as by a step that is too large.

        That is exponential; by training alone it grows fourfold in twice the rounds.
        """
        if self._grown:
            return
        half = bisect_right(self._rounds, server_round // 2) - 1
        if half >= 0 and 0 < self._distances[half] * GROWTH < distance:
            self._grown = True
            text = "the consensus distance has grown from %.3g in round %d to %.3g in "
            text += "round %d: a consensus-step below %.3g brings the nodes together"
            before = self._distances[half], self._rounds[half]
            log(WARNING, text, *before, distance, server_round, self.value)
        self._rounds.append(server_round)
        self._distances.append(distance)
