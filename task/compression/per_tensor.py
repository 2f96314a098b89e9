"""Compression operators by name and from settings, for a vector or per tensor."""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal

import numpy as np

from flwr_frl.common.settings import Checked, require, setting, unknown
from flwr_frl.task.compression.compressor import Compressor as Compressor
from flwr_frl.task.compression.compressor import Float32s, squared_l2
from flwr_frl.task.compression.operators import QSGD as QSGD
from flwr_frl.task.compression.operators import Identity as Identity
from flwr_frl.task.compression.operators import QSGDTopK as QSGDTopK
from flwr_frl.task.compression.operators import Sign as Sign
from flwr_frl.task.compression.operators import SignTopK as SignTopK
from flwr_frl.task.compression.operators import TopK as TopK
from flwr_frl.task.compression.random_k import QSGDRandK as QSGDRandK
from flwr_frl.task.compression.random_k import RandK as RandK
from flwr_frl.task.compression.random_k import SignRandK as SignRandK


@dataclass(frozen=True)
class PerTensor(Compressor):
    """Apply one operator to each tensor of a model separately.

    The vector is the concatenation of the tensors' entries. A fractional k is then a
    fraction of each tensor, as in the dissertation's deep models (sections 3.5.1 and
    3.5.2). Messages are concatenated. ω is the minimum over the tensors.

    Parameters
    ----------
    compressor : Compressor
        The operator.
    sizes : tuple of int
        Number of entries of each tensor; one or more numbers ≥ 1.

    Raises
    ------
    ValueError
        Raised by every method for a vector that does not have sum(sizes) entries.
    """

    compressor: Compressor
    sizes: tuple[int, ...]

    @property
    def is_random(self) -> bool:
        """True if the operator draws random numbers."""
        return self.compressor.is_random

    def num_bytes(self, dimension: int) -> int:
        """Return the sum over the tensors."""
        self._check_dimension(dimension)
        return sum(self.compressor.num_bytes(size) for size in self.sizes)

    def omega(self, dimension: int) -> float:
        """Return the smallest ω of the tensors."""
        self._check_dimension(dimension)
        return min(self.compressor.omega(size) for size in self.sizes)

    def _check_dimension(self, dimension: int) -> None:
        if dimension != sum(self.sizes):
            raise ValueError(
                f"a vector of {dimension} entries cannot be split into tensors of "
                f"{sum(self.sizes)} entries in total"
            )

    def _split(self, x: Float32s) -> list[Float32s]:
        self._check_dimension(len(x))
        return np.split(x, np.cumsum(self.sizes)[:-1])

    def omega_at(self, x: Float32s) -> float:
        """Return the mean of the tensors' ω(x), weighted by their squared norms."""
        kept = sum(
            squared_l2(tensor) * self.compressor.omega_at(tensor)
            for tensor in self._split(x)
            if tensor.any()
        )
        return kept / squared_l2(x)

    def _encode(self, x: Float32s, generator: np.random.Generator) -> bytes:
        encode = self.compressor._encode
        return b"".join(encode(tensor, generator) for tensor in self._split(x))

    def _decode(self, data: memoryview, dimension: int) -> Float32s:
        tensors, start = [], 0
        for size in self.sizes:
            end = start + self.compressor.num_bytes(size)
            tensors.append(self.compressor._decode(data[start:end], size))
            start = end
        return np.concatenate(tensors)


CompressorName = Literal[
    "identity",
    "top-k",
    "rand-k",
    "qsgd",
    "sign",
    "sign-top-k",
    "qsgd-top-k",
    "sign-rand-k",
    "qsgd-rand-k",
]
COMPRESSORS: dict[CompressorName, type[Compressor]] = {
    "identity": Identity,
    "top-k": TopK,
    "rand-k": RandK,
    "qsgd": QSGD,
    "sign": Sign,
    "sign-top-k": SignTopK,
    "qsgd-top-k": QSGDTopK,
    "sign-rand-k": SignRandK,
    "qsgd-rand-k": QSGDRandK,
}


def create(name: str, **parameters: int | float) -> Compressor:
    """Build a compressor from its name, a key of ``COMPRESSORS``, and its parameters.

    Raises
    ------
    SettingsError
        If the name is unknown or a parameter is out of range.
    """
    if name not in COMPRESSORS:
        raise unknown("compressor", name, COMPRESSORS)
    return COMPRESSORS[name](**parameters)


@dataclass(frozen=True)
class CompressionSettings(Checked):
    """Compression of the messages to neighbours (Singh, UCLA 2024, section 2.4).

    Parameters
    ----------
    compressor : str, default "sign-top-k"
        The operator C.
    compressor_k : float, default 0.1
        k of the TopK and RandK operators: below 1 a fraction of the entries, from 1 on
        a count.
    compressor_levels : int, default 15
        Levels s of the QSGD operators, at most 32,767. With the sign, 15 levels take
        5 bits per entry and 16 take 6.
    per_tensor : bool, default False
        If True, each parameter tensor is compressed separately.
    """

    compressor: CompressorName = setting("sign-top-k")
    compressor_k: float = setting(
        0.1, gt=0, unused_if={"compressor": ("identity", "sign", "qsgd")}
    )
    compressor_levels: int = setting(
        15,
        ge=1,
        unused_if={
            "compressor": (
                "identity",
                "sign",
                "top-k",
                "rand-k",
                "sign-top-k",
                "sign-rand-k",
            )
        },
    )
    per_tensor: bool = setting(False)


@lru_cache(maxsize=16)
def from_settings(settings: CompressionSettings, sizes: tuple[int, ...]) -> Compressor:
    """Build the compressor of a run.

    Parameters
    ----------
    settings : CompressionSettings
        The settings.
    sizes : tuple of int
        Number of entries of each tensor of the vector.

    Raises
    ------
    SettingsError
        If a value is not allowed.
    """
    k = settings.compressor_k
    valid = k < 1 or float(k).is_integer()
    require(valid, "compressor-k", k, "in (0, 1) or a count")
    parameters: dict[str, int | float] = {
        "k": k if k < 1 else int(k),
        "levels": settings.compressor_levels,
    }
    kind = COMPRESSORS[settings.compressor]
    accepted = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    compressor = kind(**{n: v for n, v in parameters.items() if n in accepted})
    return PerTensor(compressor, sizes) if settings.per_tensor else compressor
