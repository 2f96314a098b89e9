"""Privacy accounting for each algorithm; interruptions never reduce the reported ε."""

import json
import re
from pathlib import Path

import pytest
from command_line import (
    STEADY,
    Killed,
    assert_refused,
    config_of,
    die_in,
    json_of,
    rows_of,
    run,
)
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from flwr_frl.clients.algorithms import client_class
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.files import ACCOUNT_FILE
from flwr_frl.common.settings import resolve
from flwr_frl.strategies.algorithms import build_strategy
from flwr_frl.strategies.server.privacy import epsilon
from flwr_frl.strategies.server.round import Participation
from flwr_frl.task.training.privacy import epsilon as example_epsilon

PRIVATE = {**STEADY, "fraction_train": 1.0, "server_dp_noise": 2.0}
PRIVATE |= {"server_dp_clip": 1.0, "server_dp_delta": 1e-3}


def killed_in(server_round: int, monkeypatch, output: Path, name: str, **more) -> None:
    with monkeypatch.context() as patched:
        die_in(patched, server_round)
        with pytest.raises(Killed):
            run(output, name, "--rounds", "5", **more)


def test_one_command_reports_epsilon_for_each_algorithm(tmp_path, capsys):
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


def test_moments_are_counted_with_the_rounds_of_a_killed_run(tmp_path, monkeypatch):
    settings = {**PRIVATE, "task": "linear", "initialization": "moments"}
    killed_in(3, monkeypatch, tmp_path, "fedrep", **settings)
    account = tmp_path / "fedrep" / ACCOUNT_FILE
    # The moments and three rounds, twice
    assert {*json_of(account)["asked"].values()} == {4}
    assert run(tmp_path, "fedrep", "--rounds", "3", **settings) == 0
    assert {*json_of(account)["asked"].values()} == {8}


def test_rounds_released_by_a_killed_run_are_counted(tmp_path, monkeypatch):
    settings = {**PRIVATE, "checkpoint_every": 2}
    # Rounds 1 to 4 are released; round 3 is in no checkpoint.
    killed_in(4, monkeypatch, tmp_path, "fedrep", **settings)
    rounds = json.loads((tmp_path / "fedrep" / ACCOUNT_FILE).read_text())["asked"]
    assert set(rounds.values()) == {4}
    output = str(tmp_path)
    assert run(tmp_path, "fedrep", "--rounds", "5", **settings, resume=output) == 0
    # Rounds 3 to 5 have been released again, with other noise.
    rows = rows_of(tmp_path)
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]
    expected = [epsilon(2.0, k, 1e-3) for k in (1, 2, 5, 6, 7)]
    assert [row["epsilon"] for row in rows] == expected
    summary = json_of(tmp_path / "summary.json")["algorithms"]["fedrep"]
    assert summary["epsilon"] == expected[-1]


def test_resuming_without_the_account_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(Path("out"), "fedavg", "--rounds", "1", **PRIVATE) == 0
    Path("out", "fedavg", ACCOUNT_FILE).unlink()
    again = config_of({**PRIVATE, "resume": "out"})
    assert_refused(("fedavg", "--rounds", "2", *again), "~the account ", tmp_path)


# Example-level privacy on the clients

BATCH = 200
OF_EXAMPLES = {**STEADY, "batch_size": BATCH}
OF_EXAMPLES |= {"dp_noise": 2.0, "dp_clip": 1.0, "dp_delta": 1e-3}


