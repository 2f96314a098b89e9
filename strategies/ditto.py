"""Ditto (Li et al., ICML 2021)."""

from strategies.base import BaseStrategy


class Ditto(BaseStrategy):
    """Algorithm 1: average the global models; personal models stay with the clients."""

    client = "clients.ditto:DittoClient"
