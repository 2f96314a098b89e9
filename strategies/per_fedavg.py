"""Per-FedAvg (Fallah et al., NeurIPS 2020)."""

from flwr_frl.strategies.base import BaseStrategy


class PerFedAvg(BaseStrategy):
    """Algorithm 1: average the meta-models; clients take them a step further."""

    client = "flwr_frl.clients.per_fedavg:PerFedAvgClient"


class HFMAML(BaseStrategy):
    """Per-FedAvg (HF): the clients' meta-gradients have the Hessian's part."""

    client = "flwr_frl.clients.per_fedavg:HFMAMLClient"
