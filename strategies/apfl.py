"""APFL (Deng et al., 2020)."""

from flwr_frl.strategies.base import BaseStrategy


class APFL(BaseStrategy, client="flwr_frl.clients.apfl:APFLClient"):
    """Algorithm 1: average the global models; personal models stay with the clients."""
