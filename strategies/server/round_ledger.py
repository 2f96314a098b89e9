"""The rounds of each client whose replies have counted."""

from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any

from flwr.common import log

from flwr_frl.common.messages import (
    ACKNOWLEDGED_ROUND,
    CHECKPOINT_ROUND,
    EXAMPLES,
    KEPT_CHECKPOINT,
    KEPT_ROUNDS,
    RUN,
)


class RoundLedger:
    """Records whose replies have counted, so that clients keep the state to resume.

    Parameters
    ----------
    label : callable, default str
        Returns a client's name in logs.

    Attributes
    ----------
    run_token : str
        Identifies the run to the clients; saved in checkpoints.
    checkpointed : int
        Round of the last checkpoint that was written.
    acknowledged : dict of str to int
        Last round in which each client's reply counted, by name.
    counted : int
        Number of replies that have counted so far.
    resumed : int or None
        Round of the checkpoint from which the run was resumed.
    seen : dict of str to int
        Round of the later checkpoint that a rolled-back client has seen, by name.
    """

    def __init__(self, label: Callable[[str], str] = str) -> None:
        self._label = label
        self.run_token = ""
        self.checkpointed = self.counted = 0
        self.resumed: int | None = None
        self.acknowledged: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        # Fingerprint of each simulated client's examples at its first message, by name.
        self._examples: dict[str, str] = {}
        # Rounds whose state each client has saved, by name.
        self._kept: dict[str, list[int]] = {}
        # `acknowledged` in the last checkpoint.
        self._saved: dict[str, int] = {}
        # Clients whose delayed reply of a round up to this checkpoint counted after it.
        self._delayed = set[str]()
        # Why clients could not use their saved state, as last logged.
        self._unused: dict[str, str] = {}

    def is_rolled_back(self, name: str, properties: Mapping[str, Any]) -> bool:
        """Return whether a client is ahead of the server; False after the first call.

        A client is ahead after the server was restored from a backup.
        """
        if self.resumed is None or name in self._kept:
            return False
        rounds, seen = properties.get(KEPT_ROUNDS), properties.get(KEPT_CHECKPOINT)
        self._kept[name] = rounds if isinstance(rounds, list) else []
        if rounds == [] and self.acknowledged.get(name, 0):
            text = "client %s has lost what it kept; that of round %d was its last"
            log(WARNING, text, self._label(name), self.acknowledged[name])
        rounds = self._kept[name]
        if not isinstance(seen, int) or seen <= self.resumed:
            return False
        if not rounds or not all(isinstance(r, int) and r > 0 for r in rounds):
            return False
        self.seen[name] = seen
        return True

    def continue_from(self, name: str) -> None:
        """Let a client continue from its last round that counted.

        If the client no longer has the state of that round, it continues from its
        newest, so that nothing learned is lost.
        """
        newest, rounds = self.acknowledged.get(name, 0), self._kept[name]
        if newest not in rounds:
            self.acknowledged[name] = max(rounds)
        log(
            WARNING,
            "client %s has seen the checkpoint of round %d, later than this one of "
            "round %s; it goes on with what it had after round %d",
            self._label(name),
            self.seen[name],
            self.resumed,
            self.acknowledged[name],
        )

    def note_unused(self, reasons: Mapping[str, str]) -> None:
        """Log each new reason why a client could not use its saved state."""
        for name, reason in reasons.items():
            if self._unused.get(name) != reason:
                self._unused[name] = reason
                # The client starts from an older state, or without one.
                text = "client %s goes on without what it had kept last: %s"
                log(WARNING, text, self._label(name), reason)

    def note_checkpoint(self, server_round: int) -> None:
        """Record that the checkpoint of a round has been written or restored."""
        self.checkpointed = server_round
        self._saved = dict(self.acknowledged)
        self._delayed.clear()

    def acknowledge(self, rounds: Mapping[str, int], server_round: int) -> None:
        """Record that the replies of some clients have counted.

        Parameters
        ----------
        rounds : mapping of str to int
            Round of each client's reply, by the client's name. A delayed reply is of an
            earlier round, under which the client has saved its state.
        server_round : int
            The round in which they count.
        """
        for name, made_in in rounds.items():
            # A delayed reply must not replace a newer one that has counted.
            if made_in == server_round or made_in > self.acknowledged.get(name, 0):
                self.acknowledged[name] = made_in
                if made_in <= self.checkpointed:
                    self._delayed.add(name)
        self.counted += len(rounds)

    def config(
        self,
        name: str,
        server_round: int,
        checkpoints: bool,
        examples: object = None,
    ) -> dict[str, int | str]:
        """Return the entries about the run in a client's config.

        They are the run's token, the client's last round that has counted, the round
        to which a resume would return, and the first fingerprint of its examples.
        ``checkpoints`` is True if the run writes any. ``examples`` is the fingerprint
        that the client has reported, if any.
        """
        acknowledged, checkpointed = self.acknowledged.get(name, 0), self.checkpointed
        resumable = checkpoints or checkpointed > 0
        # If a delayed reply counted after a later round's checkpoint was written, this
        # checkpoint relies on an earlier state of this client.
        if name in self._delayed:
            checkpointed = self._saved.get(name, 0)
        first = {}
        if isinstance(examples, str):
            first[EXAMPLES] = self._examples.setdefault(name, examples)
        return {
            ACKNOWLEDGED_ROUND: acknowledged,
            CHECKPOINT_ROUND: checkpointed if resumable else server_round - 1,
            **({RUN: self.run_token} if self.run_token else {}),
            **first,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the values that a checkpoint saves."""
        run = {"acknowledged": self.acknowledged, "run": self.run_token}
        return {**run, EXAMPLES: self._examples}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Return to a saved state."""
        self.acknowledged = {n: int(r) for n, r in values["acknowledged"].items()}
        self.run_token = str(values["run"])
        self._examples = dict(values.get(EXAMPLES, {}))
