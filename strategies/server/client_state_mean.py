"""A strategy whose shared arrays are the mean of what all clients keep."""

from collections.abc import Iterable
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flwr_frl.strategies.base import BaseStrategy
from flwr_frl.strategies.server.replies import Arrays
from flwr_frl.task.messages import FROM_SHARED, IN_MEAN


class ClientStateMean(BaseStrategy):
    """Adds up clients' changes, so that the sum stays the mean of what they keep.

    What is cut off a change on its way into the mean, or is added to it, moves no
    client's own, and would be in the mean for good. So with ``server-dp-noise``, and
    where ``aggregation`` is another than the mean, clients tell how far their own is
    from what they were sent. Then the mean is one that forgets: with everybody in a
    round, and nothing cut off and nothing added, it is the same.

    After the server has been restored from a backup the mean begins anew where what a
    client keeps is later than what the mean has of it.
    """

    replies_are_changes = True

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        # Whose own is in the mean.
        self.in_mean: set[str] = set()
        self._sent = ArrayRecord()

    @property
    def is_approximate(self) -> bool:
        """Whether the shared arrays are no exact mean, and clients' changes of them."""
        return self.aggregation != "mean" or self.privacy is not None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send what is shared to the sampled clients, and remember it."""
        self._sent = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def content(
        self, node: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Say also what the client's change is counted from."""
        content = super().content(node, arrays, config)
        own = cast(ConfigRecord, content[self.configrecord_key])
        own[IN_MEAN] = self.name_of(node) in self.in_mean
        own[FROM_SHARED] = self.is_approximate
        return content

    def roll_back(self, name: str) -> None:
        """Begin anew also, if the mean has what the client no longer goes on from."""
        before = self.ledger.acknowledged.get(name)
        super().roll_back(name)
        moved = self.ledger.acknowledged.get(name) != before
        if moved and name in self.in_mean and not self.is_approximate:
            self.begin_anew(name)

    def begin_anew(self, name: str) -> None:
        """Let the mean begin anew, as this client goes on from something later."""
        raise NotImplementedError

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the state with whose own is in the mean."""
        arrays, values = super().state_dict()
        return arrays, {**values, "in_mean": sorted(self.in_mean)}

    def load_state_dict(self, arrays: Arrays, values: dict[str, Any]) -> None:
        """Go back to a saved state."""
        super().load_state_dict(arrays, values)
        # Checkpoints of before have the acknowledged ones alone.
        self.in_mean = set(values.get("in_mean", values["acknowledged"]))
