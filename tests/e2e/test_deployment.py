"""A SuperLink with TLS and keys, four devices with their own images, and intruders."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from devices import write_folders
from federation import ROOT, Federation, read_lines

SETTINGS = {
    "fedrep": "head-epochs=2",
    "flute": "head-epochs=2",
    # By real arrival order; n = N from the first round on.
    "srpfl": "head-epochs=2 initial-nodes=4",
}
SHARED = (
    'task="image-folder" model="digits-cnn" num-clients=4 fraction-train=1.0 '
    "num-server-rounds=2 evaluate-every=0 evaluate-last=1 learning-rate=0.05 "
    "min-available-nodes=4 batch-size=6 augment=false"
)


def simulated(tmp_path: Path, algorithm: str, run_config: str) -> list[dict]:
    output = tmp_path / "inline"
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "simulation.py"),
            algorithm,
            "--backend",
            "inline",
            "--data-dir",
            str(tmp_path / "data"),
            "--output",
            str(output),
            "--run-config",
            run_config,
        ],
        check=True,
        capture_output=True,
    )
    return read_lines(output / algorithm / "metrics.jsonl")


@pytest.mark.e2e
def test_devices_give_the_numbers_of_the_simulation_and_intruders_get_nothing(
    secure: Federation, tmp_path: Path
) -> None:
    write_folders(tmp_path / "data", 4)
    secure.start_superlink()
    secure.register()
    # Keys that nobody has registered, and one that looks like a registered one's.
    secure.make_keys("stranger")
    ca = ("--root-certificates", str(secure.keys / "ca.crt"))
    key = str(secure.keys / "nodes" / "stranger")
    data = f'data-dir="{tmp_path / "data" / "000000"}"'
    intruders = {
        "stranger": (*ca, "--auth-supernode-private-key", key),
        "keyless": ca,
        "in-clear": ("--insecure",),
    }
    for name, options in intruders.items():
        secure.start_supernode(name, f'client-name="{name}" {data}', *options)
    for name in secure.nodes:
        folder = tmp_path / "data" / name
        secure.start_supernode(name, f'client-name="{name}" data-dir="{folder}"')
    for algorithm, own in SETTINGS.items():
        run_config = f"{SHARED} {own}"
        output = tmp_path / "deployed"
        log = secure.run(
            ROOT, f'algorithm="{algorithm}" {run_config} output="{output}"', 300
        )
        found = read_lines(output / algorithm / "metrics.jsonl")
        expected = simulated(tmp_path, algorithm, run_config)
        assert len(found) == 2, log
        for ours, theirs in zip(found, expected, strict=True):
            for name in ("seconds", "seconds-simulated"):
                ours.pop(name, None), theirs.pop(name, None)
            assert ours.keys() == theirs.keys()
            assert ours == pytest.approx(theirs, abs=1e-5)
        clients = json.loads((output / algorithm / "clients.json").read_text())
        assert sorted(clients) == list(secure.nodes)
    for name in intruders:
        text = (secure.home / f"{name}.log").read_text(errors="replace")
        assert "train" not in text.lower().replace("training", ""), text
    listed = secure.flwr("supernode", "list", "test")
    assert listed.lower().count("online") == 4, listed
