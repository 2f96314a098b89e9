"""Local training only: nothing is shared."""

from flwr_frl.clients.device.parameter_groups import WHOLE
from flwr_frl.clients.fedper import FedPerClient


class LocalClient(FedPerClient):
    """Train the whole model on this client's data alone, round after round."""

    shared = ()
    personal = WHOLE
