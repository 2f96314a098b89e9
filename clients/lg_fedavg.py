"""LG-FedAvg (Liang et al., 2020): a shared head on personal representations."""

from flwr_frl.clients.device.architectures import OwnArchitectureClient
from flwr_frl.clients.fedper import FedPerClient


class LGFedAvgClient(
    FedPerClient, OwnArchitectureClient, task_settings={"head-layers": 2}
):
    """Train both parts together; the representation is personal.

    The head of a built-in model has two layers, unless ``head-layers`` is set. The
    representations may have different architectures if the heads are equal. In the
    authors' code all clients start from a model that FedAvg has trained; here they
    start from the initial model.
    """

    shared = "head"
    personal = "representation"
