"""A Ray worker sends the states of clients back that have changed, and no others."""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from flwr_frl.strategies.grids.simulation import _Worker


def replaced(state: RecordDict) -> None:
    state["model"] = ArrayRecord({"w": Array(np.ones(2))})


def in_place(state: RecordDict) -> None:
    state["model"]["w"] = Array(np.ones(2))


def another(state: RecordDict) -> None:
    state["about"] = ConfigRecord({"round": 2})


def counted(state: RecordDict) -> None:
    state["counts"]["each"].append(3)


def gone(state: RecordDict) -> None:
    del state["model"]


CHANGES = [lambda state: None, replaced, in_place, another, counted, gone]


def test_only_changed_states_come_back():
    def app(message: Message, context: Context) -> Message:
        CHANGES[context.node_id](context.state)
        return Message(RecordDict(), reply_to=message)

    def context(node: int) -> Context:
        arrays = ArrayRecord({"w": Array(np.zeros(2))})
        counts = ConfigRecord({"each": [1, 2]})
        return Context(1, node, {}, RecordDict({"model": arrays, "counts": counts}), {})

    contexts = [context(node) for node in range(len(CHANGES))]
    messages = [Message(RecordDict(), node, "train") for node in range(len(CHANGES))]
    replies, changed, _ = _Worker().answer(app, messages, contexts)
    assert len(replies) == len(CHANGES)
    assert [each.node_id for each in changed] == [1, 2, 3, 4, 5]
