"""pFedFDA (McLaughlin & Su, NeurIPS 2024)."""

from flwr_frl.strategies.base import BaseStrategy


class PFedFDA(BaseStrategy, client="flwr_frl.clients.pfedfda:PFedFDAClient"):
    """Algorithm 1: average representations, class means and covariances.

    Clients send the means and the covariance that they have adapted, so no mean is over
    more than the clients of a round. ``weighting="examples"`` is the paper's.
    """
