"""SRPFL (Tziotis et al., TMLR 2023): begin with the fastest clients, then double.

A wrapper of any strategy, like Flower's differential-privacy strategies: each round
uses only the first n clients that answer, and n doubles from stage to stage. Clients
outside the n keep their personal parts.
"""

import math
from collections.abc import Iterable, Sequence
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from strategies.grids.arrivals import ArrivalGrid, RealArrivals
from strategies.grids.speeds import Times
from strategies.server.replies import InvalidReplyError
from task.settings import SettingsError, require

# The contraction a of the linear case, with which the theory's stages are computed.
CONTRACTION = 0.1


class SRPFL(Strategy):
    """Close each round when the first n of the sampled clients have answered.

    Parameters
    ----------
    strategy : Strategy
        What is done with the replies: any strategy, Flower's own included.
    initial_nodes : int, default 10
        n in the first stage, at least 1.
    rounds_per_stage : int or sequence of int, default 10
        Rounds of each stage; a list gives the stages their own lengths, and its last
        one holds for all that follow.

    Raises
    ------
    SettingsError
        If a value is out of its range.
    """

    def __init__(
        self,
        strategy: Strategy,
        initial_nodes: int = 10,
        rounds_per_stage: int | Sequence[int] = 10,
    ) -> None:
        self.strategy = strategy
        self.initial_nodes = initial_nodes
        require(initial_nodes >= 1, "initial-nodes", initial_nodes, "at least 1")
        if isinstance(rounds_per_stage, int):
            rounds_per_stage = [rounds_per_stage]
        self.rounds_per_stage = tuple(rounds_per_stage)
        require(
            bool(self.rounds_per_stage) and min(self.rounds_per_stage) >= 1,
            "rounds-per-stage",
            rounds_per_stage,
            "a list of at least one number, each at least 1",
        )

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def nodes(self, server_round: int, sampled: int) -> int:
        """Return n, the number of clients that a round waits for.

        Parameters
        ----------
        server_round : int
            The round, from 1.
        sampled : int
            Number N of sampled clients.

        Returns
        -------
        int
            min(N, 2^r n0) in stage r.
        """
        last = len(self.rounds_per_stage) - 1
        count, begins, stage = self.initial_nodes, 1, 0
        while count < sampled:
            begins += self.rounds_per_stage[min(stage, last)]
            if server_round < begins:
                return count
            count, stage = 2 * count, stage + 1
        return sampled

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Result:
        """Run as Flower's ``Strategy.start``, by real arrival order.

        Parameters
        ----------
        grid : Grid
            Any grid; one that cannot wait for the first replies is decorated.
        *args, **kwargs
            As for Flower's ``Strategy.start``.

        Returns
        -------
        Result
            Flower's result.
        """
        able = grid if isinstance(grid, ArrivalGrid) else RealArrivals(grid)
        return super().start(able, *args, **kwargs)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the strategy sample, and tell the grid how many replies to wait for.

        Parameters
        ----------
        server_round, arrays, config, grid
            As for the strategy. The grid must be an `ArrivalGrid`; others wait for all.

        Returns
        -------
        list of Message
            The strategy's messages.
        """
        messages = list(
            self.strategy.configure_train(server_round, arrays, config, grid)
        )
        if isinstance(grid, ArrivalGrid):
            count = self.nodes(server_round, len(messages))
            grid.wait_for(count, self._is_valid)
        return messages

    def _is_valid(self, reply: Message) -> bool:
        check = getattr(self.strategy, "check_train_reply", None)
        if check is None:
            return True
        try:
            check(reply)
        except InvalidReplyError:
            return False
        return True

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the strategy aggregate the first replies.

        Parameters
        ----------
        server_round, replies
            As for the strategy.

        Returns
        -------
        arrays, metrics
            The strategy's.
        """
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the strategy evaluate.

        Parameters
        ----------
        server_round, arrays, config, grid
            As for the strategy.

        Returns
        -------
        list of Message
            The strategy's messages.
        """
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Let the strategy aggregate the evaluation.

        Parameters
        ----------
        server_round, replies
            As for the strategy.

        Returns
        -------
        MetricRecord or None
            The strategy's.
        """
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log what will run."""
        log(
            INFO,
            "\t├──> SRPFL: the first %d clients, doubled after %s rounds",
            self.initial_nodes,
            self.rounds_per_stage,
        )
        self.strategy.summary()


def stage_lengths(
    setting: str, initial_nodes: int, expected_arrivals: Times | None
) -> list[int]:
    """Return the stages' lengths that the setting ``rounds-per-stage`` means.

    Parameters
    ----------
    setting : str
        A number, numbers with commas between them, or ``theory``: τ_r is 2 log(2
        (E[T_(2n)] − E[T_(n)]) / (E[T_(n)] − E[T_(n/2)])) / log(1/(1 − a)), rounded up
        and at least 1 (SRPFL, section 4), with a = 0.1.
    initial_nodes : int
        n0.
    expected_arrivals : ndarray, optional
        E[T_(n)] for n = 1 … N, in the order of n.

    Returns
    -------
    list of int
        The lengths.

    Raises
    ------
    SettingsError
        If it is neither, or the theory has no speeds to go by.
    """
    if setting != "theory":
        parts = [part.strip() for part in setting.split(",") if part.strip()]
        if not parts or not all(part.isdigit() and int(part) >= 1 for part in parts):
            raise SettingsError(
                f"rounds-per-stage is {setting!r}; it must be a number of rounds, "
                "several with commas between them, each at least 1, or 'theory'"
            )
        return [int(part) for part in parts]
    if expected_arrivals is None:
        raise SettingsError(
            "rounds-per-stage is 'theory'; that needs a speed-model other than 'none'"
        )
    total = len(expected_arrivals)

    def arrival(n: int) -> float:
        return float(expected_arrivals[min(n, total) - 1]) if n else 0.0

    lengths, n = [], initial_nodes
    while n < total:
        later, earlier = arrival(2 * n) - arrival(n), arrival(n) - arrival(n // 2)
        ratio = 2 * later / earlier if earlier > 0 else 1.0
        rounds = 2 * math.log(max(ratio, 1.0)) / -math.log(1 - CONTRACTION)
        lengths.append(max(1, math.ceil(rounds)))
        n *= 2
    return lengths or [1]
