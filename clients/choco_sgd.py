"""CHOCO-SGD (Koloskova et al., ICML 2019): decentralised SGD with compression."""

from flwr_frl.clients.gossip.settings import CompressedGossipSettings
from flwr_frl.clients.squarm_sgd import SQuARMSGDClient


class ChocoSGDClient(SQuARMSGDClient):
    """SQuARM-SGD with one local step per exchange (H = 1) and no trigger (c_t = 0).

    The paper has no momentum; ``momentum`` > 0 is the variant of its authors'
    experiments.
    """

    _settings_type = CompressedGossipSettings
