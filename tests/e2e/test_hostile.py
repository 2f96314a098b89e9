"""One registered node is hostile: the honest ones go on as if they were alone."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from devices import write_folders
from federation import ROOT, Federation, read_lines
from safetensors.numpy import load_file

APP = Path(__file__).parent / "hostile_app"
ROUNDS = 8
ALONE = (
    'task="image-folder" model="digits-cnn" num-clients=2 fraction-train=1.0 '
    f"num-server-rounds={ROUNDS} evaluate-every=0 evaluate-last=1 checkpoint-every=1 "
    "learning-rate=0.05 head-epochs=1 batch-size=6 augment=false"
)


@pytest.mark.e2e
def test_hostile_replies_change_nothing(federation: Federation, tmp_path: Path) -> None:
    write_folders(tmp_path / "data", 3)
    federation.start_superlink()
    output, planted = tmp_path / "deployed", tmp_path / "planted"
    ids = tmp_path / "ids"
    ids.mkdir()
    # One of the honest nodes lets the hostile one know which messages it gets.
    nodes = (f'ids="{ids}"', "", f'ids="{ids}" planted="{planted}"')
    for i, own in enumerate(nodes):
        name = f"{i:06d}"
        folder = tmp_path / "data" / name
        config = f'client-name="{name}" data-dir="{folder}" {own}'
        federation.start_supernode(name, config)
    log = federation.run(APP, f'output="{output}"', 900)
    rows = read_lines(output / "fedrep" / "metrics.jsonl")
    assert len(rows) == ROUNDS, log
    for row in rows:
        assert row["clients"] == 2
        assert row["rejected"] + row["unanswered"] == 1
        kind = "rejected" if row["rejected"] else "unanswered"
        assert row[f"{kind}-clients"] == ["000002"]
    # All but the gigabyte, which may be late, and what Flower drops (see the app).
    assert [row["rejected"] for row in rows[:6]] == [1] * 6
    assert rows[7]["unanswered"] == 1
    assert (ids / "answered").exists()
    assert "reply of client 000002 is of round 1, not of round 6" in log
    assert "no reply of clients 000002" in log
    assert not planted.exists(), "a pickle was loaded"

    command = [sys.executable, str(ROOT / "simulation.py"), "fedrep"]
    command += ["--backend", "inline", "--data-dir", str(tmp_path / "data")]
    command += ["--output", str(tmp_path / "alone"), "--run-config", ALONE]
    subprocess.run(command, check=True, capture_output=True)
    found, expected = (
        load_file(tmp_path / where / "fedrep" / "checkpoint.safetensors")
        for where in ("deployed", "alone")
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6, err_msg=name)
