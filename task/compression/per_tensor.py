"""Compression operators by name, and for each tensor of a model on its own."""

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Annotated

import numpy as np

from flwr_frl.task.compression.compressor import Compressor
from flwr_frl.task.compression.packing import Float32s, squared_l2
from flwr_frl.task.compression.quantizers import QSGD, Identity, Sign
from flwr_frl.task.compression.sparsifiers import QSGDTopK, RandK, SignTopK, TopK
from flwr_frl.task.settings import Checked, Choice, Free, Range, require, unknown


@dataclass(frozen=True)
class PerTensor(Compressor):
    """One operator applied to each tensor of a model on its own.

    The vector is the tensors' entries one tensor after another; a fractional k is then
    a fraction of each tensor, as in the dissertation's deep models (sections 3.5.1 and
    3.5.2). Messages follow each other. omega is the least one over the tensors.

    Parameters
    ----------
    compressor : Compressor
        The operator.
    sizes : tuple of int
        Number of entries of each tensor, each at least 1.

    Raises
    ------
    SettingsError
        If `sizes` is empty or one of them is less than 1.
    ValueError
        Later, if a vector does not have sum(sizes) entries.
    """

    compressor: Compressor
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the sizes."""
        valid = bool(self.sizes) and min(self.sizes) >= 1
        require(valid, "sizes", self.sizes, "one or more numbers >= 1")

    def num_bytes(self, dimension: int) -> int:
        """Give the sum over the tensors."""
        self._check_dimension(dimension)
        return sum(self.compressor.num_bytes(size) for size in self.sizes)

    def omega(self, dimension: int) -> float:
        """Give the least omega of a tensor."""
        self._check_dimension(dimension)
        return min(self.compressor.omega(size) for size in self.sizes)

    def _check_dimension(self, dimension: int) -> None:
        if dimension != sum(self.sizes):
            raise ValueError(
                f"a vector of {dimension} entries can not be split into tensors of "
                f"{sum(self.sizes)} in all"
            )

    def _split(self, x: Float32s) -> list[Float32s]:
        self._check_dimension(len(x))
        return np.split(x, np.cumsum(self.sizes)[:-1])

    def _omega_at(self, x: Float32s) -> float:
        kept = sum(
            squared_l2(tensor) * self.compressor._omega_at(tensor)
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


COMPRESSORS: dict[str, type[Compressor]] = {
    "identity": Identity,
    "top-k": TopK,
    "rand-k": RandK,
    "qsgd": QSGD,
    "sign": Sign,
    "sign-top-k": SignTopK,
    "qsgd-top-k": QSGDTopK,
}


def create(name: str, **settings: int | float) -> Compressor:
    """Build a compressor by name (a key of ``COMPRESSORS``) with its own settings.

    Raises
    ------
    SettingsError
        If the name, a setting's name or its value is not one of those allowed.
    """
    if name not in COMPRESSORS:
        raise unknown("compressor", name, COMPRESSORS)
    kind = COMPRESSORS[name]
    allowed = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for setting in settings:
        if setting not in allowed:
            raise unknown(f"setting of {name}", setting, allowed or ["none"])
    return kind(**settings)


@dataclass(frozen=True)
class CompressionSettings(Checked):
    """What a message to a neighbour is (Singh, UCLA 2024, section 2.4).

    Parameters
    ----------
    compressor : str, default "sign-top-k"
        The operator C.
    compressor_k : float, default 0.1
        k of the TopK kinds and RandK: below 1 a fraction of the entries, from 1 a
        count.
    compressor_levels : int, default 15
        Levels s of the QSGD kinds; 15 take 5 bits an entry with the sign, 16 take 6.
    per_tensor : bool, default False
        Whether each parameter tensor is compressed on its own.
    """

    compressor: Annotated[str, Choice(*COMPRESSORS)] = "sign-top-k"
    compressor_k: Annotated[float, Range("(0, inf)")] = 0.1
    compressor_levels: Annotated[int, Range("[1, inf)")] = 15
    per_tensor: Annotated[bool, Free()] = False


@lru_cache(maxsize=16)
def from_settings(settings: CompressionSettings, sizes: tuple[int, ...]) -> Compressor:
    """Build the compressor that the settings name.

    ``sizes`` are the numbers of entries of the vector's tensors.

    Raises
    ------
    SettingsError
        If a value is not one of those allowed.
    """
    name, k = settings.compressor, settings.compressor_k
    valid = k < 1 or float(k).is_integer()
    require(valid, "compressor-k", k, "in (0, 1) or a count")
    names = {field.name for field in fields(COMPRESSORS[name])}  # type: ignore[arg-type]
    own: dict[str, int | float] = {}
    if "k" in names:
        own["k"] = k if k < 1 else int(k)
    if "levels" in names:
        own["levels"] = settings.compressor_levels
    compressor = create(name, **own)
    return PerTensor(compressor, sizes) if settings.per_tensor else compressor


__all__ = [
    "COMPRESSORS",
    "QSGD",
    "CompressionSettings",
    "Compressor",
    "Identity",
    "PerTensor",
    "QSGDTopK",
    "RandK",
    "Sign",
    "SignTopK",
    "TopK",
    "create",
    "from_settings",
]
