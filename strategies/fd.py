"""FD (Jeong et al., 2018): federated distillation."""

from flwr_frl.common.messages import PROTOTYPES
from flwr_frl.strategies.base import Reply
from flwr_frl.strategies.fedproto import FedProto, check_range


class FD(FedProto, client="flwr_frl.clients.fd:FDClient"):
    """Average the probabilities of each class; models stay with the clients.

    The means are those of FedProto, of outputs in place of features. As in HtFLlib, all
    clients receive the mean over all clients that have the class; in the paper a client
    receives that of the others.
    """

    def check_reply(self, reply: Reply) -> None:
        """Reject means that are no probabilities as well."""
        super().check_reply(reply)
        check_range(reply, PROTOTYPES, 0, 1)
