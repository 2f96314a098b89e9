"""``flwr run .`` in Flower's simulation gives the same results as ``simulation.py``."""

import json
from pathlib import Path

import pytest
from command_line import run
from deploy_commands import command
from federation import BIN, local_flower, project, read_lines

# The speed model determines the arrival order; versions 2, 4 and 5 are evaluated.
SETTINGS = (
    "evaluate-last=1 num-clients=4 classes-per-client=5 num-server-rounds=5 "
    'evaluate-every=2 async-base="fedrep" speed-model="dynamic" concurrency=3 '
    "buffer-size=2"
)
NODES = "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=1"


@pytest.mark.e2e
def test_flwr_run_equals_inline(tmp_path: Path) -> None:
    inline, simulated = tmp_path / "inline", tmp_path / "simulated"
    config = f'algorithm="fedbuff" {SETTINGS} output="{simulated}"'
    words = (BIN / "flwr", "run", project(), "local", "--stream")
    options = ("--federation-config", NODES, "--run-config", config)
    with local_flower(tmp_path / "flwr") as environment:
        # On a busy machine, Flower's limit of 15 seconds for the SuperLink may be too
        # low.
        for _ in range(3):
            where = {"env": environment, "cwd": tmp_path}
            result = command(*words, *options, seconds=400, **where)
            log = result.stdout + result.stderr
            if "Failed to start local SuperLink" not in log:
                break
    rows = read_lines(simulated / "fedbuff" / "metrics.jsonl")
    assert rows, log
    # The log names the folder of the results and reports each round.
    assert f"results are written to {simulated}/fedbuff" in log
    assert "connected clients: " in log
    clients, total = rows[-1]["clients"], len(rows)
    assert f"round {total} of {total}: {clients} clients, train loss " in log
    assert run(inline, "fedbuff", "--run-config", SETTINGS) == 0
    for actual, expected in zip(
        rows, read_lines(inline / "fedbuff" / "metrics.jsonl"), strict=True
    ):
        del actual["seconds"], expected["seconds"]
        # pytest.approx does not compare lists within dictionaries.
        assert actual.pop("staleness", []) == expected.pop("staleness", [])
        assert actual == pytest.approx(expected, abs=1e-6)
    assert [row["round"] for row in rows if "accuracy" in row] == [2, 4, 5]
    assert max(row["staleness-max"] for row in rows) > 0
    assert json.loads((simulated / "summary.json").read_text())["algorithms"]
