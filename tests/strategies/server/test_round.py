"""Replies of a round: checked once, unless their arrays are replaced."""

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.replies import to_record
from flwr_frl.strategies.server.round import Round


def test_a_valid_reply_is_checked_again_only_if_its_arrays_are_replaced():
    def echo(message: Message, context: object) -> Message:
        return Message(RecordDict({"arrays": to_record(sent)}), reply_to=message)

    sent = {"w": np.ones(3, np.float32)}
    grid, checked = InlineGrid(echo, 2), []
    round = Round(1, to_record(sent), check=lambda reply: checked.append(reply.node))
    round.like["arrays"] = round.record

    content = RecordDict({"arrays": round.record, "config": ConfigRecord()})
    messages = [Message(content, node, MessageType.TRAIN) for node in (1, 2)]
    first, second = grid.send_and_receive(round.ask(messages))
    assert round.is_valid(first)
    assert round.is_valid(second)
    second.content["arrays"] = to_record({"w": np.full(3, np.nan, np.float32)})
    round.close([first, second])
    assert [reply.message for reply in round.replies] == [first]
    assert checked == [1, 2]
    assert [name for name, _ in round.rejections] == ["2"]
    first.content["arrays"] = to_record({"w": np.zeros(3, np.float32)})
    round.close([first])
    assert round.replies[0].decoded["arrays"]["w"].tolist() == [0, 0, 0]
    assert checked == [1, 2, 1]
