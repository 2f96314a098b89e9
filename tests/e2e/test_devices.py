"""Several runs on a SuperLink with TLS, node authentication and three devices.

The devices are started once, as in practice, each with its images, its table and its
disk. The second one has a file as its node config, with its name. The others have no
``client-name``, so registered names are used. All other settings come from the runs.
"""

import contextlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from command_line import rows_of, run
from devices import NAMES, assert_same, write_folders
from federation import ROOT, Federation, processes_with, project, read_lines, wait_until
from safetensors.numpy import load_file

from flwr_frl.predict import load_run

GUEST = ROOT / "tests" / "guest"
HOSTILE = Path(__file__).parent / "hostile_app"


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A SuperLink with three registered devices, none of which has been started."""
    home = tmp_path_factory.mktemp("fleet")
    sys.path.insert(0, str(GUEST))
    from guest.task import draw

    write_folders(home / "data", len(NAMES))
    for i, name in enumerate(NAMES):
        table = draw(i, seed=0, readings=60, noise=0.05)
        path = home / "data" / name / "readings.csv"
        np.savetxt(path, table, delimiter=",", fmt="%.18g")
        write_tables(home, name, table)
    federation = Federation(home, NAMES)
    try:
        federation.start_superlink()
        federation.register()
        yield federation
    finally:
        federation.close()
        sys.path.remove(str(GUEST))


def write_tables(home: Path, name: str, table: np.ndarray) -> None:
    """Write a device's table, and add its rows to the table of all."""
    places = home / "data" / name / "table", home / "all" / "table"
    header = ",".join(["device", *map(str, range(table.shape[1] - 1)), "label"])
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        for part, rows in (("train", table[15:]), ("test", table[:15])):
            file = place / f"{part}.csv"
            lines = [",".join([name, *map(repr, row)]) for row in rows.tolist()]
            before = file.read_text() if file.exists() else header
            file.write_text("\n".join([before, *lines]))


@pytest.fixture
def fleet(registered: Federation) -> Federation:
    """Three devices, each with a folder of images, a table of readings and a disk."""
    for name in NAMES:
        start(registered, name)
    return registered


def start(federation: Federation, name: str) -> None:
    """Start a device, unless it is running."""
    if name in federation.processes:
        return
    home = federation.home
    config = f'data-dir="{home / "data" / name}" state-dir="{home / "state" / name}"'
    if name == NAMES[1]:
        file = home / "node.toml"
        file.write_text(f'client-name="{name}" {config}'.replace(" ", "\n"))
        config = str(file)
    if name == NAMES[-1]:
        # Only the app with hostile replies reads this.
        config += f' planted="{home / "planted"}"'
    federation.start_supernode(name, config)


# A device joins during a run; another one is restarted between a stop and a resume

GROWING = (
    'algorithm="fedrep" task="image-folder" model="mlp-2" num-clients=3 '
    "fraction-train=1.0 batch-size=6 augment=false head-epochs=1 evaluate-every=0 "
    "evaluate-last=0 checkpoint-every=1 names-by-key=true"
)


# This test must run before the others, which start all devices.
@pytest.mark.e2e
def test_a_device_joins_and_another_is_restarted_before_a_resume(
    registered: Federation, tmp_path: Path
) -> None:
    output = tmp_path / "results"
    rows = output / "fedrep" / "metrics.jsonl"
    logs: list[str] = []
    for name in NAMES[:2]:
        start(registered, name)

    def train() -> None:
        rounds = f'{GROWING} num-server-rounds=200 output="{output}"'
        logs.append(registered.run(project(), rounds, 900))

    thread = threading.Thread(target=train)
    thread.start()
    wait_until(lambda: len(read_lines(rows)) > 0, 300, "the first round")
    start(registered, NAMES[2])

    def all_train() -> bool:
        return any(row["clients"] == 3 for row in read_lines(rows))

    wait_until(all_train, 300, "the third device")
    [run_id] = set(re.findall(r"\b\d{15,20}\b", registered.flwr("list", "test")))
    registered.flwr("stop", run_id, "test")
    thread.join()
    before = read_lines(rows)
    assert before[0]["clients"] == 2
    # The state directories have the registered names.
    for name in NAMES:
        files = (registered.home / "state" / name).rglob("*.safetensors")
        assert name in {path.parent.name for path in files}
    # The restarted device is a new process.
    process = registered.processes.pop(NAMES[0])
    process.terminate()
    process.wait()
    start(registered, NAMES[0])
    rounds = len(before) + 2
    resumed = f'{GROWING} num-server-rounds={rounds} output="{output}" '
    resumed += f'resume="{output}" min-available-nodes=3'
    log = registered.run(project(), resumed, 600)
    after = read_lines(rows)
    assert [row["round"] for row in after] == list(range(1, rounds + 1)), log
    assert after[-1]["clients"] == 3, log
    assert "does not continue from its last state" not in log


