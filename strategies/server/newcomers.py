"""Clients that join after the training: how well the trained model serves them."""

from logging import WARNING

from flwr.app import ArrayRecord, ConfigRecord, MessageType
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.messages import FITTED, NEWCOMER, NUM_EXAMPLES, SHARE
from flwr_frl.common.settings import require
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.server.round import Round

# Fractions of a newcomer's examples on which it trains its personal part.
SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)

# By a newcomer's name: its metrics for each number of examples, in increasing order.
ByExamples = dict[str, list[dict[str, float]]]


def check_newcomers(
    strategy: Strategy, algorithm: str, count: int, num_clients: int
) -> None:
    """Raise `SettingsError` unless this many clients can join after the training."""
    serves = count == 0 or strategy._traits.takes_newcomers
    allowed = f"0 with {algorithm}, which leaves no model for clients that join later"
    require(serves, "new-clients", count, allowed)
    allowed = f"at most {num_clients - 1}, so that one of {num_clients} clients trains"
    require(count in range(max(1, num_clients)), "new-clients", count, allowed)


def let_join(
    strategy: Strategy,
    grid: Grid,
    arrays: ArrayRecord,
    server_round: int,
    timeout: float,
) -> ByExamples:
    """Let newcomers train their personal parts on growing fractions of their examples.

    After each training the model is tested.

    Parameters
    ----------
    strategy : Strategy
        The strategy, after its training.
    grid : Grid
        The grid.
    arrays : ArrayRecord
        The trained shared arrays.
    server_round : int
        The last round.
    timeout : float
        Seconds to wait for the replies for one fraction of the examples.

    Returns
    -------
    dict
        Metrics by newcomer and number of examples (``num-examples``). Newcomers without
        a valid reply to the last request, for all their examples, are left out.
    """
    nodes = strategy._run.clients.newcomers()
    metrics_of: dict[str, dict[int, dict[str, float]]] = {}
    answered: set[str] = set()
    if not nodes:
        log(WARNING, "no client says that it is new; only simulated ones do")
    for share in SHARES if nodes else ():
        config = ConfigRecord({SHARE: share})
        kind = f"{MessageType.EVALUATE}.{NEWCOMER}"
        round = Round(strategy, server_round, arrays, config, nodes, trains=False)
        asked = strategy._open_round(round, kind)
        round.close(grid.send_and_receive(asked, timeout=timeout))
        answered = {reply.client for reply in round.replies}
        for reply in round.replies:
            metrics = dict(reply.metrics)
            # The number of examples for training in place of those for the test.
            count = metrics[NUM_EXAMPLES] = int(metrics.pop(FITTED, 0))
            entries = metrics_of.setdefault(reply.client, {})
            # With few examples, two fractions may be the same number of examples.
            entries[count] = metrics
    # Without all its examples a newcomer's value cannot be compared with the others'.
    for name in metrics_of.keys() - answered:
        label = strategy._run.clients.label(name)
        log(WARNING, "new client %s fell silent, and is left out", label)
        del metrics_of[name]
    return {name: list(entries.values()) for name, entries in metrics_of.items()}
