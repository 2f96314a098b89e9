"""pFedMe (T. Dinh et al., NeurIPS 2020)."""

from flwr_frl.strategies.base import BaseStrategy


class PFedMe(BaseStrategy, client="flwr_frl.clients.pfedme:PFedMeClient"):
    """Algorithm 1: average the w_i; personalised models θ_i stay with the clients.

    The server's step w ← (1 − β) w + β mean w_i is linear, so clients return
    (1 − β) w + β w_i, and the server averages these.
    """
