"""Ditto (Li et al., ICML 2021)."""

from flwr_frl.strategies.base import BaseStrategy


class Ditto(BaseStrategy, client="flwr_frl.clients.ditto:DittoClient"):
    """Algorithm 1: average the global models; personal models stay with the clients."""
