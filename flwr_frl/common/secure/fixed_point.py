"""Changes of arrays as integers modulo 2^bits, so that sums of clients never wrap."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from flwr_frl.common.errors import require
from flwr_frl.common.secure.primitives import Words

Arrays = Mapping[str, npt.NDArray[Any]]
Floats = npt.NDArray[np.float64]

# Largest integers that float64 represents exactly, with a bit to spare.
EXACT = 2**52
# Largest standard deviation of noise in quanta. NumPy's Poisson variables become wrong
# with a much larger one, as differences of large logarithms decide on each.
LARGEST_NOISE = 2**20
# Added to the variance of the sum, so that the Rényi divergence of Skellam noise stays
# below that of the Gaussian mechanism; see `noise`.
SKELLAM = 4.0


@dataclass(frozen=True)
class Plan:
    """How the clients of a round turn their changes into words.

    Parameters
    ----------
    threshold : int
        Fewest clients of a group that must remain in each step.
    bits : int
        Bits of a word.
    bound : float
        Largest absolute change of a value: ``secure-range``.
    clients : int
        Largest number of summands.
    most : int, default 0
        Largest number of examples, with which changes are weighted; 0 weights equally.
    clip : float, default 0
        Largest norm of a client's change, with noise.
    noise : float, default 0
        Standard deviation of a client's noise, as a multiple of the largest norm.
    """

    threshold: int
    bits: Literal[16, 32, 64]
    bound: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    clients: Annotated[int, Field(ge=1)]
    most: Annotated[int, Field(ge=0)] = 0
    clip: float = 0.0
    noise: float = 0.0

    @property
    def text(self) -> str:
        """The plan as JSON, which is part of the keys of all masks."""
        return json.dumps(asdict(self))

    @property
    def largest(self) -> int:
        """Largest integer that one client may add."""
        return min(((1 << self.bits - 1) - 1) // self.clients, EXACT)

    @property
    def quantum(self) -> float:
        """Distance of neighbouring values. A mean is off by at most half of it."""
        return max(self.bound / self.largest, self.noise * self.clip / LARGEST_NOISE)

    def encode(self, before: Arrays, after: Arrays, weight: int = 1) -> Words:
        """Return the changes of a client's arrays as one vector of words.

        Parameters
        ----------
        before, after : mapping of str to ndarray
            Arrays of the same names and shapes. Changes of integers, such as counters
            of batch norms, are exact.
        weight : int, default 1
            The client's number of examples, with ``most``.

        Raises
        ------
        SettingsError
            If a change or a weight is too large, or not a number.
        """
        if self.most:
            allowed = f"at most {self.most} with these secure-bits, {self.bits}"
            valid = 0 <= weight <= min(self.most, self.largest)
            require(valid, "num-examples", weight, allowed, "secure-bits")
        changes = {n: after[n].astype(np.float64) - old for n, old in before.items()}
        scale = 1.0
        if self.clip:
            norm = np.sqrt(sum(np.sum(change**2) for change in changes.values()))
            scale = self.clip / max(self.clip, norm)
        parts = []
        for name, change in changes.items():
            is_float = before[name].dtype.kind == "f"
            bound, unit = (self.bound, self.quantum) if is_float else (self.largest, 1)
            value = np.asarray(change * scale)
            if self.most:
                value *= weight / (self.most if is_float else 1)
            most = np.abs(value).max(initial=0)
            # False for NaN as well.
            allowed = f"at least {most:.3g}, the largest change of {name!r}"
            require(bool(most <= bound), "secure-range", bound, allowed)
            parts.append(np.rint(value / unit).astype(np.int64).ravel())
        if self.most:
            parts.append(np.array([weight]))
        whole = np.concatenate(parts)
        if self.noise:
            whole += self._noise(len(whole))
        return whole.astype(f"u{self.bits // 8}")

    def decode(self, total: Words, before: Arrays, count: int) -> dict[str, Floats]:
        """Return the mean changes of ``count`` clients from the sum of their words."""
        signed = total.view(f"i{self.bits // 8}")
        weight = int(signed[-1]) if self.most else count
        means, start = dict[str, Floats](), 0
        for name, old in before.items():
            unit = self.quantum * max(1, self.most) if old.dtype.kind == "f" else 1.0
            part = signed[start : (start := start + old.size)].reshape(old.shape)
            means[name] = np.asarray(part * (unit / weight) if weight else part * 0.0)
        return means

    def zeros(self, before: Arrays) -> Words:
        """Return as many words as a client's, which are all 0."""
        size = sum(array.size for array in before.values()) + bool(self.most)
        return np.zeros(size, f"u{self.bits // 8}")

    def _noise(self, size: int) -> npt.NDArray[np.int64]:
        """Return a client's share of the noise, in quanta.

        Differences of Poisson variables (Skellam) stay so when they are added, unlike
        rounded Gaussian ones. For integers v and a sum of noise with variance μ, the
        Rényi divergence of order α is at most α v²/2μ + ((2α − 1) v² + 6 ‖v‖₁)/4μ²
        (Agarwal et al., NeurIPS 2021, theorem 3.5), and ‖v‖₁ ≤ v². So with
        μ = z² Δ² + 4 it is at most α/2z², as of the Gaussian mechanism. In Δ, rounding
        adds up to √d/2 to the clipping norm.
        """
        sensitivity = self.clip / self.quantum + np.sqrt(size) / 2
        variance = (self.noise * sensitivity) ** 2 + SKELLAM
        # Seeded by the operating system.
        rng = np.random.default_rng()
        return rng.poisson(variance / 2, size) - rng.poisson(variance / 2, size)
