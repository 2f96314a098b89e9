"""FedSA-LoRA (Guo et al., ICLR 2025): selective aggregation of LoRA matrices."""

from flwr_frl.strategies.base import BaseStrategy


class FedSALoRA(
    BaseStrategy,
    client="flwr_frl.clients.fedsa_lora:FedSALoRAClient",
    simulation_defaults={"adapters": "lora"},
):
    """Average the matrices A; the matrices B and the heads stay with the clients."""
