"""Replies of a pending round: checked once, unless their arrays are replaced."""

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.pending_round import PendingRound
from flwr_frl.strategies.server.replies import to_record


def test_a_valid_reply_is_checked_again_only_if_its_arrays_are_replaced():
    def echo(message: Message, context: object) -> Message:
        return Message(RecordDict({"arrays": to_record(sent)}), reply_to=message)

    sent = {"w": np.ones(3, np.float32)}
    grid, checked = InlineGrid(echo, 2), []
    pending = PendingRound(1, str, to_record(sent))
    pending.expect("arrays", pending.sent)

    def check(reply: Message) -> None:
        pending.check(reply)
        checked.append(reply.metadata.src_node_id)

    content = RecordDict({"arrays": pending.sent, "config": ConfigRecord()})
    messages = [Message(content, node, MessageType.TRAIN) for node in (1, 2)]
    first, second = grid.send_and_receive(pending.ask(messages))
    assert all(pending.is_valid(reply, check) for reply in (first, second))
    second.content["arrays"] = to_record({"w": np.full(3, np.nan, np.float32)})
    assert pending.close([first, second], check) == [first]
    assert checked == [1, 2]
    assert [name for name, _ in pending.rejections] == ["2"]
    first.content["arrays"] = to_record({"w": np.zeros(3, np.float32)})
    assert pending.close([first], check) == [first]
    assert checked == [1, 2, 1]
