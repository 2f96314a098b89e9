"""Hooks by which a third-party strategy controls a run."""

import numpy as np
import pytest
from flwr.app import Context, Message, MessageType
from function_clients import grid_of, honest, partition_of, train_once
from inline_runs import Lossy, rows_of
from named_tasks import dashed
from outsiders import Hooked

from flwr_frl import running
from flwr_frl.common.errors import SettingsError
from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server_app import server_settings


def rows_after(tmp_path, name: str, grid: InlineGrid, **more) -> list[dict]:
    usual = {"algorithm": f"outsiders:{name}", "num-clients": 4, "fraction-train": 1.0}
    usual |= {"num-server-rounds": 4, "evaluate-every": 1, "output": str(tmp_path)}
    return rows_of(server_settings(usual | dashed(more)), grid)


@pytest.mark.parametrize(
    ("name", "evaluated"), [("Hooked", [4]), ("Unhooked", [1, 2, 3, 4])]
)
def test_strategy_may_evaluate_only_the_last_round(tmp_path, name, evaluated):
    rows = rows_after(tmp_path, name, grid_of(4))
    assert [row["round"] for row in rows if "accuracy" in row] == evaluated


@pytest.mark.parametrize(("name", "said"), [("Hooked", None), ("Unhooked", ["000002"])])
def test_unanswered_clients_are_listed_only_if_they_are_awaited(tmp_path, name, said):
    rows = rows_after(tmp_path, name, Lossy(honest, 4))
    # The missing reply is counted in both cases.
    assert [row["unanswered"] for row in rows] == [0, 1, 0, 0]
    assert [row.get("unanswered-clients") for row in rows] == [None, said, None, None]


def test_a_strategy_may_wrap_the_grid(tmp_path):
    Hooked.grids.clear()
    grid = grid_of(4)
    rows_after(tmp_path, "Hooked", grid)
    (wrapped,) = Hooked.grids
    assert wrapped.grid is grid
    kinds = [message.metadata.message_type for message in wrapped.passed]
    # Four rounds of four clients, and one evaluation; the hook is called before them.
    assert kinds == ["train"] * 16 + ["evaluate"] * 4


def test_too_few_clients_are_rejected_before_the_run_begins(tmp_path):
    trained = []

    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type == MessageType.TRAIN:
            trained.append(partition_of(context))
        return honest(message, context)

    with pytest.raises(SettingsError, match=r"^fewest is 5; 4 are too few$"):
        rows_after(tmp_path, "Hooked", grid_of(4, client), fewest=5)
    assert trained == []
    assert list(tmp_path.iterdir()) == []
    rows_after(tmp_path, "Hooked", grid_of(5, client), fewest=5)
    assert trained == [0, 1, 2, 3, 4] * 4


def test_defaults_of_a_strategy_in_simulation_apply_in_simulation_only():
    fixed = running.check(["flanp"], {}, "inline")["speed-model"]
    given = running.check(["flanp"], {"speed-model": "dynamic"}, "inline")
    assert (fixed, given["speed-model"]) == ("fixed", "dynamic")
    assert server_settings({"algorithm": "flanp"})["speed-model"] == "none"


def test_a_subclass_may_sample_with_numpy():
    class Random(FedAvg):
        def sample(self, server_round, nodes):
            return np.random.default_rng(server_round).permutation(nodes)[:2]

        def metrics(self, round):
            return {**super().metrics(round), "even": bool(len(round.replies) == 2)}

    _, metrics = train_once(Random(), grid_of(3))
    assert (metrics["clients"], metrics["even"]) == (2, 1.0)
