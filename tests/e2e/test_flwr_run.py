"""``flwr run .`` in Flower's simulation gives the numbers of ``simulation.py``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from federation import BIN, ROOT, local_flower, read_lines

SETTINGS = 'algorithm="flute" num-server-rounds=2 evaluate-last=1 num-clients=4 '
SETTINGS += "classes-per-client=5"


@pytest.mark.e2e
def test_flwr_run_equals_inline(tmp_path: Path) -> None:
    inline, simulated = tmp_path / "inline", tmp_path / "simulated"
    command = [
        str(BIN / "flwr"),
        "run",
        str(ROOT),
        "local",
        "--stream",
        "--federation-config",
        "num-supernodes=4 client-resources-num-cpus=1",
        "--run-config",
        f'{SETTINGS} output="{simulated}"',
    ]
    with local_flower(tmp_path / "flwr") as environment:
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
    rows = read_lines(simulated / "flute" / "metrics.jsonl")
    said = result.stdout + result.stderr
    assert len(rows) == 2, said
    # Whoever looks on sees where the results are, and how each round went.
    assert f"results are written to {simulated}/flute" in said
    assert "connected clients: " in said
    assert "round 2 of 2: 2 clients, train loss " in said
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "simulation.py"),
            "flute",
            "--backend",
            "inline",
            "--output",
            str(inline),
            "--run-config",
            SETTINGS,
        ],
        check=True,
        cwd=tmp_path,
    )
    for found, expected in zip(
        rows, read_lines(inline / "flute" / "metrics.jsonl"), strict=True
    ):
        del found["seconds"], expected["seconds"]
        assert found == pytest.approx(expected, abs=1e-6)
    assert json.loads((simulated / "summary.json").read_text())["algorithms"]
