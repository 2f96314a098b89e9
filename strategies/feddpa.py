"""FedDPA (Yang et al., NeurIPS 2024): a global and a personal adapter."""

from flwr_frl.strategies.base import BaseStrategy


class FedDPA(
    BaseStrategy,
    client="flwr_frl.clients.feddpa:FedDPAClient",
    simulation_defaults={"adapters": "lora"},
):
    """Average the global adapters and heads; personal ones stay with the clients."""
