"""Three devices with partitions of a task's data match the simulation.

One SuperLink with TLS and three SuperNodes with keys run one algorithm for each kind of
message, two runs at the same time: a SuperNode that finds no message pauses for three
seconds, which rarely happens with two runs. The disk of one device is full and that of
another is read-only, so these keep their states in memory.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from broken_disks import prefixes
from command_line import rows_of, run
from devices import NAMES, assert_same
from federation import Federation, project, read_lines

# Number of concurrent runs; each has its own process for the ServerApp.
TOGETHER = 2
# The role of each device; in simulation ``num-sources`` assigns the same ones.
ROLES = ("source", "source", "target")
DISKS = ("healthy", "full", "read-only")
SHARED = (
    "num-clients=3 fraction-train=1.0 num-server-rounds=2 evaluate-every=0 "
    "evaluate-last=1 min-available-nodes=3 seed=3"
)
DIGITS = 'task="digits" partition="iid" learning-rate=0.05 batch-size=50'
ON_DISK = "FedRep with a state of 18 kB"
# One case for each way in which nodes exchange messages
CASES = {
    ON_DISK: (
        "fedrep",
        f'{DIGITS} model="digits-cnn" head-layers=2 head-epochs=1 experiment="disk"',
    ),
    "squarm-sgd": (
        "squarm-sgd",
        f'{DIGITS} model="logistic" local-steps=2 compressor="sign-top-k" trigger="1"',
    ),
    "multi-task of models": (
        "multi-task",
        f'{DIGITS} model="logistic" saddle-step=0.05',
    ),
    "transfer of images": (
        "representation-transfer",
        f'{DIGITS} model="mlp-2" num-sources=2 source-epochs=1 head-epochs=1',
    ),
    "linear FedRep": ("fedrep", 'task="linear" learning-rate=0.1'),
}


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    federation = Federation(tmp_path_factory.mktemp("partitions"), NAMES)
    try:
        federation.start_superlink()
        federation.register()
        disks = {kind: disk_of(federation, kind) for kind in DISKS}
        for disk in disks.values():
            disk.mkdir()
        before = prefixes(disks)
        for i, (name, role, kind) in enumerate(zip(NAMES, ROLES, DISKS, strict=True)):
            config = f'partition-id={i} num-partitions={len(NAMES)} role="{role}" '
            config += f'state-dir="{disks[kind]}"'
            federation.start_supernode(name, config, before=before.get(kind, ()))
        yield federation
    finally:
        federation.close()


def disk_of(federation: Federation, kind: str) -> Path:
    return federation.home / f"disk-{kind}"


def log_of(federation: Federation, name: str) -> str:
    return (federation.home / f"{name}.log").read_text(errors="replace")


@pytest.fixture(scope="module")
def logs(devices: Federation) -> Iterator[dict[str, Future[str]]]:
    """Futures of the runs, which return their logs."""
    with ThreadPoolExecutor(TOGETHER) as pool:
        yield {
            case: pool.submit(
                devices.run,
                project(),
                f'algorithm="{algorithm}" {SHARED} {settings} '
                f'output="{devices.home / case}"',
                1200,
            )
            for case, (algorithm, settings) in CASES.items()
        }


@pytest.mark.e2e
@pytest.mark.parametrize("case", CASES)
def test_devices_match_the_simulation(
    devices: Federation, logs: dict[str, Future[str]], tmp_path: Path, case: str
) -> None:
    algorithm, settings = CASES[case]
    config = f"{SHARED} {settings}"
    assert run(tmp_path / "inline", algorithm, "--run-config", config) == 0
    log = logs[case].result()
    rows = read_lines(devices.home / case / algorithm / "metrics.jsonl")
    assert_same(rows, rows_of(tmp_path / "inline", algorithm), log)


@pytest.mark.e2e
def test_the_state_stays_in_memory_if_the_disk_is_broken(
    devices: Federation, logs: dict[str, Future[str]]
) -> None:
    logs[ON_DISK].result()
    for name, kind in zip(NAMES, DISKS, strict=True):
        text = log_of(devices, name)
        for server_round in (1, 2):
            line = f"state of round {server_round} is kept in memory only, not in "
            line += f"{disk_of(devices, kind)}/disk"
            assert (line in text) == (kind != "healthy"), text
    assert list(disk_of(devices, "healthy").rglob("disk/*/*-00000002.safetensors"))
