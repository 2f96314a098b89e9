"""FedBN (Li et al., ICLR 2021)."""

from flwr_frl.strategies.base import BaseStrategy


class FedBN(BaseStrategy, client="flwr_frl.clients.fedbn:FedBNClient"):
    """Algorithm 1: average all but the batch norms, which stay with the clients."""
