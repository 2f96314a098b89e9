"""pFedFDA (McLaughlin & Su, NeurIPS 2024)."""

from flwr_frl.strategies.base import BaseStrategy


class PFedFDA(BaseStrategy, client="flwr_frl.clients.pfedfda:PFedFDAClient"):
    """Algorithm 1: average representations, class means and covariances.

    Clients send the adapted means and covariance, so every average covers only the
    clients of a round. The paper uses ``weighting="examples"``.
    """
