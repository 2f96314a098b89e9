"""An outsider's algorithm and task, which no file of flwr-frl names, on everything."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from federation import ROOT, Federation, read_lines

from clients.predict import load_run, predict

GUEST = ROOT / "tests" / "guest"
NAMES = ("000000", "000001")
OWN = "roll=0.3 warm-up=3 gradient-bound=2.0 learning-rate=0.05"


def simulate(output: Path, algorithm: str, *arguments: str) -> list[dict]:
    """Run the command line as somebody with a package of their own would.

    Beside the algorithm it runs FedRep.
    """
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "simulation.py"),
            "fedrep",
            algorithm,
            "--task",
            "guest.task:sensors",
            "--clients",
            "2",
            "--fraction",
            "1",
            "--output",
            str(output),
            *arguments,
        ],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(GUEST)},
    )
    names = ("fedrep", algorithm.rpartition(":")[2])
    return [
        row for name in names for row in read_lines(output / name / "metrics.jsonl")
    ]


def without_times(rows: list[dict]) -> list[dict]:
    times = ("seconds", "seconds-simulated")
    return [{n: v for n, v in row.items() if n not in times} for row in rows]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Federation]:
    """Two devices with keys, each with its own file of readings."""
    sys.path.insert(0, str(GUEST))
    from guest.task import draw

    # Without the warm SuperExec: as Flower starts its apps by itself.
    federation = Federation(tmp_path, NAMES, warm=False)
    try:
        federation.start_superlink()
        federation.register()
        for i, name in enumerate(NAMES):
            home = tmp_path / "devices" / name
            home.mkdir(parents=True)
            table = draw(i, seed=0, readings=60, noise=0.05)
            np.savetxt(home / "readings.csv", table, delimiter=",", fmt="%.18g")
            federation.start_supernode(
                name,
                f'client-name="{name}" data-dir="{home}" state-dir="{home / "state"}"',
            )
        yield federation
    finally:
        federation.close()
        sys.path.remove(str(GUEST))


@pytest.mark.e2e
def test_a_guest_gives_the_same_numbers_on_ray(tmp_path):
    # To the last bit, so one by one.
    own = f"{OWN} evaluate-every=1 cohort='off'"
    config = ("--run-config", own, "--rounds", "3")
    guest = "guest.algorithm:Guest"
    inline = simulate(tmp_path / "a", guest, "--backend", "inline", *config)
    ray = simulate(tmp_path / "b", guest, "--backend", "ray", *config)
    assert len(inline) == 6
    assert all("r2" in row for row in inline)
    assert without_times(inline) == without_times(ray)


@pytest.mark.e2e
def test_a_guest_on_two_devices_resumes_runs_under_srpfl_and_is_refused_in_a_line(
    pair: Federation, tmp_path: Path
):
    output = tmp_path / "deployed"
    saved = f'output="{output}" checkpoint-every=1'
    log = pair.run(GUEST, f"{saved} num-server-rounds=1", 300)
    assert len(read_lines(output / "Guest" / "metrics.jsonl")) == 1, log
    log = pair.run(GUEST, f'{saved} num-server-rounds=2 resume="{output}"', 300)
    found = read_lines(output / "Guest" / "metrics.jsonl")
    config = ("--run-config", f"{OWN} evaluate-every=1 checkpoint-every=1")
    rest = ("--rounds", "2", "--backend", "inline", *config)
    expected = simulate(tmp_path / "inline", "guest.algorithm:Guest", *rest)
    assert len(found) == 2, log
    expected, rest = without_times(expected[2:]), without_times(expected[:2])
    for ours, theirs in zip(without_times(found), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)

    # Our algorithm with the guest's task, and its model used where it lives.
    more = 'algorithm="fedrep" num-server-rounds=1'
    log = pair.run(GUEST, f"{saved} {more}", 300)
    (row,) = without_times(read_lines(output / "fedrep" / "metrics.jsonl"))
    assert row == pytest.approx(rest[0], abs=1e-5), log
    for name in NAMES:
        home = tmp_path / "devices" / name
        files = {"state_dir": str(home / "state"), "data_dir": str(home)}
        model, card = load_run(output / "fedrep", name, **files)
        table = np.loadtxt(home / "readings.csv", delimiter=",")[3::4]
        np.savetxt(home / "tested.csv", table[:, :-1], delimiter=",", fmt="%.9g")
        said = [
            float(value) for _, value in predict(model, card, [home / "tested.csv"])
        ]
        clients = json.loads((output / "fedrep" / "clients.json").read_text())
        squares = np.square(said - table[:, -1]).mean()
        assert squares == pytest.approx(clients[name]["loss"], rel=1e-4)

    one = "num-server-rounds=1"
    log = pair.run(GUEST, f'output="{output}" algorithm="srpfl" {one}', 300)
    rows = read_lines(output / "srpfl" / "metrics.jsonl")
    assert [row["clients"] for row in rows] == [2], log

    log = pair.run(GUEST, "roll=1.5", 120)
    assert "roll is 1.5; it must be in [0, 1)" in log
    assert "Traceback" not in log
