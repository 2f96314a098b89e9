"""FedBABU (Oh et al., ICLR 2022)."""

from flwr_frl.strategies.base import BaseStrategy


class FedBABU(
    BaseStrategy,
    client="flwr_frl.clients.fedbabu:FedBABUClient",
    # Each evaluation fine-tunes anew.
    evaluate_last_round_only=True,
):
    """Algorithm 1: average representations that were trained under the initial head."""
