"""FFA-LoRA (Sun et al., ICLR 2024): LoRA with frozen matrices A."""

from flwr_frl.strategies.base import BaseStrategy


class FFALoRA(
    BaseStrategy,
    client="flwr_frl.clients.ffa_lora:FFALoRAClient",
    simulation_defaults={"adapters": "lora"},
):
    """Average the matrices B and the heads; the matrices A never change."""
