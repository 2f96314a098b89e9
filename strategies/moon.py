"""MOON (Li et al., CVPR 2021)."""

from flwr_frl.strategies.base import BaseStrategy


class MOON(BaseStrategy, client="flwr_frl.clients.moon:MOONClient"):
    """Algorithm 1: average the models; clients add the contrastive loss."""
