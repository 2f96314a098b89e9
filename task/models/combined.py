"""Several representations as one, projected onto a basis of their features."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class CombinedRepresentation(nn.Module):
    """Maps inputs x to [φ_1(x) … φ_m(x)] V.

    Parameters
    ----------
    sources : iterable of nn.Module
        The representations φ_i.
    at_positions : bool
        Whether there are features for every position of a sequence, (n, time, k).
        Otherwise the features of an example are flattened.

    Attributes
    ----------
    basis : Tensor, shape (features of all sources, q)
        V, empty until it is set.
    """

    def __init__(self, sources: Iterable[nn.Module], at_positions: bool) -> None:
        super().__init__()
        self.sources = nn.ModuleList(sources)
        self.basis = nn.Parameter(torch.empty(0))
        self.at_positions = at_positions

    def features(self, x: Tensor) -> Tensor:
        """Return [φ_1(x) … φ_m(x)]."""
        features = [source(x) for source in self.sources]
        if not self.at_positions:
            features = [z.flatten(1) for z in features]
        # NaN features of one source must not affect those of the others.
        return torch.nan_to_num(torch.cat(features, dim=-1), 0.0, 0.0, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projected features."""
        return self.features(x) @ self.basis


def has_positions(targets: Tensor) -> bool:
    """Return True if each target is a sequence of classes."""
    return targets.ndim > 1 and not targets.is_floating_point()
