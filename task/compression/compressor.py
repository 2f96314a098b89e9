"""Compression operators C, each with its exact bytes, its length and its omega.

An operator of parameter omega in (0, 1] satisfies, for every x in R^d,

    E ||C(x) - x||^2 <= (1 - omega) ||x||^2

(Singh, UCLA 2024, section 2.4, Definition 1, equation 2.5). ``compress`` writes C(x)
as bytes and ``decompress`` reads it back. C(x) is by definition what ``decompress``
returns, so sender and receivers hold identical floats.

Every code has a fixed size: ``num_bytes(d)`` depends on the dimension and the
operator's settings only, and is the length of every message. Numbers are written as
follows; fields follow each other and each is padded with zero bits to a whole byte.

=========  ==================================================================
float      IEEE binary32, little-endian
index      ceil(log2 d) bits, most significant first, strictly increasing
sign       1 bit, 1 for +1; sign(0) = +1
level      of QSGD: 0 to s in ceil(log2(s + 1)) bits, followed by a bit that is
           1 for a negative entry
=========  ==================================================================

What comes from the network is never trusted: ``decompress`` first compares the
message's length with ``num_bytes(dimension)``, and builds no array of ``dimension``
floats before norms, indices and levels have passed their range checks.

Sums that end up in a message are taken by NumPy in float64: unlike a sum in torch or
BLAS they do not depend on the number of threads, so a message does not either.
"""

from abc import ABC, abstractmethod
from functools import lru_cache

import numpy as np
import torch

from flwr_frl.task.compression.packing import Float32s


class Compressor(ABC):
    """An operator C of Definition 1 together with its code.

    A subclass states ``num_bytes`` and ``omega`` and writes ``_encode`` and
    ``_decode``, which see only arguments that passed the checks made here.
    """

    @abstractmethod
    def num_bytes(self, dimension: int) -> int:
        """Give the length of every message.

        Parameters
        ----------
        dimension : int
            Number of entries d of the vector.

        Returns
        -------
        int
            Length in bytes of ``compress(x)`` for every x in R^d.
        """

    @abstractmethod
    def omega(self, dimension: int) -> float:
        """Give the omega that holds for every vector of R^d.

        Parameters
        ----------
        dimension : int
            Number of entries d of the vector.

        Returns
        -------
        float
            omega in (0, 1].
        """

    def omega_at(self, x: torch.Tensor) -> float:
        """Give the omega that holds at one vector.

        It is never less than ``omega(d)``, and larger where the error depends on the
        vector (``Sign``, ``QSGD``, and whatever keeps the largest entries).

        Parameters
        ----------
        x : torch.Tensor
            As for ``compress``. At x = 0 the answer is ``omega(d)``.

        Returns
        -------
        float
            omega(x) with E ||C(x) - x||^2 <= (1 - omega(x)) ||x||^2.

        Raises
        ------
        ValueError
            If `x` is not such a tensor.
        """
        array = _checked(x)
        return self._omega_at(array) if array.any() else self.omega(len(array))

    def typical_omega(self, dimension: int) -> float:
        """Give omega at a vector of independent Gaussian entries, always the same one.

        The worst case, ``omega(d)``, is a vector of one entry for many operators, far
        from any difference between models.

        Parameters
        ----------
        dimension : int
            Number of entries d of the vector.

        Returns
        -------
        float
            omega in (0, 1].
        """
        return _typical_omega(self, dimension)

    def compress(self, x: torch.Tensor, generator: np.random.Generator) -> bytes:
        """Write C(x).

        Parameters
        ----------
        x : torch.Tensor
            Shape (d,), float32, d >= 1, every entry finite; on any device.
        generator : numpy.random.Generator
            Source of the operator's randomness; deterministic operators leave it as
            it is.

        Returns
        -------
        bytes
            ``num_bytes(d)`` bytes.

        Raises
        ------
        ValueError
            If `x` is not such a tensor, or its norm is sent and too large for float32.
        """
        return self._encode(_checked(x), generator)

    def decompress(self, data: bytes, dimension: int) -> torch.Tensor:
        """Read C(x).

        Parameters
        ----------
        data : bytes
            A message of ``compress``.
        dimension : int
            Number of entries d of the vector.

        Returns
        -------
        torch.Tensor
            C(x): shape (d,), float32, on the CPU.

        Raises
        ------
        ValueError
            If `data` is not a message that ``compress`` can write for this dimension.
        """
        expected = self.num_bytes(dimension)
        if len(data) != expected:
            raise ValueError(
                f"a {type(self).__name__} message of {dimension} entries has "
                f"{expected} bytes, not {len(data)}"
            )
        return torch.from_numpy(self._decode(memoryview(data), dimension))

    def _omega_at(self, x: Float32s) -> float:
        return self.omega(len(x))

    @abstractmethod
    def _encode(self, x: Float32s, generator: np.random.Generator) -> bytes: ...

    @abstractmethod
    def _decode(self, data: memoryview, dimension: int) -> Float32s: ...


@lru_cache(maxsize=4)
def _typical_omega(compressor: Compressor, dimension: int) -> float:
    generator = np.random.default_rng(0)
    vector = generator.standard_normal(dimension, np.float32)
    # Rounding may bring it above.
    return min(1.0, float(compressor._omega_at(vector)))


def _checked(x: torch.Tensor) -> Float32s:
    """Give a 1-D float32 tensor as an array, once it is known to be finite."""
    if x.dtype != torch.float32 or x.dim() != 1 or not 1 <= len(x) <= 2**32:
        raise ValueError(
            f"a vector is {x.dtype} of shape {tuple(x.shape)}: "
            "allowed is float32 of shape (d,), 1 <= d <= 2^32"
        )
    array: Float32s = x.detach().cpu().numpy()
    if not np.isfinite(array).all():
        raise ValueError("the vector has an entry that is not finite")
    return array
