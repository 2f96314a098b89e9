"""How far a run has come with each client."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from task.messages import ACKNOWLEDGED_ROUND, CHECKPOINT_ROUND, RUN


@dataclass
class Standing:
    """Which replies have counted, so that clients keep what the run would go back to.

    Parameters
    ----------
    run_token : str, default ""
        Names the run to the clients; kept by checkpoints.
    checkpointed : int, default 0
        Last round of a checkpoint that was really written.
    acknowledged : dict of str to int
        Last round in which each client's reply counted, by name.
    """

    run_token: str = ""
    checkpointed: int = 0
    acknowledged: dict[str, int] = field(default_factory=dict)
    # Replies that have counted so far.
    counted: int = 0

    def acknowledge(self, names: Collection[str], server_round: int) -> None:
        """Note that the replies of these clients count in a round."""
        self.acknowledged |= dict.fromkeys(names, server_round)
        self.counted += len(names)

    def config(
        self, name: str, server_round: int, checkpoints: bool
    ) -> dict[str, int | str]:
        """Return what a client needs to know of the run.

        That is the run, the client's last round that counted, and the round that a
        resume would go back to. ``checkpoints`` says whether the run writes any.
        """
        resumable = checkpoints or self.checkpointed > 0
        return {
            ACKNOWLEDGED_ROUND: self.acknowledged.get(name, 0),
            CHECKPOINT_ROUND: self.checkpointed if resumable else server_round - 1,
            **({RUN: self.run_token} if self.run_token else {}),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"acknowledged": self.acknowledged, "run": self.run_token}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Go back to a saved state."""
        self.acknowledged = {n: int(r) for n, r in values["acknowledged"].items()}
        self.run_token = str(values["run"])
