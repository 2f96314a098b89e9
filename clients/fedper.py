"""FedPer (Arivazhagan et al., 2019): representation and head train together."""

from typing import Any

from flwr_frl.clients.base import Client


class FedPerClient(Client, supports_example_dp=True):
    """Train representation and head together; the head is personal."""

    shared: Any = "representation"
    personal: Any = "head"

    def update(self) -> float:
        """Train both parts for ``representation-epochs``."""
        return self.train("all", self.settings.representation_epochs)
