"""How far a run has come with each client."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

from flwr.common import log

from flwr_frl.task.messages import (
    ACKNOWLEDGED_ROUND,
    CHECKPOINT_ROUND,
    KEPT_CHECKPOINT,
    KEPT_ROUNDS,
    RUN,
)


@dataclass
class RoundLedger:
    """Which replies have counted, so that clients keep what the run would go back to.

    Parameters
    ----------
    run_token : str, default ""
        Names the run to the clients; kept by checkpoints.
    checkpointed : int, default 0
        Last round of a checkpoint that was really written.
    acknowledged : dict of str to int
        Last round in which each client's reply counted, by name.
    counted : int, default 0
        Replies that have counted so far.
    resumed : int, optional
        The round of the checkpoint from which the run goes on.
    seen : dict of str to int
        The round of the later checkpoint that a client has seen, by its name.
    """

    run_token: str = ""
    checkpointed: int = 0
    acknowledged: dict[str, int] = field(default_factory=dict)
    counted: int = 0
    resumed: int | None = None
    seen: dict[str, int] = field(default_factory=dict)
    # The rounds of which clients have kept something.
    _kept: dict[str, list[int]] = field(default_factory=dict)
    # Why clients could not use what they had kept, as it was last logged.
    _unused: dict[str, str] = field(default_factory=dict)

    def is_rolled_back(self, name: str, properties: Mapping[str, Any]) -> bool:
        """Return whether a client, asked for the first time, is ahead of the server.

        So it is after the server has been restored from a backup.
        """
        if self.resumed is None or name in self._kept:
            return False
        rounds, seen = properties.get(KEPT_ROUNDS), properties.get(KEPT_CHECKPOINT)
        self._kept[name] = rounds if isinstance(rounds, list) else []
        if rounds == [] and self.acknowledged.get(name, 0):
            text = "client %s has lost what it kept; that of round %d was its last"
            log(WARNING, text, name, self.acknowledged[name])
        rounds = self._kept[name]
        if not isinstance(seen, int) or seen <= self.resumed:
            return False
        if not rounds or not all(isinstance(r, int) and r > 0 for r in rounds):
            return False
        self.seen[name] = seen
        return True

    def continue_from(self, name: str) -> None:
        """Go on from the newest round that a client and the server both know.

        Where the client has it no more, that is its newest: nothing learned is lost.
        """
        known, rounds = self.acknowledged.get(name, 0), self._kept[name]
        if known not in rounds:
            self.acknowledged[name] = max(rounds)
        log(
            WARNING,
            "client %s has seen the checkpoint of round %d, later than this one of "
            "round %s; it goes on with what it had after round %d",
            name,
            self.seen[name],
            self.resumed,
            self.acknowledged[name],
        )

    def note_unused(self, reasons: Mapping[str, str]) -> None:
        """Log, once for each, why clients could not use what they had kept."""
        for name, reason in reasons.items():
            if self._unused.get(name) != reason:
                self._unused[name] = reason
                # It begins anew, or has an older version: of the run or of another.
                text = "client %s goes on without what it had kept last: %s"
                log(WARNING, text, name, reason)

    def acknowledge(self, rounds: Mapping[str, int], server_round: int) -> None:
        """Note that the replies of some clients count.

        Parameters
        ----------
        rounds : mapping of str to int
            The round in which each client made its reply, by its name: the version that
            it has kept, also where the reply was held back and counts later.
        server_round : int
            The round in which they count.
        """
        for name, made_in in rounds.items():
            # A reply that was held back must not hide a newer one that has counted.
            if made_in == server_round or made_in > self.acknowledged.get(name, 0):
                self.acknowledged[name] = made_in
        self.counted += len(rounds)

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
