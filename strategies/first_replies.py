"""SRPFL's participation: a round ends with its first replies, more in later stages.

Used by `flwr_frl.strategies.srpfl.SRPFL`. FLANP's rules (Reisizadeh et al., 2022;
SRPFL, remark 3.3) are options: keep the clients of early stages, and end a stage once
the mean gradient is small.
"""

from collections.abc import Callable, Sequence
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.messages import NUM_EXAMPLES
from flwr_frl.common.settings import require
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.closing import Closing
from flwr_frl.strategies.grids.inbox import closing_grid
from flwr_frl.strategies.server.aggregation import assumed_byzantine, least_replies
from flwr_frl.strategies.server.participation import Participation
from flwr_frl.strategies.server.traits import StrategySettings
from flwr_frl.strategies.stages import automatic_stages

# Keys in the wrapped strategy's state.
# Number of rounds that ``auto`` divides into stages.
STAGED = "staged-rounds"
# Names of the clients that take part in all later rounds.
KEPT = "kept-clients"
# Stage, from 0, with its first round; and the squared change of the first round.
STAGE, FIRST_CHANGE = "srpfl-stage", "first-change"


class FirstReplies(Participation):
    """Close each round at the first n valid replies of the sampled clients.

    Parameters
    ----------
    strategy : Strategy or None
        The strategy, whose sampling does not change; None for one of another package,
        which samples itself. Its state saves the stages and the clients that are kept,
        and the number of rounds, so that a run that is resumed with more rounds keeps
        its stages.
    initial_nodes : int
        The number of replies n in the first stage.
    lengths : sequence of int, optional
        Length of each stage in rounds; the last one also holds for all later stages.
        By default `automatic_stages`.
    num_rounds : int, optional
        Number of rounds of the run.
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

    waits_for_all = False

    def __init__(
        self,
        strategy: Strategy | None,
        initial_nodes: int,
        lengths: Sequence[int] | None = None,
        num_rounds: int | None = None,
        sample_for: str = "round",
        threshold: float = 0.0,
        by_examples: bool = False,
    ) -> None:
        base = strategy.participation if strategy else Participation(1.0, 1, 0)
        super().__init__(base.fraction, base.least, base.seed)
        self._strategy = strategy
        self._state: dict[str, Any] = strategy.state if strategy else {}
        self.initial_nodes, self.lengths = initial_nodes, lengths
        self.num_rounds = num_rounds
        self.sample_for, self.threshold = sample_for, threshold
        self.by_examples = by_examples
        self._warned = False
        # Number of clients that would be sampled if none owed a reply.
        self._pool: int | None = None
        # The last round that was opened, and whether it was in the last stage.
        self._round, self._is_last = 0, False
        if num_rounds:
            self.set_rounds(num_rounds)

    def set_rounds(self, num_rounds: int) -> None:
        """Set the number of rounds that ``auto`` divides into stages."""
        self.num_rounds = num_rounds
        if self.lengths is None:
            self._state[STAGED] = num_rounds

    def check(self, num_clients: int, sample: Callable[[], list[int]]) -> None:
        """Raise `SettingsError` unless there are enough clients for the first stage.

        Log a warning if the run will not reach the last stage.
        """
        super().check(num_clients, sample)
        sampled = len(sample())
        allowed = f"at most {sampled}, the number of sampled clients"
        valid = self.initial_nodes <= sampled
        require(valid, "initial-nodes", self.initial_nodes, allowed)
        settings = self._strategy.settings if self._strategy else StrategySettings()
        rule, share = settings.aggregation, settings.byzantine_fraction
        needed = least_replies(rule, sampled, share, settings.bucket_size)
        allowed = f"at least {needed} with this aggregation and byzantine-fraction: "
        allowed += f"Byzantine clients may be the fastest of {sampled} sampled ones"
        valid = self.initial_nodes >= needed
        require(valid, "initial-nodes", self.initial_nodes, allowed)
        last = self.num_rounds
        if last and not self.threshold and self.nodes(last, sampled) < sampled:
            text = "SRPFL ends before its last stage: round %d, the last one, waits "
            text += "for %d of %d sampled clients; rounds-per-stage='auto' comes to all"
            log(WARNING, text, last, self.nodes(last, sampled), sampled)

    def adapt_grid(self, grid: Grid, name_of: Callable[[int], str]) -> Grid:
        """Return a grid that can close a round at the first replies."""
        return closing_grid(grid, name_of)

    def nodes(self, server_round: int, sampled: int) -> int:
        """Return the number of replies that close a round: min(N, 2^r n0).

        The round is counted from 1 and belongs to stage r, counted from 0; N clients
        are sampled.
        """
        return self._stage(server_round, sampled)[0]

    def sample(self, server_round: int, nodes: list[int], others: int = 0) -> list[int]:
        """Return the nodes that train in a round, by ``sample_for``.

        The sample of a stage or a run stays the same while the same nodes are
        connected.
        """
        self._pool = self._target(len(nodes) + others)
        if self.sample_for == "stage":
            first = self._stage(server_round, self._pool)[1]
            return super().sample(first, nodes, others)
        if self.sample_for == "run":
            chosen = super().sample(1, nodes, others)
            kept, total = self._kept(nodes), len(self._state.get(KEPT, []))
            if kept and total >= self.nodes(server_round, self._pool):
                return [node for node in nodes if node in kept]
            either = kept.union(chosen)
            return [node for node in nodes if node in either]
        return super().sample(server_round, nodes, others)

    def _kept(self, nodes: list[int]) -> frozenset[int]:
        """Return the nodes whose clients take part in all later rounds."""
        names = frozenset(self._state.get(KEPT, []))
        if not names or self._strategy is None:
            return frozenset()
        name_of = self._strategy.clients.name_of
        return frozenset(node for node in nodes if name_of(node) in names)

    def examples_of(self, node: int) -> int:
        """Return a node's declared number of training examples.

        It is at least 1, so that every reply counts.
        """
        client = self._strategy.clients.known.get(node) if self._strategy else None
        # Some clients, such as those of Flower's templates, report a float.
        return max(1, int(client.properties.get(NUM_EXAMPLES, 1))) if client else 1

    def _stage(self, server_round: int, sampled: int) -> tuple[int, int]:
        """Return a round's number of replies and the first round of its stage."""
        if self.threshold:
            stage, first = self._state.get(STAGE, [0, 1])
            return min(sampled, self.initial_nodes * 2**stage), first
        lengths = self.lengths
        if lengths is None and sampled > self.initial_nodes:
            rounds = self._state.get(STAGED) or self.num_rounds or 0
            allowed = "given for rounds-per-stage='auto'"
            require(rounds > 0, "num_rounds", self.num_rounds, allowed)
            lengths = automatic_stages(self.initial_nodes, sampled, rounds)
        count, end, stage = self.initial_nodes, 0, 0
        while lengths and count < sampled:
            start, end = end, end + lengths[min(stage, len(lengths) - 1)]
            if server_round <= end:
                return count, start + 1
            count, stage = 2 * count, stage + 1
        return sampled, end + 1

    def open(
        self,
        server_round: int,
        messages: list[Message],
        grid: Grid,
        is_valid: Callable[[Message], bool],
    ) -> None:
        """Have the grid close the round at n replies, if it can."""
        self._round = server_round
        wait_for = getattr(grid, "wait_for", None)
        if wait_for is None:
            if not self._warned:
                text = "SRPFL waits for all clients: this grid closes no round early"
                log(WARNING, text)
            self._warned = True
            return
        sampled = len(messages)
        pool = self._pool or sampled
        wanted = self.nodes(server_round, pool)
        count, self._is_last = min(sampled, wanted), wanted == pool
        if count == sampled:
            wait_for(Closing(is_valid=is_valid, round=server_round))
            return
        nodes = [message.metadata.dst_node_id for message in messages]
        kept = self._kept(nodes)
        if self.by_examples:
            total = sum(map(self.examples_of, nodes))
            count = max(1, count * total // sampled)
            wait_for(Closing(count, is_valid, self.examples_of, kept, server_round))
        else:
            wait_for(Closing(count, is_valid, required=kept, round=server_round))

    def byzantine_share(self, fraction: float, count: int) -> float:
        """Return the share of all sampled Byzantine clients, who may reply first."""
        return assumed_byzantine(max(count, self._pool or 0), fraction) / count

    def note(self, names: list[str], sent: ArrayRecord, arrays: ArrayRecord) -> None:
        """Record the clients that took part; end the stage if the change is small."""
        if self.sample_for == "run":
            self._state[KEPT] = sorted({*self._state.get(KEPT, []), *names})
        if not self.threshold or self._is_last:
            return
        change = squared_change(sent, arrays)
        first: float = self._state.setdefault(FIRST_CHANGE, change)
        stage, _ = self._state.get(STAGE, [0, 1])
        if change <= self.threshold / 2**stage * first:
            text = "SRPFL: stage %d ends, with %.3g of the first round's squared change"
            log(INFO, text, stage, change / first if first else 0.0)
            self._state[STAGE] = [stage + 1, self._round + 1]


def squared_change(sent: ArrayRecord, arrays: ArrayRecord) -> float:
    """Return ‖new − sent‖² over the arrays of floating-point numbers."""
    total = 0.0
    for name, array in arrays.items():
        new = array.numpy()
        if name in sent and new.dtype.kind == "f":
            change = np.subtract(new, sent[name].numpy(), dtype=np.float64)
            total += float(np.sum(change**2))
    return total
