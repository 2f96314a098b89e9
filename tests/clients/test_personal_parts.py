"""No message contains personal arrays."""

from collections.abc import Iterator

import pytest
from client_messages import (
    FAST,
)
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.messages import CLASS_COUNTS, HELD_CLASSES, KEPT_ROUNDS
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import server_app
from flwr_frl.strategies.grids.simulation import InlineGrid


def head_bytes(context: Context) -> Iterator[tuple[str, bytes]]:
    for record in context.state.values():
        if isinstance(record, ArrayRecord):
            for name, array in record.items():
                yield name, array.numpy().tobytes()


class Recorder:
    """A ClientApp that records all messages, replies and personal arrays."""

    def __init__(self, app: ClientApp) -> None:
        self.app = app
        self.messages: list[Message] = []
        self.personal: dict[str, set[bytes]] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        self.messages.append(message)
        reply = self.app(message, context)
        self.messages.append(reply)
        for name, value in head_bytes(context):
            self.personal.setdefault(name, set()).add(value)
        return reply


def run_recorded(tmp_path, **overrides) -> tuple[Recorder, InlineGrid]:
    usual = {"num-clients": 10, "num-server-rounds": 3, "output": str(tmp_path)}
    settings = resolve({**FAST, **usual, **overrides})
    recorder = Recorder(make_app(settings))
    grid = InlineGrid(recorder, 10)
    server_app.run(grid, settings)
    return recorder, grid


def arrays_in(messages: list[Message]) -> Iterator[tuple[str, Array]]:
    for message in messages:
        for record in message.content.array_records.values():
            yield from record.items()


# Properties that are lists, with the type of their entries. They have at most as many
# entries as there are classes.
LISTS = {KEPT_ROUNDS: int, HELD_CLASSES: str, CLASS_COUNTS: int}


@pytest.mark.parametrize("task", ["digits", "linear"])
@pytest.mark.parametrize("algorithm", ["fedrep", "fedper", "local"])
def test_heads_are_in_no_message(tmp_path, algorithm, task):
    recorder, grid = run_recorded(tmp_path, algorithm=algorithm, task=task)
    messages = recorder.messages
    # All 10 clients are queried for properties and at least one for arrays; in each of
    # three rounds, 5 train and 10 are tested. Every message has a reply.
    assert len(messages) >= 2 * (10 + 1 + 3 * (5 + 10))
    assert not any(message.has_error() for message in messages)
    # No array has the name of a head.
    allowed = set() if algorithm == "local" else {"representation"}
    if (algorithm, task) == ("fedrep", "linear"):
        # The initial B is computed from mean y² x xᵀ, which contains no head.
        allowed |= {"moments"}
    assert {name.split(".")[0] for name, _ in arrays_in(messages)} == allowed
    # No record contains the values of a personal array of any round.
    personal = {v for values in recorder.personal.values() for v in values}
    assert any(name.startswith("head.") for name in recorder.personal)
    assert len(personal) >= 5
    # All clients have different heads.
    heads = [dict(head_bytes(context)) for context in grid.contexts.values()]
    last = [value for head in heads for n, value in head.items() if "weight" in n]
    assert len(set(last)) == len(last)
    for _, array in arrays_in(messages):
        assert not any(head in array.data for head in personal)
        assert array.numpy().tobytes() not in personal
    # Other records contain only single numbers, short strings and short lists.
    for message in messages:
        for record in message.content.metric_records.values():
            assert len(record) < 12
            assert all(isinstance(value, (int, float)) for value in record.values())
        for record in message.content.config_records.values():
            assert len(record) < 16
            for name, value in record.items():
                if name in LISTS:
                    assert all(type(entry) is LISTS[name] for entry in value)
                    assert len(value) <= 10
                    continue
                assert isinstance(value, (bool, int, float, str))
                assert len(str(value)) < 100
