"""FedPer (Arivazhagan et al., 2019): representation and head train together."""

from typing import Any

from flwr_frl.clients.fedavg import FedAvgClient


class FedPerClient(FedAvgClient):
    """Train representation and head together; the head is personal."""

    shared: Any = "representation"
    personal: Any = "head"
