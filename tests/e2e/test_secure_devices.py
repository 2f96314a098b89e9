"""Secure aggregation on four devices with TLS, of which one is killed in a round."""

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import rows_of, run
from devices import write_folders
from federation import Federation, read_lines, wait_until

NAMES = ("000000", "000001", "000002", "000003")
APP = Path(__file__).parent / "secure_app"
LAST = NAMES[-1]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Federation]:
    """Four registered devices, each with a key that the others trust."""
    write_folders(tmp_path / "data", len(NAMES))
    federation = Federation(tmp_path, NAMES)
    keys = tmp_path / "peers"
    keys.mkdir()
    for name in NAMES:
        path = str(keys / name)
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path]
        subprocess.run(command, check=True)
    public = [(keys / f"{name}.pub").read_text() for name in NAMES]
    (keys / "all").write_text("".join(public))
    try:
        federation.start_superlink()
        federation.register()
        for name in NAMES:
            node = {
                "data-dir": tmp_path / "data" / name,
                "state-dir": tmp_path / "state" / name,
                "secure-key": keys / name,
                "secure-peers": keys / "all",
            }
            config = " ".join(f'{key}="{value}"' for key, value in node.items())
            config += " secure-aggregation=true"
            if name == LAST:
                config += f' dies="{tmp_path / "dies"}"'
            federation.start_supernode(name, config)
        yield federation
    finally:
        federation.close()


@pytest.mark.e2e
def test_a_device_is_killed_while_all_train(fleet: Federation, tmp_path: Path) -> None:
    output, logs = tmp_path / "deployed", list[str]()

    def deploy() -> None:
        logs.append(fleet.run(APP, f'output="{output}"', 900))

    thread = threading.Thread(target=deploy)
    thread.start()
    try:
        # The app of the last device waits in step 3 of round 2.
        wait_until(lambda: (tmp_path / "dies").exists(), 600, "round 2")
        fleet.kill(LAST)
    finally:
        thread.join()
    rows = read_lines(output / "fedrep" / "metrics.jsonl")
    assert [row["clients"] for row in rows] == [4, 3, 3], logs
    # The same round in simulation
    settings = (
        'task="image-folder" model="mlp-2" num-clients=4 fraction-train=1.0 '
        "num-server-rounds=1 evaluate-every=0 evaluate-last=0 learning-rate=0.05 "
        "head-epochs=1 batch-size=6 augment=false secure-aggregation=true"
    )
    data = ("--data-dir", str(tmp_path / "data"), "--run-config", settings)
    assert run(tmp_path / "inline", "fedrep", *data) == 0
    [simulated] = rows_of(tmp_path / "inline", "fedrep")
    assert rows[0]["train-loss"] == pytest.approx(simulated["train-loss"], abs=1e-6)
    for name in NAMES[:-1]:
        [noted] = (tmp_path / "state" / name).rglob("secure-rounds.json")
        assert noted.stat().st_mode & 0o777 == 0o600