# Algorithms and tasks of flwr-frl

SETTINGS = {
    "flute": "head-epochs=2",
    # Uses the real arrival order, with n = N from the first round on
    "srpfl": "head-epochs=2 initial-nodes=3",
}
SHARED = (
    'task="image-folder" model="mlp-2" num-clients=3 fraction-train=1.0 '
    "num-server-rounds=2 evaluate-every=0 evaluate-last=1 learning-rate=0.05 "
    "min-available-nodes=3 batch-size=6 augment=false"
)


@pytest.mark.e2e
def test_devices_match_the_simulation_and_intruders_receive_nothing(
    fleet: Federation, tmp_path: Path
) -> None:
    # Nodes with an unregistered key, without a key and without TLS
    fleet.make_keys("stranger")
    ca = ("--root-certificates", str(fleet.keys / "ca.crt"))
    key = str(fleet.keys / "nodes" / "stranger")
    intruders = {
        "stranger": (*ca, "--auth-supernode-private-key", key),
        "keyless": ca,
        "in-clear": ("--insecure",),
    }
    data = fleet.home / "data"
    for name, options in intruders.items():
        config = f'client-name="{name}" data-dir="{data / NAMES[0]}"'
        fleet.start_supernode(name, config, *options, warm=False)

    def said_by(name: str) -> str:
        return (fleet.home / f"{name}.log").read_text(errors="replace")

    # The intruders have tried to connect before the runs start.
    refused = "Connection attempt failed"
    wait_until(lambda: all(refused in said_by(n) for n in intruders), 600, "intruders")
    output = tmp_path / "deployed"

    def deploy(algorithm: str) -> str:
        config = f'algorithm="{algorithm}" {SHARED} {SETTINGS[algorithm]}'
        return fleet.run(project(), f'{config} output="{output}"', 1200)

    # Both runs at the same time: messages of one must not block those of the other.
    with ThreadPoolExecutor() as pool:
        logs = dict(zip(SETTINGS, pool.map(deploy, SETTINGS), strict=True))
    for algorithm, settings in SETTINGS.items():
        inline = tmp_path / "inline"
        arguments = ("--data-dir", str(data), "--run-config", f"{SHARED} {settings}")
        assert run(inline, algorithm, *arguments) == 0
        rows = read_lines(output / algorithm / "metrics.jsonl")
        assert_same(rows, rows_of(inline, algorithm), logs[algorithm])
        clients = json.loads((output / algorithm / "clients.json").read_text())
        assert sorted(clients) == list(NAMES)
    for name in intruders:
        text = said_by(name)
        assert "train" not in text.lower().replace("training", ""), text
        fleet.kill(name)
    listed = fleet.flwr("supernode", "list", "test")
    assert listed.lower().count("online") == len(NAMES), listed


# A table, whose columns are scaled by the statistics of all devices

OF_TABLE = (
    'data-subset="table" label-column="label" client-column="device" num-clients=3 '
    "fraction-train=1.0 num-server-rounds=2 max-gradient-norm=1.0"
)


@pytest.mark.e2e
def test_tables_of_devices_have_the_numbers_of_the_simulation(
    fleet: Federation, tmp_path: Path
) -> None:
    home, output = fleet.home, tmp_path / "deployed"
    waits = f'min-available-nodes=3 output="{output}"'
    config = f'algorithm="fedrep" task="table" {OF_TABLE} {waits}'
    log = fleet.run(project(), config, 600)
    arguments = ["fedrep", "--task", "table", "--data-dir", str(home / "all")]
    assert run(tmp_path / "inline", *arguments, "--run-config", OF_TABLE) == 0
    rows = read_lines(output / "fedrep" / "metrics.jsonl")
    expected = rows_of(tmp_path / "inline", "fedrep")
    assert len(rows) == 2, log
    for ours, theirs in zip(rows, expected, strict=True):
        for name in ("train-loss", "loss", "r2"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), log
    log = fleet.run(project(), f"{config} secure-aggregation=true", 600)
    assert "standardize is 'global'; expected client or none with" in log


