"""``flwr run .`` in Flower's simulation gives the same results as ``simulation.py``."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from federation import BIN, ROOT, local_flower, project, read_lines

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
    command = [
        str(BIN / "flwr"),
        "run",
        str(project()),
        "local",
        "--stream",
        "--federation-config",
        "num-supernodes=4 client-resources-num-cpus=1 "
        f"init-args-num-cpus={PROCESSES[algorithm]}",
        "--run-config",
        f'algorithm="{algorithm}" {settings} output="{simulated}"',
    ]
    # On a busy machine, Flower's limit of 15 seconds for the SuperLink may be too low.
    for _ in range(3):
        result = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        if "Failed to start local SuperLink" not in result.stdout + result.stderr:
            break
    rows = read_lines(simulated / algorithm / "metrics.jsonl")
    log = result.stdout + result.stderr
    assert rows, log
    # The log names the folder of the results and reports each round.
    assert f"results are written to {simulated}/{algorithm}" in log
    assert "connected clients: " in log
    clients = rows[-1]["clients"]
    total = len(rows)
    assert f"round {total} of {total}: {clients} clients, train loss " in log
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "simulation.py"),
            algorithm,
            "--backend",
            "inline",
            "--output",
            str(inline),
            "--run-config",
            settings,
        ],
        check=True,
        cwd=tmp_path,
    )
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
