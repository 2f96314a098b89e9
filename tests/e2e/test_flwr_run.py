"""``flwr run .`` in Flower's simulation gives the same results as ``simulation.py``."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import run
from deploy_commands import command
from federation import BIN, local_flower, project, read_lines

COMMON = "evaluate-last=1 num-clients=4 classes-per-client=5 "
SETTINGS = {
    "flute": COMMON + "num-server-rounds=2",
    # The speed model determines the arrival order; versions 2, 4 and 5 are evaluated.
    "fedbuff": COMMON
    + 'num-server-rounds=5 evaluate-every=2 async-base="fedrep" speed-model="dynamic" '
    "concurrency=3 buffer-size=2",
}


# Number of Ray workers: two, which reply concurrently, or one
PROCESSES = {"flute": 2, "fedbuff": 1}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables with which both runs use the same local SuperLink."""
    with local_flower(tmp_path_factory.mktemp("flwr")) as environment:
        yield environment


@pytest.mark.e2e
@pytest.mark.parametrize("algorithm", SETTINGS)
def test_flwr_run_equals_inline(
    environment: dict[str, str], tmp_path: Path, algorithm: str
) -> None:
    settings = SETTINGS[algorithm]
    inline, simulated = tmp_path / "inline", tmp_path / "simulated"
    nodes = "num-supernodes=4 client-resources-num-cpus=1 "
    nodes += f"init-args-num-cpus={PROCESSES[algorithm]}"
    config = f'algorithm="{algorithm}" {settings} output="{simulated}"'
    words = (BIN / "flwr", "run", project(), "local", "--stream")
    options = ("--federation-config", nodes, "--run-config", config)
    # On a busy machine, Flower's limit of 15 seconds for the SuperLink may be too low.
    for _ in range(3):
        where = {"env": environment, "cwd": tmp_path}
        result = command(*words, *options, seconds=400, **where)
        log = result.stdout + result.stderr
        if "Failed to start local SuperLink" not in log:
            break
    rows = read_lines(simulated / algorithm / "metrics.jsonl")
    assert rows, log
    # The log names the folder of the results and reports each round.
    assert f"results are written to {simulated}/{algorithm}" in log
    assert "connected clients: " in log
    clients, total = rows[-1]["clients"], len(rows)
    assert f"round {total} of {total}: {clients} clients, train loss " in log
    assert run(inline, algorithm, "--run-config", settings) == 0
    for actual, expected in zip(
        rows, read_lines(inline / algorithm / "metrics.jsonl"), strict=True
    ):
        del actual["seconds"], expected["seconds"]
        # pytest.approx does not compare lists within dictionaries.
        assert actual.pop("staleness", []) == expected.pop("staleness", [])
        assert actual == pytest.approx(expected, abs=1e-6)
    if algorithm == "fedbuff":
        assert [row["round"] for row in rows if "accuracy" in row] == [2, 4, 5]
        assert max(row["staleness-max"] for row in rows) > 0
    assert json.loads((simulated / "summary.json").read_text())["algorithms"]