# A third-party algorithm and task

GUEST_OWN = "roll=0.3 warm-up=3 gradient-bound=2.0 learning-rate=0.05"


@pytest.mark.e2e
def test_a_third_party_app_trains_and_gives_one_line_errors(
    fleet: Federation, tmp_path: Path
):
    output = tmp_path / "deployed"
    saved = f'min-available-nodes=3 output="{output}" checkpoint-every=1'
    log = fleet.run(GUEST, f"{saved} num-server-rounds=2", 600)
    rows = read_lines(output / "Guest" / "metrics.jsonl")
    arguments = ["guest.algorithm:Guest", "--task", "guest.task:sensors"]
    arguments += ["--clients", "3", "--fraction", "1", "--rounds", "2"]
    config = f"{GUEST_OWN} evaluate-every=1 checkpoint-every=1"
    assert run(tmp_path / "inline", *arguments, "--run-config", config) == 0
    assert_same(rows, rows_of(tmp_path / "inline", "Guest"), log)

    # The models predict on the data of the devices.
    clients = json.loads((output / "Guest" / "clients.json").read_text())
    for name in NAMES:
        data = fleet.home / "data" / name
        files = {"state_dir": str(fleet.home / "state" / name), "data_dir": str(data)}
        files |= {"task": "guest.task:sensors", "algorithm": "guest.algorithm:Guest"}
        predictor = load_run(output / "Guest", name, **files)
        table = np.loadtxt(data / "readings.csv", delimiter=",")[3::4]
        predictions = predictor(table[:, :-1]).outputs
        squares = np.square(predictions.flatten() - table[:, -1]).mean()
        assert squares == pytest.approx(clients[name]["loss"], rel=1e-4)

    log = fleet.run(GUEST, "roll=1.5", 600)
    assert "roll is 1.5; expected a number" in log
    assert "Traceback" not in log


# One device is hostile; the results are those of the honest ones alone

ROUNDS = 4
ALONE = (
    'task="image-folder" model="mlp-2" num-clients=2 fraction-train=1.0 '
    f"num-server-rounds={ROUNDS} evaluate-every=0 evaluate-last=1 checkpoint-every=1 "
    "learning-rate=0.05 head-epochs=1 batch-size=6 augment=false"
)


@contextlib.contextmanager
def memory_of_server_app(home: Path, rows: Path) -> Iterator[dict[int, int]]:
    """Yield the peak memory of the federation's ServerApp in MB, by rounds made."""
    peak: dict[int, int] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            made = len(read_lines(rows))
            for pid in processes_with(f"FLWR_HOME={home / 'flwr'}", "flwr-serverapp"):
                with contextlib.suppress(OSError):
                    status = Path(f"/proc/{pid}/status").read_text()
                    if match := re.search(r"VmHWM:\s*(\d+)", status):
                        peak[made] = int(match[1]) // 1024

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


@pytest.mark.e2e
def test_hostile_replies_change_nothing(fleet: Federation, tmp_path: Path) -> None:
    output = tmp_path / "deployed"
    path = output / "fedrep" / "metrics.jsonl"
    with memory_of_server_app(fleet.home, path) as peak:
        log = fleet.run(HOSTILE, f'output="{output}"', 600)
    rows = read_lines(path)
    assert [(row["clients"], row["rejected"]) for row in rows] == [(2, 1)] * ROUNDS, log
    assert {name for row in rows for name in row["rejected-clients"]} == {"000002"}
    assert "reply of client 000002 is of round 1, not of round 3" in log
    assert not (fleet.home / "planted").exists(), "a pickle was loaded"
    # The record of 100 MB is refused before it reaches the ServerApp, whose memory
    # would otherwise grow by more than five times its size.
    assert "reply of client 000002 is an error: the reply cannot be read" in log
    assert max(peak.values()) < peak[0] + 200, peak

    data = str(fleet.home / "data")
    arguments = ("fedrep", "--data-dir", data, "--run-config", ALONE)
    assert run(tmp_path / "alone", *arguments) == 0
    arrays, expected = (
        load_file(tmp_path / where / "fedrep" / "checkpoint.safetensors")
        for where in ("deployed", "alone")
    )
    assert arrays.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(arrays[name], value, atol=1e-6, err_msg=name)
