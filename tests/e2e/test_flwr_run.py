"""``flwr run .`` in Flower's simulation gives the numbers of ``simulation.py``."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from federation import BIN, ROOT, local_flower, read_lines

COMMON = "evaluate-last=1 num-clients=4 classes-per-client=5 "
SETTINGS = {
    "flute": COMMON + "num-server-rounds=2",
    # The order of arrival is the speed model's, and versions 2 and 4 are evaluated.
    "fedbuff": COMMON
    + 'num-server-rounds=5 evaluate-every=2 async-base="fedrep" speed-model="dynamic" '
    "concurrency=3 buffer-size=2",
}


# Ray's processes for clients: two, which answer at the same time, and one.
PROCESSES = {"flute": 2, "fedbuff": 1}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An environment in which both runs have the same local SuperLink."""
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
        str(ROOT),
        "local",
        "--stream",
        "--federation-config",
        "num-supernodes=4 client-resources-num-cpus=1 "
        f"init-args-num-cpus={PROCESSES[algorithm]}",
        "--run-config",
        f'algorithm="{algorithm}" {settings} output="{simulated}"',
    ]
    # On a busy machine Flower's own 15 seconds for the SuperLink may be too few.
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
    said = result.stdout + result.stderr
    assert rows, said
    # Whoever looks on sees where the results are, and how each round went.
    assert f"results are written to {simulated}/{algorithm}" in said
    assert "connected clients: " in said
    clients = rows[-1]["clients"]
    total = len(rows)
    assert f"round {total} of {total}: {clients} clients, train loss " in said
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
    for found, expected in zip(
        rows, read_lines(inline / algorithm / "metrics.jsonl"), strict=True
    ):
        del found["seconds"], expected["seconds"]
        # approx compares no lists within dictionaries.
        assert found.pop("staleness", []) == expected.pop("staleness", [])
        assert found == pytest.approx(expected, abs=1e-6)
    if algorithm == "fedbuff":
        assert [row["round"] for row in rows if "accuracy" in row] == [2, 4, 5]
        assert max(row["staleness-max"] for row in rows) > 0
    assert json.loads((simulated / "summary.json").read_text())["algorithms"]
