"""GPFL (Zhang et al., ICCV 2023)."""

from flwr_frl.strategies.base import BaseStrategy


class GPFL(BaseStrategy, client="flwr_frl.clients.gpfl:GPFLClient"):
    """Average representations, category embeddings and valves; heads stay personal."""
