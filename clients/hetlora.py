"""HetLoRA (Cho et al., EMNLP 2024): clients reduce the rank of their adapters."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from flwr.common import NDArrays
from torch import Tensor

from flwr_frl.clients.base import Config, Update
from flwr_frl.clients.device.groups import Tensors, array_names
from flwr_frl.clients.device.ranks import RankClient
from flwr_frl.common.low_rank import adapters_in
from flwr_frl.common.messages import RANK
from flwr_frl.common.settings import setting
from flwr_frl.task.models import SplitModel

OWN_RANK = "rank.value"


@dataclass(frozen=True)
class LastRanks:
    """λ Σ ‖B[:, s:]‖ ‖A[s:]‖ over the layers, with Frobenius norms.

    Parameters
    ----------
    weight : float
        λ.
    start : int
        s, the number of ranks that would remain.
    """

    weight: float
    start: int

    def __call__(self, features: Tensor, targets: Tensor, model: SplitModel) -> Tensor:
        """Return the penalty of a model, whatever the batch."""
        return self.weight * norms(dict(model.named_parameters()), self.start)


def norms(arrays: Mapping[str, Tensor], start: int) -> Tensor:
    """Return Σ ‖B[:, s:]‖ ‖A[s:]‖ over the layers of a model."""
    norm = torch.linalg.norm
    parts = [
        (arrays[a][start:], arrays[b][:, start:]) for _, a, b in adapters_in(arrays)
    ]
    return torch.stack([norm(a) * norm(b) for a, b in parts]).sum()


class HetLoRAClient(RankClient):
    """Train A and B of the client's rank r with a penalty on the last ranks.

    The penalty is λ ‖B[:, s:]‖ ‖A[s:]‖ with s = ⌊γ r⌋ (rank self-pruning), here summed
    over the layers. If its norms are smaller after the training than before, the
    client's rank becomes s, at least 1. The reply of that round still has matrices of
    rank r, with zeros at the end.

    Parameters
    ----------
    hetlora_gamma : float, default 0.99
        γ, the share of the ranks that a pruning keeps; 1 disables it.
    hetlora_lambda : float, default 0.005
        λ.
    """

    personal = "rank"
    hetlora_gamma: float = setting(0.99, gt=0, le=1)
    hetlora_lambda: float = setting(0.005, ge=0)

    @property
    def rank(self) -> int:
        """Rank of this client after its prunings."""
        return int(self.saved[OWN_RANK]) if OWN_RANK in self.saved else super().rank

    def initial_group(self, group: str) -> Tensors:
        """Return the rank before any pruning."""
        return {"value": torch.tensor(super().rank)}

    def _receive(self, parameters: NDArrays, config: Config) -> None:
        """Load the arrays; a client that has lost its rank takes the received one."""
        super()._receive(parameters, config)
        named = dict(zip(array_names(self, self.shared), parameters, strict=True))
        received = max(len(named[each.a]) for each in adapters_in(named))
        self.saved[OWN_RANK] = torch.tensor(min(self.rank, received))

    def update(self) -> Update:
        """Train for ``representation-epochs``, and prune the last ranks."""
        rank, epochs = self.rank, self.settings.representation_epochs
        start = max(1, int(self.settings.hetlora_gamma * rank))
        before = norms(self.model.tensors, start)
        penalty = LastRanks(self.settings.hetlora_lambda, start)
        loss = self.train("all", epochs, penalty)
        if norms(self.model.tensors, start) < before:
            self.cut(start)
            self.saved[OWN_RANK] = torch.tensor(start)
        self.metrics[RANK] = self.rank
        return loss, self.of_rank(rank)
