"""FedProx (Li et al., MLSys 2020)."""

from flwr_frl.clients.fedavg import FedAvgClient
from flwr_frl.clients.fine_tuning import FineTuned


class FedProxClient(FedAvgClient):
    """Algorithm 2: minimise F_i(w) + μ/2 ‖w − wᵗ‖², inexactly, from wᵗ.

    `Client.train` adds the proximal term if the server sends μ.
    """


class FedProxFTClient(FineTuned, FedProxClient, supports_example_dp=True):
    """Train as with FedProx, and fine-tune the head before each test."""