def steps_of(examples: int, epochs: int) -> tuple[float, float, int]:
    return 2.0, min(1.0, BATCH / examples), epochs * -(-examples // BATCH)


def test_each_client_has_its_own_epsilon(tmp_path):
    names = ("fedrep", "fedavg", "local")
    settings = {**OF_EXAMPLES, "fraction_train": 0.4, "evaluate_every": 0}
    assert run(tmp_path, *names, "--rounds", "3", evaluate_last=1, **settings) == 0
    summary = json_of(tmp_path / "summary.json")["algorithms"]
    # FedRep trains the head and the representation for one epoch each; the others train
    # both parts in a single epoch.
    for name, epochs in (("fedrep", 2), ("fedavg", 1), ("local", 1)):
        clients = json_of(tmp_path / name / "clients.json")
        sampler = Participation(0.4, 1, 0)
        rounds = [c for r in (1, 2, 3) for c in sampler.sample(r, sorted(clients))]
        spent = {}
        for client, entry in clients.items():
            steps = steps_of(entry["num-examples"], epochs * rounds.count(client))
            spent[client] = example_epsilon((steps,), 1e-3)
            assert entry["example-epsilon"] == pytest.approx(spent[client], rel=1e-12)
        assert summary[name]["example-epsilon"] == pytest.approx(max(spent.values()))
        assert "example-epsilon" not in rows_of(tmp_path, name)[-1]


def test_steps_before_a_kill_and_of_repeated_rounds_are_counted(tmp_path, monkeypatch):
    settings = {**OF_EXAMPLES, "fraction_train": 1.0, "checkpoint_every": 2}
    killed_in(4, monkeypatch, tmp_path, "fedavg", **settings)
    output = str(tmp_path)
    # Rounds 1 to 4, and then 3 to 5; round 6 without checkpoints
    for rounds, trained in (("5", 7), ("6", 8)):
        more = {**settings, "checkpoint_every": 2 if rounds == "5" else 0}
        assert run(tmp_path, "fedavg", "--rounds", rounds, **more, resume=output) == 0
        for entry in json_of(tmp_path / "fedavg" / "clients.json").values():
            steps = steps_of(entry["num-examples"], trained)
            expected = example_epsilon((steps,), 1e-3)
            assert entry["example-epsilon"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "more", "part"),
    [
        ("apfl", {}, "with 'apfl': not all steps of training can be"),
        ("dpsgd", {}, "with 'dpsgd'"),
        ("fedrep", {"task": "linear"}, "with 'fedrep'"),
        ("fedbn", {"model": "resnet20"}, "with 'fedbn'"),
        ("fedavg", {"model": "resnet20"}, "with this model: BatchNorm cannot support"),
    ],
)
def test_private_training_is_refused_if_unsupported(
    tmp_path, monkeypatch, algorithm, more, part
):
    monkeypatch.chdir(tmp_path)
    arguments = (algorithm, *config_of({**OF_EXAMPLES, **more}))
    assert_refused(arguments, f"~dp-noise is 2.0; expected 0 {part}", tmp_path)


ROOT = Path(__file__).parents[2]
SERVER = {"server-dp-noise": 1.0, "server-dp-clip": 1.0, "server-dp-delta": 1e-3}
DEVICE = {"dp-noise": 1.0, "dp-clip": 1.0, "dp-delta": 1e-3}


def counted(name: str) -> str:
    def fine(check, given) -> bool:
        try:
            check(resolve({"algorithm": name, **given}))
        except SettingsError as error:
            if "dp-noise is 1.0; expected 0" not in str(error):
                raise
            return False
        return True

    def check_client(settings) -> None:
        client_class(settings)._traits.check_settings(settings)

    kinds = {"S": fine(build_strategy, SERVER), "D": fine(check_client, DEVICE)}
    return " ".join(letter for letter, is_counted in kinds.items() if is_counted)


def test_the_guide_lists_the_algorithms_with_privacy_accounting():
    page = (ROOT / "docs" / "privacy.md").read_text()
    lines = page.partition("\n## Gossip")[0].splitlines()
    rows = [line.strip("| ").split("|") for line in lines if line.startswith("| `")]
    # Rows with the same letters for all tasks and base methods
    plain = [r for r in rows if len(r) >= 4 and "the base method" not in r[-1]]
    plain = [r for r in plain if "linear" not in r[0] and "multi-task" not in r[0]]
    documented = {n: r[4:] for r in plain for n in re.findall(r"`([a-z0-9-]+)`", r[0])}
    documented.pop("-ft", None)
    assert len(documented) > 25
    for name, letters in documented.items():
        assert " ".join(letters).strip() == counted(name), name
