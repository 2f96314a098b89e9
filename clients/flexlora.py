"""FlexLoRA (Bai et al., NeurIPS 2024): adapters of unequal ranks."""

from flwr_frl.clients.base import Update
from flwr_frl.clients.device.ranks import RankClient


class FlexLoRAClient(RankClient):
    """Train A and B of the client's rank, and the head."""

    def update(self) -> Update:
        """Train for ``representation-epochs``, and send matrices of the rank."""
        loss = self.train("all", self.settings.representation_epochs)
        return loss, self.of_rank(self.rank)
