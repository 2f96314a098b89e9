"""Selection of a run's initial arrays from those that clients send."""

import numpy as np
import pytest
from flwr.app import Context, Message, MessageType
from function_clients import START, Client, grid_of, honest, partition_of

from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.server.replies import to_record


@pytest.mark.parametrize("bad", ["an error", "nothing"])
def test_invalid_initial_arrays_of_one_client_do_not_end_the_run(bad):
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        kind = message.metadata.message_type
        if kind == f"{MessageType.QUERY}.arrays" and partition_of(context) == 0:
            if bad == "an error":
                raise RuntimeError("broken")
            reply.content.clear()
        return reply

    arrays = FedAvg().initialize(grid_of(3, client))
    assert arrays["w"].numpy().tolist() == START["w"].tolist()


LIES = {
    "other values": {n: v - 7 for n, v in START.items()},
    "nan": {n: np.full_like(v, np.nan) for n, v in START.items()},
    "1e30": {n: np.full_like(v, 1e30) for n, v in START.items()},
    "other names": {"x": START["w"]},
    "another shape": START | {"w": np.zeros((3, 3), np.float32)},
    "complex": {n: v.astype(np.complex64) for n, v in START.items()},
}


def arrays_of(lies: dict[int, dict]) -> Client:
    """Return a client that is honest except for these initial arrays, by partition."""

    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        lie = lies.get(partition_of(context))
        if message.metadata.message_type == f"{MessageType.QUERY}.arrays" and lie:
            reply.content["arrays"] = to_record(lie)
        return reply

    return client


@pytest.mark.parametrize("n", [3, 5, 40])
@pytest.mark.parametrize("lie", list(LIES))
def test_majority_decides_on_the_initial_arrays(lie, n, caplog):
    arrays = FedAvg().initialize(grid_of(n, arrays_of({0: LIES[lie]})))
    assert {name: a.numpy().tolist() for name, a in arrays.items()} == {
        name: a.tolist() for name, a in START.items()
    }
    lines = [m for m in caplog.messages if "client 000000" in m]
    assert len(lines) == 1
