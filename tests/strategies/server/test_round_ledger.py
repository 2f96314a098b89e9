"""The versions of a client's state that a resume needs are not deleted."""

import numpy as np
from flwr.app import Context, RecordDict

from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.messages import ACKNOWLEDGED_ROUND, CHECKPOINT_ROUND
from flwr_frl.strategies.server.round_ledger import RoundLedger


def test_client_keeps_what_a_checkpoint_needs_after_a_delayed_reply(tmp_path) -> None:
    ledger = RoundLedger()

    def state() -> PersonalState:
        config = ledger.config("a", 99, checkpoints=True)
        rounds = config[ACKNOWLEDGED_ROUND], config[CHECKPOINT_ROUND]
        context = Context(0, 0, {}, RecordDict(), {})
        return PersonalState(context, tmp_path, *rounds, run="run", client="a")

    def train(server_round: int, counted_in: int) -> None:
        personal = state()
        personal.load()
        personal.save({"head": np.array([server_round])}, server_round)
        ledger.acknowledge({"a": server_round}, counted_in)

    train(1, 1)
    train(2, 2)
    # The reply of round 3 counts after the checkpoint of round 5 was written.
    ledger.note_checkpoint(5)
    train(3, 7)
    train(8, 8)
    train(9, 9)
    # The server is killed, and resumes from the checkpoint.
    ledger.acknowledged = {"a": 2}
    loaded = state().load()
    assert loaded is not None
    assert loaded["head"].tolist() == [2]
    # The next checkpoint needs the newest version only.
    ledger.acknowledged = {"a": 9}
    ledger.note_checkpoint(10)
    assert ledger.config("a", 11, checkpoints=True)[CHECKPOINT_ROUND] == 10
