"""SRPFL's participation: a round ends with its first replies, more in later stages.

Used by `flwr_frl.strategies.srpfl.SRPFL`. FLANP's rules (Reisizadeh et al., 2022;
SRPFL, remark 3.3) are options: keep the clients of early stages, and end a stage once
the mean gradient is small.
"""

from collections.abc import Callable, Sequence
from logging import INFO

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.messages import NUM_EXAMPLES
from flwr_frl.common.settings import require
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.closing import Closing
from flwr_frl.strategies.server.round import Round
from flwr_frl.strategies.stages import automatic_stages, number_of_stages
from flwr_frl.strategies.wrapping import ClosesEarly

# Keys in the strategy's state.
# Number of rounds that ``auto`` divides into stages.
STAGED = "staged-rounds"
# Names of the clients that take part in all later rounds.
KEPT = "kept-clients"
# Stage, from 0, with its first round; and the squared change of the first round.
STAGE, FIRST_CHANGE = "srpfl-stage", "first-change"


class FirstReplies(ClosesEarly):
    """Close each round at the first n valid replies of the sampled clients.

    Parameters
    ----------
    strategy : Strategy
        The strategy, whose sampling does not change. Its state saves the stages and the
        clients that are kept, and the number of rounds, so that a run that is resumed
        with more rounds keeps its stages.
    initial_nodes : int
        The number of replies n0 in the first stage.
    lengths : sequence of int, optional
        Length of each stage in rounds; the last one also holds for all later stages.
        By default `automatic_stages`.
    sample_for : {"round", "stage", "run"}, default "round"
        How long a sample of clients is kept. With ``run``, clients whose replies have
        counted also take part in all later rounds, and only they do until the next
        stage.
    threshold : float, default 0
        θ > 0 ends stages by FLANP's rule, and not by their lengths: stage r, with
        n = 2^r n0 clients, ends when ‖Δ‖² ≤ θ n0 / n ‖Δ_1‖². Δ is the change of the
        shared arrays in a round, and Δ_1 that of the first round. With one gradient
        step, Δ = −η ∇L_n, so this is FLANP's ‖∇L_n‖² ≤ 2 μ c / (n s) for s examples a
        client, with θ = 2 μ c / (n0 s ‖∇L_1‖²).
    by_examples : bool, default False
        Whether a round closes when the training examples of the replies reach the share
        n / N of those of all sampled clients, so that they double from stage to stage
        (appendix C).
    """

    def __init__(
        self,
        strategy: Strategy,
        initial_nodes: int,
        lengths: Sequence[int] | None = None,
        sample_for: str = "round",
        threshold: float = 0.0,
        by_examples: bool = False,
    ) -> None:
        super().__init__(strategy)
        self.initial_nodes, self.lengths = initial_nodes, lengths
        self.sample_for, self.threshold = sample_for, threshold
        self.by_examples = by_examples
        # Whether the last round that was opened was in the last stage.
        self._is_last = False

    def check_clients(self, num_clients: int, sample: Callable[[], list[int]]) -> None:
        """Raise `SettingsError` unless there are enough clients for the first stage."""
        super().check_clients(num_clients, sample)
        sampled = len(sample())
        allowed = f"at most {sampled}, the number of sampled clients"
        valid = self.initial_nodes <= sampled
        require(valid, "initial-nodes", self.initial_nodes, allowed)
        self.check_replies("initial-nodes", self.initial_nodes, sampled)

    def set_rounds(self, num_rounds: int) -> None:
        """Set the number of rounds that ``auto`` divides into stages."""
        if self.lengths is None:
            self.strategy.state[STAGED] = num_rounds

    def wanted(self, server_round: int, sampled: int) -> int:
        """Return the number of replies that close a round: n = min(N, 2^r n0).

        The round is counted from 1 and belongs to stage r, counted from 0; N clients
        are sampled.
        """
        stage, _ = self._stage(server_round, sampled)
        replies: int = self.initial_nodes * 2**stage
        return min(sampled, replies)

    def _stage(self, server_round: int, sampled: int) -> tuple[int, int]:
        """Return a round's stage, from 0, and the first round of the stage."""
        stage, first = 0, 1
        if self.threshold:
            stage, first = self.strategy.state.get(STAGE, (stage, first))
            return stage, first
        lengths, count = self.lengths, number_of_stages(self.initial_nodes, sampled)
        if lengths is None and count:
            rounds = int(self.strategy.state.get(STAGED, 0))
            allowed = "given for rounds-per-stage='auto'"
            require(rounds > 0, "num_rounds", rounds, allowed)
            lengths = automatic_stages(self.initial_nodes, sampled, rounds)
        while lengths and stage < count:
            length = lengths[min(stage, len(lengths) - 1)]
            if server_round < first + length:
                break
            stage, first = stage + 1, first + length
        return stage, first

    def sample(self, server_round: int, nodes: list[int], others: int = 0) -> list[int]:
        """Return the nodes that train in a round, by ``sample_for``.

        The sample of a stage or a run stays the same while the same nodes are
        connected.
        """
        # As many are sampled if none owes a reply.
        self.clients = self.target(len(nodes) + others)
        if self.sample_for == "stage":
            _, server_round = self._stage(server_round, self.clients)
        if self.sample_for != "run":
            return super().sample(server_round, nodes, others)
        kept, total = self._kept(nodes), len(self.strategy.state.get(KEPT, []))
        if kept and total >= self.wanted(server_round, self.clients):
            return [node for node in nodes if node in kept]
        either = kept.union(super().sample(1, nodes, others))
        return [node for node in nodes if node in either]

    def _kept(self, nodes: list[int]) -> frozenset[int]:
        """Return the nodes whose clients take part in all later rounds."""
        names, name_of = (
            self.strategy.state.get(KEPT, []),
            self.strategy._run.clients.name_of,
        )
        return frozenset(node for node in nodes if name_of(node) in names)

    def examples_of(self, node: int) -> int:
        """Return a node's declared number of training examples.

        It is at least 1, so that every reply counts.
        """
        client = self.strategy._run.clients.known.get(node)
        # Some clients, such as those of Flower's templates, report a float.
        return max(1, int(client.properties.get(NUM_EXAMPLES, 1))) if client else 1

    def open(self, round: Round, messages: list[Message], grid: Grid) -> None:
        """Have the grid close the round at n replies."""
        sampled = len(messages)
        wanted = self.wanted(round.number, self.clients)
        self._is_last = wanted == self.clients
        closing = Closing(is_valid=round.is_valid)
        if wanted < sampled:
            nodes = [message.metadata.dst_node_id for message in messages]
            closing.missing, closing.required = wanted, self._kept(nodes)
            if self.by_examples:
                total = sum(map(self.examples_of, nodes))
                closing.missing = max(1, wanted * total // sampled)
                closing.weight_of = self.examples_of
        self.close_by(closing, grid)

    def close(
        self, round: Round, arrays: ArrayRecord | None
    ) -> dict[str, float | list[int]]:
        """Record the clients that took part; end the stage if the change is small."""
        state, names = self.strategy.state, [reply.client for reply in round.replies]
        if arrays is None:
            return {}
        if self.sample_for == "run":
            state[KEPT] = sorted({*state.get(KEPT, []), *names})
        if not self.threshold or self._is_last:
            return {}
        change = squared_change(round.record, arrays)
        first: float = state.setdefault(FIRST_CHANGE, change)
        stage, _ = state.get(STAGE, (0, 1))
        if change <= self.threshold / 2**stage * first:
            log(INFO, "SRPFL: stage %d ends with round %d", stage, round.number)
            state[STAGE] = [stage + 1, round.number + 1]
        return {}


def squared_change(sent: ArrayRecord, arrays: ArrayRecord) -> float:
    """Return ‖new − sent‖² over the arrays of floating-point numbers."""
    total = 0.0
    for name, array in arrays.items():
        new = array.numpy()
        if name in sent and new.dtype.kind == "f":
            change = np.subtract(new, sent[name].numpy(), dtype=np.float64)
            total += float(np.sum(change**2))
    return total
