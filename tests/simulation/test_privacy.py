"""An ε for each algorithm of one command, which interruptions do not make smaller."""

import json

import pytest
from command_line import STEADY, Killed, die_in, json_of, rows_of, run
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from strategies.server.privacy import FILE, epsilon

# What runs in a fixture of the module draws as usual.
pytestmark = pytest.mark.usefixtures("no_plot")

PRIVATE = {
    **STEADY,
    "fraction_train": 1.0,
    "server_dp_noise": 2.0,
    "server_dp_clip": 1.0,
    "server_dp_delta": 1e-3,
}


def test_an_epsilon_for_fedrep_flute_and_fedavg_from_one_command(tmp_path, capsys):
    names = ("fedrep", "flute", "fedavg")
    assert run(tmp_path, *names, "--rounds", "3", **PRIVATE) == 0
    accountant = RdpAccountant()
    accountant.compose(dp_event.GaussianDpEvent(2.0), 3)
    expected = accountant.get_epsilon(1e-3)
    summary = json_of(tmp_path / "summary.json")["algorithms"]
    for name in names:
        assert summary[name]["epsilon"] == expected
        assert summary[name]["delta"] == 1e-3
        spent = [row["epsilon"] for row in rows_of(tmp_path, name)]
        assert spent == [epsilon(2.0, k, 1e-3) for k in (1, 2, 3)]
    assert f"{expected:.4g}" in capsys.readouterr().out


def test_what_a_killed_run_has_told_counts(tmp_path, monkeypatch):
    settings = {**PRIVATE, "checkpoint_every": 2}
    with monkeypatch.context() as patched:
        # Rounds 1 to 4 are told; that of round 3 is in no checkpoint.
        die_in(patched, 4)
        with pytest.raises(Killed):
            run(tmp_path, "fedrep", "--rounds", "5", **settings)
    told = json.loads((tmp_path / "fedrep" / FILE).read_text())["asked"]
    assert set(told.values()) == {4}
    output = str(tmp_path)
    assert run(tmp_path, "fedrep", "--rounds", "5", **settings, resume=output) == 0
    # And rounds 3 to 5, with other noise.
    rows = rows_of(tmp_path)
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]
    expected = [epsilon(2.0, k, 1e-3) for k in (1, 2, 5, 6, 7)]
    assert [row["epsilon"] for row in rows] == expected
    summary = json_of(tmp_path / "summary.json")["algorithms"]["fedrep"]
    assert summary["epsilon"] == expected[-1]


def test_a_run_without_a_checkpoint_is_not_forgotten(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        die_in(patched, 2)
        with pytest.raises(Killed):
            run(tmp_path, "fedavg", "--rounds", "3", **PRIVATE)
    assert run(tmp_path, "fedavg", "--rounds", "2", **PRIVATE) == 0
    assert rows_of(tmp_path, "fedavg")[-1]["epsilon"] == epsilon(2.0, 4, 1e-3)
    # Another one that begins where that has ended counts for itself.
    assert run(tmp_path, "fedavg", "--rounds", "1", **PRIVATE) == 0
    assert rows_of(tmp_path, "fedavg")[-1]["epsilon"] == epsilon(2.0, 1, 1e-3)
    (aside,) = tmp_path.glob(f"earlier-*/fedavg/{FILE}")
    assert set(json.loads(aside.read_text())["asked"].values()) == {4}


def test_resuming_without_the_account_is_one_line(tmp_path, capfd):
    assert run(tmp_path, "fedavg", "--rounds", "1", **PRIVATE) == 0
    (tmp_path / "fedavg" / FILE).unlink()
    output = str(tmp_path)
    assert run(tmp_path, "fedavg", "--rounds", "2", **PRIVATE, resume=output) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("error: the account ")
    assert FILE in line


def test_epsilon_without_noise_is_one_line(tmp_path, capfd):
    assert run(tmp_path / "out", "fedavg", server_dp_delta=1e-5) == 2
    assert capfd.readouterr().err == (
        "error: server-dp-delta is 1e-05; it must be 0 without server-dp-noise: there "
        "is no ε without noise\n"
    )
    assert not (tmp_path / "out").exists()
