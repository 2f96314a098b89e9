"""FedAS (Yang et al., CVPR 2024)."""

from flwr_frl.common.messages import FISHER_TRACE
from flwr_frl.strategies.base import Reply, Strategy


class FedAS(Strategy, client="flwr_frl.clients.fedas:FedASClient"):
    """Average the representations, weighted by the clients' Fisher information.

    A client's weight is the trace of its empirical Fisher information after training
    (client synchronisation), so that clients that have trained little count less. With
    ``weighting="examples"`` it is also multiplied by the number of examples, which the
    paper does not do. If all traces are 0, the plain weights are used. Rules of
    ``aggregation`` other than the mean do not use the traces, which the server cannot
    verify.
    """

    def check_reply(self, reply: Reply) -> None:
        """Reject replies without a trace, or with one below 0."""
        reply.metric(FISHER_TRACE, least=0)

    def weights(self, replies: list[Reply]) -> list[float]:
        """Return the traces of checked replies, times their plain weights."""
        plain = super().weights(replies)
        traces = [reply.metrics[FISHER_TRACE] for reply in replies]
        weights = [w * trace for w, trace in zip(plain, traces, strict=True)]
        return weights if any(weights) else plain
