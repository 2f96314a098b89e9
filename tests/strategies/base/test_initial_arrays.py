"""Selection of a run's initial arrays from those that clients send."""

import numpy as np
import pytest
from flwr.app import MessageType
from function_clients import START, changing, grid_of

from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.server.replies import to_record

ARRAYS = f"{MessageType.QUERY}.arrays"


@pytest.mark.parametrize("bad", ["an error", "nothing"])
def test_invalid_initial_arrays_of_one_client_do_not_end_the_run(bad):
    def change(content, i):
        if i == 0 and bad == "an error":
            raise RuntimeError("broken")
        if i == 0:
            content.clear()

    arrays = FedAvg().initialize(grid_of(3, changing(ARRAYS, change)))
    assert arrays["w"].numpy().tolist() == START["w"].tolist()


LIES = {
    "other values": {n: v - 7 for n, v in START.items()},
    "nan": {n: np.full_like(v, np.nan) for n, v in START.items()},
    "1e30": {n: np.full_like(v, 1e30) for n, v in START.items()},
    "other names": {"x": START["w"]},
    "another shape": START | {"w": np.zeros((3, 3), np.float32)},
    "complex": {n: v.astype(np.complex64) for n, v in START.items()},
}


@pytest.mark.parametrize("n", [3, 5, 40])
@pytest.mark.parametrize("lie", list(LIES))
def test_majority_decides_on_the_initial_arrays(lie, n, caplog):
    def change(content, i):
        if i == 0:
            content["arrays"] = to_record(LIES[lie])

    arrays = FedAvg().initialize(grid_of(n, changing(ARRAYS, change)))
    assert {name: a.numpy().tolist() for name, a in arrays.items()} == {
        name: a.tolist() for name, a in START.items()
    }
    lines = [m for m in caplog.messages if "client 000000" in m]
    assert len(lines) == 1
