"""Per-FedAvg (Fallah et al., NeurIPS 2020)."""

from flwr_frl.strategies.base import BaseStrategy


class PerFedAvg(BaseStrategy, client="flwr_frl.clients.per_fedavg:PerFedAvgClient"):
    """Algorithm 1: average the meta-models; clients adapt them with one more step."""


class HFMAML(BaseStrategy, client="flwr_frl.clients.per_fedavg:HFMAMLClient"):
    """Per-FedAvg (HF): the clients' meta-gradients include the Hessian term."""
