"""Tables of devices: columns are scaled by the statistics of all of them."""

import json

import numpy as np
import pytest
from refusals import refusal

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.command_line import run_config
from flwr_frl.common.settings import resolve
from flwr_frl.predict import load_run
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.clients import pooled
from flwr_frl.strategies.server_app import serve

# Names of simulated clients, since batches are drawn from the client's name.
PEOPLE = ("000000", "000001", "000002")
HEADER = "person,heart,age,score,active"

COMMON = """
algorithm="fedavg" task="table" label-column="score" client-column="person"
num-clients=3 num-server-rounds=2 fraction-train=1.0 max-gradient-norm=1.0
checkpoint-every=1
"""


@pytest.fixture
def tables(tmp_path):
    """Write each person's rows into one table, and into a folder of their own."""
    rng = np.random.default_rng(0)
    for i, name in enumerate(PEOPLE):
        for part, rows in (("train", 20 + 10 * i), ("test", 10)):
            heart, age = rng.normal(i, 1, rows), rng.normal(1e6, 1000 * (i + 1), rows)
            score = np.where(heart > i, 3.5, -1.25) + heart
            cells = np.column_stack([heart, age, score]).tolist()
            own = [",".join([name, *map(repr, r), "ny"[r[2] > 1]]) for r in cells]
            for folder in (tmp_path / name, tmp_path / "all"):
                folder.mkdir(exist_ok=True)
                file = folder / f"{part}.csv"
                before = file.read_text() if file.exists() else HEADER
                file.write_text("\n".join([before, *own]))
    return tmp_path


def settings_of(tables, output, **others):
    places = {"data-dir": "all", "cache-dir": "cache", "output": output}
    paths = {name: str(tables / place) for name, place in places.items()}
    return resolve({**run_config([COMMON]), **paths, **others})


def run(settings, tables, people=()):
    """Run in simulation, or with devices of these people."""
    grid = InlineGrid(make_app(settings), 3)
    contexts = dict(zip(people or PEOPLE, grid.contexts.items(), strict=False))
    grid.contexts.data = dict(contexts.values())
    for name in people:
        _, context = contexts[name]
        place = tables / name if name in PEOPLE else tables / PEOPLE[2]
        node = {"client-name": name, "data-dir": str(place)}
        context.node_config = {**node, "state-dir": str(tables / "states" / name)}
    serve(grid, settings)
    path = tables / settings["output"] / "fedavg" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("label", ["score", "active"])
def test_devices_have_the_numbers_of_the_simulation(tables, label):
    named = {"label-column": label}
    expected = run(settings_of(tables, "inline", **named), tables)
    found = run(settings_of(tables, "devices", **named), tables, PEOPLE)
    for ours, theirs in zip(found, expected, strict=True):
        for name in {"loss", "rmse"} & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6)
    # A device that joins after a resume is scaled by them as well.
    resumed = {"resume": str(tables / "devices"), "num-server-rounds": 3}
    later = settings_of(tables, "devices", **named, **resumed)
    assert len(run(later, tables, (*PEOPLE[:2], "new"))) == 3
    of_one = {"data_dir": str(tables / PEOPLE[2]), "cache_dir": str(tables / "cache")}
    of_all = {**of_one, "data_dir": str(tables / "all")}
    scaled, exact = (
        load_run(tables / output / "fedavg", client, **named).task.scaling(0)
        for output, client, named in (
            ("devices", "new", of_one),
            ("inline", "", of_all),
        )
    )
    assert scaled.mean == pytest.approx(exact.mean, rel=1e-12)
    assert scaled.factor == pytest.approx(exact.factor, rel=1e-9)


@pytest.mark.parametrize(
    "private",
    [
        {"secure-aggregation": True},
        {"dp-noise": 1.0, "dp-clip": 1.0, "dp-delta": 1e-5},
        {"server-dp-noise": 1.0, "server-dp-clip": 1.0, "server-dp-delta": 1e-5},
    ],
)
def test_private_runs_refuse_plain_sums_and_name_client(tables, private):
    settings = settings_of(tables, "devices", **private)
    error = str(refusal(run, settings, tables, PEOPLE))
    assert "standardize is 'global'; expected client or none with" in error


def test_tables_with_too_many_columns_name_client(tables, monkeypatch):
    monkeypatch.setattr("flwr_frl.common.messages.MOST_STATISTICS", 6)
    error = str(refusal(run, settings_of(tables, "devices"), tables, PEOPLE))
    assert "expected client or none on devices with more than 2 columns" in error


def test_pooled_statistics_are_those_of_all_rows_and_leave_out_unusual_lists():
    rows = np.random.default_rng(1).normal([1e6, -3], [1, 20], (50, 2))
    parts = [rows[:7], rows[7:]]
    lists = [
        [*(float(len(p)) for _ in "ab"), *p.mean(0).tolist(), *p.std(0).tolist()]
        for p in parts
    ]
    unusual: list[object] = [[1.0] * 9, ["a"] * 6, 3, [], [1.0] * 5]
    found = pooled([*lists, *unusual])
    assert found == pytest.approx([50, 50, *rows.mean(0), *rows.std(0)], rel=1e-9)
    assert pooled(unusual[1:]) == []
