"""Several representations as one, projected onto a basis of their features."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from flwr_frl.task.models.frozen import copy_sharing_frozen


class CombinedRepresentation(nn.Module):
    """Maps inputs x to [φ_1(x) … φ_m(x)] V.

    Parameters
    ----------
    sources : sequence of nn.Module
        The representations φ_i.
    basis : Tensor, shape (features of all sources, q)
        V.
    at_positions : bool
        Whether there are features for every position of a sequence, (n, time, k);
        outputs then have one row per position. Otherwise they have one row per example,
        whose features are flattened.
    """

    def __init__(
        self, sources: Sequence[nn.Module], basis: Tensor, at_positions: bool
    ) -> None:
        super().__init__()
        self.sources = nn.ModuleList(sources)
        self.basis = nn.Parameter(basis)
        self.at_positions = at_positions

    @classmethod
    def of(
        cls,
        representation: nn.Module,
        states: Iterable[Mapping[str, Tensor]],
        basis: Tensor,
        at_positions: bool,
    ) -> Self:
        """Combine copies of a representation with the given state dicts."""
        sources = []
        for state in states:
            source = copy_sharing_frozen(representation)
            source.load_state_dict(state, strict=False)
            sources.append(source)
        return cls(sources, basis, at_positions)

    def stacked(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return arrays of the representations, each of shape (m, …), by name."""
        states = [source.state_dict() for source in self.sources]
        return {name: torch.stack([state[name] for state in states]) for name in names}

    def forward(self, x: Tensor) -> Tensor:
        """Return the projected features."""
        features = [
            z.flatten(0, -2) if self.at_positions else z.flatten(1)
            for z in (source(x) for source in self.sources)
        ]
        projected: Tensor = torch.cat(features, dim=1) @ self.basis
        return projected


def has_positions(targets: Tensor) -> bool:
    """Return True if each target is a sequence of classes."""
    return targets.ndim > 1 and not targets.is_floating_point()


def one_per_row(targets: Tensor) -> Tensor:
    """Return one target for each row of features, so one for each position."""
    return targets.flatten() if has_positions(targets) else targets
