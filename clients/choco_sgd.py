"""CHOCO-SGD (Koloskova et al., ICML 2019): SQuARM-SGD that talks in each iteration."""

from flwr_frl.clients.gossip.base import CompressedGossipSettings
from flwr_frl.clients.gossip.schedules import Schedule, threshold
from flwr_frl.clients.squarm_sgd import SQuARMSGDClient


class ChocoSGDClient(SQuARMSGDClient):
    """Compressed differences, one local step, no trigger.

    The paper has no momentum; with ``momentum`` above 0 it is the variant of its
    authors' experiments.
    """

    settings_type = CompressedGossipSettings

    @property
    def local_steps(self) -> int:
        """Iterations between two exchanges: 1."""
        return 1

    def make_threshold(self) -> Schedule:
        """Return 0: every message is sent."""
        return threshold("0")
