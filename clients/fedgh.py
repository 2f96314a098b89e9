"""FedGH (Yi et al., ACM MM 2023): class means go up, a head comes down."""

from flwr_frl.clients.base import Update, linear_head, needs_classes
from flwr_frl.clients.device.architectures import OwnArchitectureClient
from flwr_frl.clients.device.groups import Tensors
from flwr_frl.clients.device.training import no_means
from flwr_frl.clients.fedproto import own_prototypes


class FedGHClient(
    OwnArchitectureClient, requires=(needs_classes, linear_head("FedGH", bias=True))
):
    """Algorithm 1, client side: the representation is personal.

    The received head replaces the client's. Then the whole model trains, and the mean
    features of each class are sent. As in HtFLlib, clients are tested with
    the received head.
    """

    shared = "head"
    sent = "prototypes"
    personal = "representation"

    def initial_group(self, group: str) -> Tensors:
        """Return zeros, as there are no class means yet."""
        return no_means(self.model.linear_head("FedGH"))

    def update(self) -> Update:
        """Train the model for ``representation-epochs``, and send the class means."""
        loss = self.train("all", self.settings.representation_epochs)
        return loss, own_prototypes(self)
