"""``flwr-frl device remove`` deletes what a folder has of one client."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import STEADY, json_of, one_error, rows_of, run
from flwr.app import Context, RecordDict

from flwr_frl import cli
from flwr_frl.clients.device.state import PersonalState, state_directory
from flwr_frl.common.checkpoint import FILE, read
from flwr_frl.results.output import locked
from flwr_frl.results.results import read_journal

GONE = "000001"


def remove(folder: Path, name: str = GONE) -> int:
    return cli.main(["device", "remove", name, str(folder)])


def of(name: str, names: dict[str, object]) -> set[str]:
    return {each for each in names if name in each.split("/")}


@pytest.mark.parametrize(
    "algorithm", ["flute", "fedfomo", "fedcac", "cfl", "l2gd", "dpsgd"]
)
def test_a_server_forgets_a_client_and_can_go_on(algorithm, tmp_path, capsys):
    out = tmp_path / "results"
    place, journal = out / algorithm, out / algorithm / "metrics.jsonl"
    settings = {**STEADY, "fraction_train": 1.0}
    if algorithm == "cfl":
        settings |= {"cfl_eps1": 100.0, "cfl_eps2": 0.0}
    assert run(out, algorithm, "--rounds", "2", **settings) == 0
    _, shared, state = read(place / FILE)
    rows, clients = [*read_journal(journal)], json_of(place / "clients.json")
    # A link is not followed.
    copy = shutil.copy(place / FILE, tmp_path)
    (out / "linked").mkdir()
    (out / "linked" / FILE).symlink_to(copy)
    assert remove(out) == 0
    assert str(place / FILE) in capsys.readouterr().out
    assert read(Path(copy)).state.keys() == state.keys()

    about, means, left = read(place / FILE)
    assert left.keys() == state.keys() - of(GONE, state)
    assert (len(left) < len(state)) is (algorithm != "l2gd")
    for name, value in {**left, **means}.items():
        np.testing.assert_array_equal(value, {**state, **shared}[name], strict=True)
    assert GONE not in about["values"]["acknowledged"]
    # FedFomo's clients also have affinities to each other.
    affinity = about["values"]["state"].get("affinity", {})
    assert not any(GONE in others for others in affinity.values())
    assert json_of(place / "clients.json") == {
        name: metrics for name, metrics in clients.items() if name != GONE
    }
    for now, row in zip(read_journal(journal), rows, strict=True):
        del row["client-metrics"][GONE]
        assert now == row
    assert remove(out) == 2
    assert "NAME is '000001'; expected a client" in one_error(capsys.readouterr().err)
    # In simulation the client is still there: it begins anew.
    assert run(out, algorithm, "--rounds", "3", resume=str(out), **settings) == 0
    assert rows_of(out, algorithm)[-1]["clients"] == 5


def test_a_device_forgets_its_heads_only(tmp_path, capsys):
    def save(name: str, experiment: str) -> Path:
        node = {"state-dir": str(tmp_path / "state")}
        directory = state_directory(node, name, "run", experiment)
        context = Context(0, 0, {}, RecordDict(), {})
        state = PersonalState(context, directory, run="run", client=name)
        state.save({"head.weight": np.ones(2, np.float32)}, 1)
        (directory / "privacy.json").write_text("{}")
        return directory

    first, second, other = save("pi.1", ""), save("pi.1", "birds"), save("pi", "birds")
    (second / "notes.txt").write_text("mine")
    # A link to a folder is not followed.
    (other / "pi%2E1").symlink_to(second)
    assert remove(other, "pi.1") == 2
    assert "NAME is 'pi.1'" in one_error(capsys.readouterr().err)
    assert remove(tmp_path / "state", "pi.1") == 0
    assert "removed pi.1 from 4 files" in capsys.readouterr().out
    assert not first.exists()
    assert [path.name for path in second.iterdir()] == ["notes.txt"]
    assert len(list(other.iterdir())) == 3


def test_a_run_in_progress_and_a_damaged_file_are_refused(tmp_path, capsys):
    place = tmp_path / "fedrep"
    place.mkdir()
    (place / FILE).write_bytes(b"no checkpoint")
    assert remove(tmp_path) == 2
    assert f"{str(place / FILE)!r} cannot be read" in one_error(capsys.readouterr().err)
    with locked(tmp_path, "fedrep"):
        assert remove(tmp_path) == 2
    assert "another run is writing to" in one_error(capsys.readouterr().err)
    assert remove(tmp_path / "nowhere") == 2
    assert "expected a client with files in" in one_error(capsys.readouterr().err)
