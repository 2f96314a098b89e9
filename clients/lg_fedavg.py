"""LG-FedAvg (Liang et al., 2020): a shared head on personal representations."""

from flwr_frl.clients.device.parameter_groups import HEAD, REPRESENTATION
from flwr_frl.clients.fedper import FedPerClient


class LGFedAvgClient(FedPerClient):
    """Train both parts together; the representation stays here.

    Of a built-in model the head is the last two layers, unless ``head-layers`` says
    otherwise.
    """

    shared = (HEAD,)
    personal = (REPRESENTATION,)
    head_layers = 2
