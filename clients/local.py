"""Local training without communication."""

from flwr_frl.clients.device.architectures import OwnArchitectureClient
from flwr_frl.clients.device.groups import WHOLE
from flwr_frl.clients.fedper import FedPerClient


class LocalClient(FedPerClient, OwnArchitectureClient):
    """Train the whole model on this client's data only."""

    shared = ()
    personal = WHOLE
