"""The states of virtual nodes."""

from flwr.app import ConfigRecord, Context, Message, RecordDict

from flwr_frl.strategies.grids.simulation import InlineGrid


def remembering(message: Message, context: Context) -> Message:
    """Count training messages in the node's state, and report the count."""
    partition = context.node_config["partition-id"]
    assert partition == context.node_id - 1
    seen = context.state.get("seen", {"times": 0})["times"]
    if message.metadata.message_type == "train":
        seen += 1
        context.state["seen"] = ConfigRecord({"times": seen})
    content = RecordDict({"seen": ConfigRecord({"times": seen})})
    return Message(content, reply_to=message)


def send(grid: InlineGrid, kind: str, nodes: list[int]) -> list[int]:
    messages = [Message(RecordDict(), node, kind) for node in nodes]
    replies = grid.send_and_receive(messages)
    return [reply.content["seen"]["times"] for reply in replies]


def test_only_contexts_with_a_state_are_held() -> None:
    grid = InlineGrid(remembering, 100_000)
    nodes = list(grid.get_node_ids())
    assert nodes == list(range(1, 100_001))
    assert send(grid, "evaluate", nodes[:50]) == [0] * 50
    assert set(grid.contexts.data.values()) == {None}
    assert send(grid, "train", [7, 9]) == [1, 1]
    assert send(grid, "train", [7]) == [2]
    assert send(grid, "evaluate", [6, 7, 8, 9]) == [0, 2, 0, 1]
    assert [c.node_id for c in grid.contexts_with_state()] == [7, 9]
    assert len(grid.contexts) == 100_000


def test_requested_context_is_the_one_that_the_node_uses() -> None:
    grid = InlineGrid(remembering, 3)
    grid.contexts[2].state["seen"] = ConfigRecord({"times": 5})
    assert send(grid, "train", [1, 2, 3]) == [1, 6, 1]
    del grid.contexts[1]
    assert list(grid.get_node_ids()) == [2, 3]
    assert send(grid, "train", [2, 3]) == [7, 2]
    assert [c.node_id for c in grid.contexts_with_state()] == [2, 3]
