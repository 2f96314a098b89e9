"""FLoRA (Wang et al., NeurIPS 2024) and FedEx-LoRA (Singhal et al., ACL 2025)."""

from flwr_frl.clients.base import Update
from flwr_frl.clients.device.ranks import MergingClient, RankClient
from flwr_frl.task.models.adapters import lora_layers


class FLoRAClient(MergingClient, RankClient):
    """Train new adapters of the client's rank beside the weights W + Σ Δ.

    Δ are the products of all earlier rounds. In each round, A has new random values and
    B is 0 (algorithm 1).
    """

    def update(self) -> Update:
        """Train for ``representation-epochs``, and send matrices of the rank."""
        for layer in lora_layers(self.model):
            for adapter in layer.active_adapters:
                layer.reset_lora_parameters(adapter, init_lora_weights=True)
        self.cut(self.rank)
        loss = self.train("all", self.settings.representation_epochs)
        return loss, self.of_rank(self.rank)


class FedExLoRAClient(MergingClient):
    """Train A, B and the head beside the weights W with all earlier residuals."""

    def update(self) -> float:
        """Train for ``representation-epochs``."""
        return self.train("all", self.settings.representation_epochs)
