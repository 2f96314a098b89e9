"""Three devices with partitions of a task's data: the simulation's numbers.

One SuperLink and three SuperNodes serve the dissertation's algorithms and the linear
cases, one run each.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import rows_of, run
from federation import ROOT, Federation, read_lines

NODES = 3
# The role of each device; in simulation ``num-sources`` assigns the same ones.
ROLES = ("source", "source", "target")
SHARED = (
    "num-clients=3 fraction-train=1.0 num-server-rounds=2 evaluate-every=0 "
    "evaluate-last=1 min-available-nodes=3 seed=3"
)
DIGITS = 'task="digits" partition="iid" learning-rate=0.05 batch-size=50'
GRAPH = f'{DIGITS} model="logistic" local-steps=2'
TRANSFER = "num-sources=2 source-epochs=1 head-epochs=1"
CASES = {
    "dpsgd": ("dpsgd", GRAPH),
    "choco-sgd": ("choco-sgd", f'{GRAPH} compressor="top-k" compressor-k=0.1'),
    "squarm-sgd": ("squarm-sgd", f'{GRAPH} compressor="sign-top-k" trigger="1"'),
    "multi-task": ("multi-task", 'task="qcqp"'),
    "multi-task of models": (
        "multi-task",
        f'{DIGITS} model="logistic" saddle-step=0.05 primal-steps=2',
    ),
    "transfer of images": (
        "representation-transfer",
        f'{DIGITS} model="mlp-2" {TRANSFER}',
    ),
    "linear transfer": ("representation-transfer", 'task="transfer" num-sources=2'),
    "linear FedRep": ("fedrep", 'task="linear" learning-rate=0.1'),
    "linear FLUTE": ("flute", 'task="linear" learning-rate=0.03'),
    "linear SRPFL": ("srpfl", 'task="linear" learning-rate=0.1 initial-nodes=3'),
}
TIMES = ("seconds", "seconds-simulated")


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    federation = Federation(tmp_path_factory.mktemp("partitions"))
    try:
        federation.start_superlink()
        for i, role in enumerate(ROLES):
            config = f'partition-id={i} num-partitions={NODES} role="{role}"'
            federation.start_supernode(f"node-{i}", config)
        yield federation
    finally:
        federation.close()


@pytest.mark.e2e
@pytest.mark.parametrize("case", CASES)
def test_devices_give_the_numbers_of_the_simulation(
    devices: Federation, tmp_path: Path, case: str
) -> None:
    algorithm, own = CASES[case]
    config = f"{SHARED} {own}"
    output = tmp_path / "deployed"
    run_config = f'algorithm="{algorithm}" {config} output="{output}"'
    log = devices.run(ROOT, run_config, 1200)
    assert run(tmp_path / "inline", algorithm, "--run-config", config) == 0
    found = read_lines(output / algorithm / "metrics.jsonl")
    expected = rows_of(tmp_path / "inline", algorithm)
    assert len(found) == len(expected) == 2, log
    for ours, theirs in zip(found, expected, strict=True):
        for name in TIMES:
            ours.pop(name, None), theirs.pop(name, None)
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.e2e
def test_a_run_without_a_target_ends_with_one_line(devices: Federation, tmp_path: Path):
    config = f'algorithm="representation-transfer" {DIGITS} {SHARED}'
    # Only the two sources are connected.
    devices.kill("node-2")
    config = config.replace("min-available-nodes=3", "min-available-nodes=2")
    log = devices.run(ROOT, f'{config} output="{tmp_path / "out"}"', 600)
    assert "role is 'source'; expected 'target' in the node config" in log
    assert "Traceback" not in log
