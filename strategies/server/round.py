"""One training round as an algorithm sees it: what was sent, and what came back."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message

from flwr_frl.common.memory_array import values_of
from flwr_frl.common.settings import SettingsError
from flwr_frl.strategies.server.pending_round import PendingRound
from flwr_frl.strategies.server.replies import Arrays, check_metrics


class _Copies(Mapping[str, npt.NDArray[Any]]):
    """Arrays by name, each copied when it is first read."""

    def __init__(self, read: Callable[[], Arrays]) -> None:
        self._read = read
        self._copies: Arrays = {}

    @cached_property
    def _views(self) -> Arrays:
        return self._read()

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._copies:
            self._copies[name] = self._views[name].copy()
        return self._copies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class Reply:
    """A client's checked reply to training.

    Attributes
    ----------
    client : str
        The client's name.
    message : Message
        The reply as Flower's message.
    arrays : mapping of str to ndarray
        Its arrays, by name, those that this client alone has received among them. They
        are writable copies, made when they are first read.
    read : callable
        Returns the same arrays without copying them, for reading only.
    """

    def __init__(
        self, client: str, message: Message, read: Callable[[], Arrays]
    ) -> None:
        self.client, self.message, self.read = client, message, read
        self.arrays: Mapping[str, npt.NDArray[Any]] = _Copies(read)

    @property
    def metrics(self) -> dict[str, float]:
        """Its metrics, ``num-examples`` and ``train-loss`` among them."""
        return check_metrics(self.message)


@dataclass
class Round:
    """A training round.

    Parameters
    ----------
    number : int
        The round, from 1.
    clients : list of str
        Names of the clients that are asked, in order.
    record : ArrayRecord
        The shared arrays.
    config : ConfigRecord
        Config that is sent to all clients; `Strategy.begin` may add to it.
    combine : callable
        Combines replies by the run's rule.
    pending : PendingRound
        The messages, and what came back.
    expected : dict of str to ndarray, optional
        Arrays whose names, shapes and dtypes replies must have, by default those of
        ``sent``; `Strategy.begin` may set it.
    replies : list of Reply
        The valid replies, in the order of the clients' names.
    """

    number: int
    clients: list[str]
    record: ArrayRecord
    config: ConfigRecord
    combine: Callable[[list[Reply]], Arrays | None]
    pending: PendingRound = field(default_factory=PendingRound)
    expected: Arrays | None = None
    replies: list[Reply] = field(default_factory=list)

    @cached_property
    def sent(self) -> dict[str, npt.NDArray[Any]]:
        """The shared arrays, by name; for reading only."""
        return {name: values_of(array) for name, array in self.record.items()}

    def need(self, *names: str) -> None:
        """Raise `SettingsError` if the shared arrays lack one of these."""
        if missing := [name for name in names if name not in self.record]:
            raise SettingsError(
                f"initial_arrays lacks {', '.join(map(repr, missing))}, which the "
                "algorithm sends beside the model; pass the arrays that "
                "initialize(grid) returns, with flwr_frl.clients.client_app:app",
                "initial-arrays",
            )

    def mean(self, replies: list[Reply] | None = None) -> Arrays | None:
        """Return the mean of replies, or the result of the rule of ``aggregation``.

        Parameters
        ----------
        replies : list of Reply, optional
            Some of the replies, by default all.

        Returns
        -------
        dict of str to ndarray, or None
            None if all weights are 0.
        """
        return self.combine(self.replies if replies is None else replies)
