"""pFedMe (T. Dinh et al., NeurIPS 2020)."""

from flwr_frl.strategies.base import BaseStrategy


class PFedMe(BaseStrategy, client="flwr_frl.clients.pfedme:PFedMeClient"):
    """Algorithm 1: average the w_i; personalised models θ_i stay with the clients.

    The step w ← (1 − β) w + β mean w_i is linear, so each client applies its part of
    it.
    """
