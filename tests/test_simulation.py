"""The command line: whole runs in one process, resuming, and every bad input."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from outsiders import Homeless
from PIL import Image

import simulation
from strategies import ALGORITHMS, FedRep
from strategies.server.checkpoint import FILE, Checkpoint
from strategies.server.report import Report
from strategies.server_app import make_app
from task.models import MODELS
from task.settings import SettingsError, defaults
from task.tasks import TASKS

ROOT = Path(__file__).parents[1]
# What runs in a fixture of the module draws as usual.
pytestmark = pytest.mark.usefixtures("no_plot")

# Algorithms with personal parts, and settings for quick rounds.
PERSONAL = ("fedrep", "fedper", "local", "flute", "srpfl")
STEADY = {
    "evaluate_every": 1,
    "head_epochs": 1,
    "learning_rate": 0.1,
    "batch_size": 50,
    "num_clients": 10,
}


def run(output: Path, *arguments: str, **overrides) -> int:
    """Run the command line in this process; keyword arguments are settings."""
    names = {name.replace("_", "-"): value for name, value in overrides.items()}
    config = " ".join(f"{name}={json.dumps(value)}" for name, value in names.items())
    return simulation.main(
        [*arguments, "--backend", "inline", "--output", str(output)]
        + (["--run-config", config] if config else [])
    )


def rows_of(output: Path, algorithm: str = "fedrep") -> list[dict]:
    lines = (output / algorithm / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def json_of(path: Path) -> dict:
    return json.loads(path.read_text())


def assert_same_rows(found: list[dict], expected: list[dict], within: float) -> None:
    assert [row["round"] for row in found] == [row["round"] for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for name in row.keys() - {"seconds"}:
            assert row[name] == pytest.approx(other[name], rel=0, abs=within), name


# A run


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    """Output of FedAvg and FedRep on digits."""
    output = tmp_path_factory.mktemp("compared") / "out"
    assert run(output, "fedavg", "fedrep", "--rounds", "15") == 0
    return output


def test_the_files_of_a_run(compared):
    files = {str(p.relative_to(compared)) for p in compared.rglob("*") if p.is_file()}
    assert files == {
        "accuracy.png",
        "summary.json",
        *(
            f"{a}/{f}"
            for a in ("fedavg", "fedrep")
            for f in ("metrics.jsonl", "clients.json")
        ),
    }
    with Image.open(compared / "accuracy.png") as image:
        assert image.format == "PNG"


@pytest.mark.parametrize("algorithm", ["fedavg", "fedrep"])
def test_rows_have_the_documented_names(compared, algorithm):
    rows = rows_of(compared, algorithm)
    assert [row["round"] for row in rows] == list(range(1, 16))
    for row in rows:
        # Every fifth round is evaluated, and the last ten.
        evaluated = row["round"] >= 5
        assert ("accuracy" in row) is evaluated
        if evaluated:
            assert 0 <= row["accuracy"] <= 1
            assert row["evaluated"] == 20
        assert row["train-loss"] > 0
        # Half of 20 clients.
        assert row["clients"] == 10
        assert row["rejected"] == 0
        assert row["bytes-down"] > 0
        assert row["bytes-up"] > 0
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedrep"])
def test_clients_and_summary_say_the_same_as_the_rows(compared, algorithm):
    rows = rows_of(compared, algorithm)
    clients = json_of(compared / algorithm / "clients.json")
    assert list(clients) == [f"{i:06d}" for i in range(20)]
    accuracies = [client["accuracy"] for client in clients.values()]
    assert np.mean(accuracies) == pytest.approx(rows[-1]["accuracy"])
    # The whole data set: 1,438 and 359 digits.
    assert sum(client["num-examples"] for client in clients.values()) == 1438
    assert sum(client["num-test-examples"] for client in clients.values()) == 359
    summary = json_of(compared / "summary.json")["algorithms"][algorithm]
    last = [row["accuracy"] for row in rows[-10:]]
    assert summary["accuracy"] == pytest.approx(np.mean(last))
    assert summary["accuracy"] != max(last)
    assert summary["accuracy-std-clients"] == pytest.approx(np.std(accuracies))
    assert summary["rounds"] == 15
    assert summary["seconds"] == rows[-1]["seconds"]
    assert summary["bytes"] == sum(row["bytes-down"] + row["bytes-up"] for row in rows)


def test_the_summary_has_the_settings(compared):
    config = json_of(compared / "summary.json")["config"]
    assert config["num-server-rounds"] == 15
    assert config["task"] == "digits"
    assert set(config) == set(defaults()) - {"algorithm", "resume"}


def test_fedrep_is_clearly_above_fedavg(compared):
    algorithms = json_of(compared / "summary.json")["algorithms"]
    assert algorithms["fedrep"]["accuracy"] > algorithms["fedavg"]["accuracy"] + 0.2
    assert algorithms["fedrep"]["accuracy"] > 0.7


def test_fedrep_sends_less_than_fedavg(compared):
    fedrep, fedavg = rows_of(compared)[0], rows_of(compared, "fedavg")[0]
    # The head: a weight of 10 x 32 and a bias of 10, with a header of 128 and a name of
    # at least 9 each, to and from 10 clients.
    head = 10 * (4 * (320 + 10) + 2 * (128 + 9))
    assert fedavg["bytes-up"] - fedrep["bytes-up"] >= head
    assert fedavg["bytes-down"] - fedrep["bytes-down"] >= head


def test_the_table_and_the_bar(tmp_path, capsys):
    assert run(tmp_path / "out", "local", "--rounds", "1") == 0
    shown = capsys.readouterr().out
    assert "local" in shown
    assert "accuracy" in shown
    assert str(tmp_path / "out") in shown.replace("\n", "")


def test_fine_tuning_beats_the_global_model(tmp_path):
    assert run(tmp_path, "fedavg-ft", "--rounds", "3") == 0
    rows = rows_of(tmp_path, "fedavg-ft")
    # Evaluation, with ten epochs on each client, in the last round only.
    assert ["accuracy" in row for row in rows] == [False, False, True]
    assert rows[-1]["accuracy"] > rows[-1]["accuracy-global"] + 0.1
    summary = json_of(tmp_path / "summary.json")["algorithms"]["fedavg-ft"]
    assert summary["accuracy"] == rows[-1]["accuracy"]
    assert summary["accuracy-global"] == rows[-1]["accuracy-global"]


def test_the_global_model_before_fine_tuning_is_fedavg_s(tmp_path):
    for algorithm in ("fedavg-ft", "fedavg"):
        run(tmp_path, algorithm, "--rounds", "3", representation_epochs=2)
    tuned, plain = rows_of(tmp_path, "fedavg-ft"), rows_of(tmp_path, "fedavg")
    assert tuned[-1]["accuracy-global"] == plain[-1]["accuracy"]
    assert [r["train-loss"] for r in tuned] == [r["train-loss"] for r in plain]


def test_the_seed_decides_everything(tmp_path):
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        options = ("fedrep", "--rounds", "2", "--seed", seed)
        assert run(tmp_path / name, *options, **STEADY) == 0
    assert_same_rows(rows_of(tmp_path / "a"), rows_of(tmp_path / "b"), 0)
    a, c = rows_of(tmp_path / "a"), rows_of(tmp_path / "c")
    assert all(r["train-loss"] != s["train-loss"] for r, s in zip(a, c, strict=True))


def test_settings_on_the_command_line_and_in_a_file_are_the_same(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("num-server-rounds = 2\nbatch-size = 32\n")
    common = ["fedper", "--backend", "inline", "--run-config", str(file)]
    simulation.main([*common, "--output", str(tmp_path / "a")])
    run(tmp_path / "b", "fedper", "--rounds", "2", batch_size=32)
    found = rows_of(tmp_path / "a", "fedper")
    assert_same_rows(found, rows_of(tmp_path / "b", "fedper"), 0)
    # A flag is nearer than the file.
    simulation.main([*common, "--output", str(tmp_path / "c"), "--rounds", "1"])
    assert len(rows_of(tmp_path / "c", "fedper")) == 1


def test_all_algorithms_have_the_same_data(tmp_path):
    for algorithm in ("fedrep", "local"):
        run(tmp_path, algorithm, "--rounds", "1", "--clients", "10", partition="iid")
    first, second = (
        json_of(tmp_path / a / "clients.json") for a in ("fedrep", "local")
    )
    assert [c["num-examples"] for c in first.values()] == [
        c["num-examples"] for c in second.values()
    ]


def test_a_thousand_clients(tmp_path):
    arguments = ("fedrep", "--task", "linear", "--clients", "1000", "--rounds", "2")
    assert run(tmp_path, *arguments, "--fraction", "0.1") == 0
    rows = rows_of(tmp_path)
    assert [row["clients"] for row in rows] == [100, 100]
    assert rows[-1]["evaluated"] == 1000
    assert len(json_of(tmp_path / "fedrep" / "clients.json")) == 1000


def test_linear_fedrep_finds_the_representation(tmp_path):
    arguments = ("fedrep", "--task", "linear", "--clients", "50", "--fraction", "0.2")
    steps = {"learning_rate": 0.3, "evaluate_last": 5}
    assert run(tmp_path, *arguments, "--rounds", "50", **steps) == 0
    rows = rows_of(tmp_path)
    assert rows[-1]["distance"] < 1e-2
    assert rows[-1]["distance"] < rows[4]["distance"] / 3
    assert rows[-1]["error-best"] == pytest.approx(0, abs=1e-9)
    summary = json_of(tmp_path / "summary.json")["algorithms"]["fedrep"]
    last = [row["distance"] for row in rows[-5:]]
    assert summary["distance"] == pytest.approx(np.mean(last))


def test_a_server_app_of_its_own():
    assert make_app() is not None


def test_list(capsys):
    assert simulation.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {tuple(line.split()[:2]) for line in lines}
    assert {("algorithm", name) for name in ALGORITHMS} <= listed
    assert {("task", name) for name in TASKS} <= listed
    assert {("model", name) for name in MODELS} <= listed


# Stop and resume


def finished_at(rounds: int, output: Path, algorithm: str, **overrides) -> list[dict]:
    code = run(output, algorithm, "--rounds", str(rounds), **STEADY, **overrides)
    assert code == 0
    return rows_of(output, algorithm)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Rows of runs over 9 rounds, without any checkpoint."""
    output = tmp_path_factory.mktemp("undisturbed")
    return {algorithm: finished_at(9, output, algorithm) for algorithm in PERSONAL}


def crash_in(monkeypatch, server_round: int) -> None:
    add = Report.add

    def crash(report: Report, row: dict) -> None:
        if row["round"] == server_round:
            raise KeyboardInterrupt
        add(report, row)

    monkeypatch.setattr(Report, "add", crash)


@pytest.mark.parametrize("algorithm", PERSONAL)
def test_checkpoints_do_not_change_the_numbers(tmp_path, undisturbed, algorithm):
    rows = finished_at(9, tmp_path, algorithm, checkpoint_every=5)
    assert_same_rows(rows, undisturbed[algorithm], 0)
    assert (tmp_path / algorithm / FILE).is_file()


@pytest.mark.parametrize("algorithm", PERSONAL)
def test_stop_at_round_5_and_resume(tmp_path, undisturbed, algorithm):
    finished_at(5, tmp_path, algorithm, checkpoint_every=5)
    rows = finished_at(9, tmp_path, algorithm, checkpoint_every=5, resume=str(tmp_path))
    assert_same_rows(rows, undisturbed[algorithm], 1e-12)
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("algorithm", PERSONAL)
def test_a_crash_between_checkpoints(tmp_path, monkeypatch, undisturbed, algorithm):
    # Rounds 6 to 8 are trained, and their replies have counted; the server goes back to
    # round 5, and the clients with it.
    with monkeypatch.context() as patched:
        crash_in(patched, 8)
        with pytest.raises(KeyboardInterrupt):
            finished_at(9, tmp_path, algorithm, checkpoint_every=5)
    rows = finished_at(9, tmp_path, algorithm, checkpoint_every=5, resume=str(tmp_path))
    assert_same_rows(rows, undisturbed[algorithm], 1e-12)


def test_a_crash_after_an_end_between_checkpoints(tmp_path, monkeypatch, undisturbed):
    # The last round, 6, has a checkpoint as well, though it is no multiple of 5.
    finished_at(6, tmp_path, "fedper", checkpoint_every=5)
    resume = {"checkpoint_every": 5, "resume": str(tmp_path)}
    with monkeypatch.context() as patched:
        crash_in(patched, 8)
        with pytest.raises(KeyboardInterrupt):
            finished_at(9, tmp_path, "fedper", **resume)
    rows = finished_at(9, tmp_path, "fedper", **resume)
    assert_same_rows(rows, undisturbed["fedper"], 1e-12)


def test_a_crash_after_a_checkpoint_that_failed(tmp_path, monkeypatch, undisturbed):
    write = Checkpoint.write

    def fail_later(checkpoint: Checkpoint, directory: Path) -> None:
        if checkpoint.server_round > 3:
            raise OSError(28, "No space left on device")
        write(checkpoint, directory)

    # There is one of round 3 and none of round 6.
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "write", fail_later)
        crash_in(patched, 8)
        with pytest.raises(KeyboardInterrupt):
            finished_at(9, tmp_path, "fedper", checkpoint_every=3)
    rows = finished_at(9, tmp_path, "fedper", checkpoint_every=3, resume=str(tmp_path))
    assert_same_rows(rows, undisturbed["fedper"], 1e-12)


def test_resume_without_further_checkpoints(tmp_path, undisturbed):
    finished_at(5, tmp_path, "fedrep", checkpoint_every=5)
    rows = finished_at(9, tmp_path, "fedrep", resume=str(tmp_path))
    assert_same_rows(rows, undisturbed["fedrep"], 1e-12)


def test_resume_into_another_directory(tmp_path, undisturbed):
    finished_at(5, tmp_path / "a", "fedrep", checkpoint_every=5)
    rows = finished_at(
        9, tmp_path / "b", "fedrep", checkpoint_every=5, resume=str(tmp_path / "a")
    )
    assert_same_rows(rows[-4:], undisturbed["fedrep"][5:], 1e-12)


def test_resume_where_the_run_was_is_the_default(tmp_path, undisturbed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finished_at(5, tmp_path / "there", "fedper", checkpoint_every=5)
    options = {**STEADY, "checkpoint_every": 5}
    text = " ".join(f"{n.replace('_', '-')}={v}" for n, v in options.items())
    text += f" resume='{tmp_path / 'there'}'"
    arguments = ["fedper", "--backend", "inline", "--rounds", "9"]
    code = simulation.main([*arguments, "--run-config", text])
    assert code == 0
    rows = rows_of(tmp_path / "there", "fedper")
    assert_same_rows(rows, undisturbed["fedper"], 1e-12)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_resume_a_run_that_is_over(tmp_path, undisturbed):
    rows = finished_at(5, tmp_path, "fedper", checkpoint_every=5)
    again = finished_at(5, tmp_path, "fedper", checkpoint_every=5, resume=str(tmp_path))
    assert_same_rows(again, rows, 0)


def test_linear_fedrep_resumes(tmp_path):
    linear = {"task": "linear", "samples": 10, "head_steps": 10}
    whole = finished_at(9, tmp_path / "a", "fedrep", **linear)
    finished_at(5, tmp_path / "b", "fedrep", checkpoint_every=5, **linear)
    rows = finished_at(
        9,
        tmp_path / "b",
        "fedrep",
        checkpoint_every=5,
        resume=str(tmp_path / "b"),
        **linear,
    )
    assert_same_rows(rows, whole, 1e-12)


def test_a_new_run_does_not_take_an_old_run_s_heads(tmp_path):
    first, second = (
        finished_at(3, tmp_path, "fedrep", checkpoint_every=2) for _ in range(2)
    )
    assert_same_rows(first, second, 0)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strategies.server.checkpoint.write_atomically", full)
    assert run(tmp_path, "fedavg", "--rounds", "2", checkpoint_every=1) == 0
    assert len(rows_of(tmp_path, "fedavg")) == 2


# Bad input


def config(text: str) -> tuple[str, str]:
    return ("--run-config", text)


BAD = [
    (
        ("fedrap",),
        "unknown algorithm 'fedrap'; did you mean 'fedrep'? known: apfl, choco",
    ),
    (("fedavg", "fedrap"), "unknown algorithm 'fedrap'"),
    (("--task", "minst"), "unknown task 'minst'; did you mean 'mnist'? known: arrays"),
    (config("model='resnet81'"), "unknown model 'resnet81'; did you mean 'resnet18'"),
    (
        config("model='resnet18' model-head='top'"),
        "the model ResNet has no head named 'top'; its linear layers: fc",
    ),
    (config("model='resnet18'"), "model 'resnet18' does not fit inputs of shape (1, 8"),
    (config("sede=1"), "unknown setting 'sede'; did you mean 'seed'? known: "),
    (config("seed=true"), "seed is True; it must be of type int"),
    (config("momentum='high'"), "momentum is 'high'; it must be of type float"),
    (config("augment=1"), "augment is 1; it must be of type bool"),
    (config("seed=1e"), "--run-config 'seed=1e' cannot be read: it must be"),
    (config("nowhere.toml"), "--run-config 'nowhere.toml' cannot be read"),
    (("--colour",), "unrecognized arguments: --colour; --help shows"),
    (("--rounds",), "argument --rounds: expected one argument; --help shows"),
    (("--rounds", "ten"), "argument --rounds: invalid int value: 'ten'; --help shows"),
    (("--rounds", "1.5"), "argument --rounds: invalid int value: '1.5'"),
    (("--rounds", "0"), "num-server-rounds is 0; it must be at least 1"),
    (("--clients", "0"), "num-clients is 0; it must be at least 1"),
    (("--clients", "-5"), "num-clients is -5; it must be at least 1"),
    (
        ("--clients", "13"),
        "num-clients is 13: 13 x 2 classes per client are no multiple",
    ),
    (("--clients", "13"), "the nearest that work: 10 or 15 clients"),
    (("--clients", "2000"), "leaves 798 of 2000 clients without training examples"),
    (
        ("--classes-per-client", "11"),
        "classes-per-client is 11; it must be from 1 to 10",
    ),
    (("--classes-per-client", "0"), "classes-per-client is 0; it must be at least 1\n"),
    (("--fraction", "0"), "fraction-train is 0.0; it must be in (0, 1]"),
    (("--fraction", "1.5"), "fraction-train is 1.5; it must be in (0, 1]"),
    (("--fraction", "-1"), "fraction-train is -1.0; it must be in (0, 1]"),
    (("--fraction", "nan"), "fraction-train is nan; it must be in (0, 1]"),
    (
        ("--fraction", "0.01"),
        "fraction-train is 0.01: of 20 clients it samples nobody; it must be at least",
    ),
    (("--seed", "-1"), "seed is -1; it must be at least 0"),
    (("--backend", "dask"), "backend is 'dask'; it must be ray or inline"),
    (("--task", "image-folder"), "data-dir is ''; it must be a directory with train/"),
    (
        ("--task", "image-folder", "--data-dir", "nowhere"),
        "data-dir is 'nowhere'; it must be a directory with train/<class>/*",
    ),
    (
        ("--task", "image-folder", "--data-dir", "empty"),
        "data-dir 'empty' has no class folders under 'train'; it must hold train/",
    ),
    (
        ("--task", "image-folder", "--data-dir", "hollow"),
        "class folder 'hollow/train/b' has no images",
    ),
    (
        ("--task", "image-folder", "--data-dir", "broken"),
        "2 images cannot be read, the first is broken/train/a/0.png",
    ),
    (
        ("--task", "cifar10", "--data-dir", "nowhere"),
        "data-dir is 'nowhere'; there is no",
    ),
    (config("resume='nowhere'"), "there is no checkpoint 'nowhere/fedavg/checkpoint"),
    (config("momentum=1.5"), "momentum is 1.5; it must be in [0, 1)"),
    (config("learning-rate=0"), "learning-rate is 0.0; it must be above 0"),
    (config("weight-decay=-1.0"), "weight-decay is -1.0; it must be at least 0"),
    (config("batch-size=0"), "batch-size is 0; it must be at least 1"),
    (config("head-epochs=-1"), "head-epochs is -1; it must be at least 0"),
    (config("representation-epochs=-1"), "representation-epochs is -1; it must be at"),
    (
        ("fedavg-ft", *config("finetune-epochs=-1")),
        "finetune-epochs is -1; it must be at least 0",
    ),
    (config("evaluate-every=-1"), "evaluate-every is -1; it must be at least 0"),
    (config("checkpoint-every=-1"), "checkpoint-every is -1; it must be at least 0"),
    (config("torch-threads=0"), "torch-threads is 0; it must be at least 1"),
    (config("round-timeout=0"), "round-timeout is 0.0; it must be above 0\n"),
    (config("weighting='even'"), "weighting is 'even'; it must be uniform or examples"),
    (
        config("partition='even'"),
        "partition is 'even'; it must be shards, distinct-shards, dirichlet, log-norm",
    ),
    (
        config("partition='dirichlet' dirichlet-alpha=0"),
        "dirichlet-alpha is 0.0; it must be above 0\n",
    ),
    (
        config("partition='log-normal' size-sigma=-1"),
        "size-sigma is -1.0; it must be at least 0",
    ),
    (config("num-classes=1"), "num-classes is 1; it must be 0 (all) or from 2 to 10"),
    (config("head-layers=7"), "head-layers is 7; it must be from 1 to 3"),
    (config("min-train-nodes=0"), "min-train-nodes is 0; it must be at least 1"),
    (
        config("min-available-nodes=0"),
        "min-available-nodes is 0; it must be at least 1",
    ),
    (
        ("--task", "linear", *config("rank=11")),
        "rank is 11; it must be from 1 to 10, the dimension",
    ),
    (("--task", "linear", *config("samples=0")), "samples is 0; it must be at least 1"),
    (
        ("--task", "linear", *config("noise-variance=-1.0")),
        "noise-variance is -1.0; it must be at least 0",
    ),
    (
        ("--task", "linear", *config("spectrum='flat'")),
        "spectrum is 'flat'; it must be low-rank, gaussian or decaying\n",
    ),
    (
        ("--task", "linear", *config("initialization='zero'")),
        "initialization is 'zero'; it must be moments or random",
    ),
    (config("cache-dir='file'"), "the data cache 'file' cannot be written"),
    (("--output", ""), "output is ''; it must be a directory"),
    (config("nonsense"), "nonsense"),
    (config("seed = 3"), "seed = 3"),
    (config("seed="), "seed="),
    (("--output", "file"), "file"),
    (("--output", "file/below"), "file"),
    (("--seed", str(10**30)), "seed is 1000"),
    (config("min-available-nodes=100"), "min-available-nodes is 100"),
    (config("learning-rate=inf"), "learning-rate is inf"),
    (
        ("fedrep", "--task", "linear", *config("head-steps=-1")),
        "head-steps is -1; it must be at least 0",
    ),
    # Somebody else's.
    (
        ("nowhere.at_all:Strategy",),
        "algorithm 'nowhere.at_all:Strategy' cannot be imported: ModuleNotFoundError: ",
    ),
    (
        ("outsiders:Nobody",),
        "algorithm 'outsiders:Nobody' cannot be imported: module 'outsiders' has no",
    ),
    (
        ("fedavg", "outsiders:Homeless"),
        "algorithm 'outsiders:Homeless' is no strategy; it must be a subclass of Base",
    ),
    (
        ("outsiders:WithoutClient",),
        "algorithm 'outsiders:WithoutClient' has no client; its attribute 'client' mu",
    ),
    (
        ("outsiders:LostClient",),
        "client 'outsiders:NobodyIsHere' cannot be imported: module 'outsiders' has n",
    ),
    (
        ("outsiders:StrangeClient",),
        "client 'outsiders:Plain' is no client; it must be a subclass of Client",
    ),
    (
        ("outsiders:Plain", "outsiders:Elsewhere.Plain", "fedrep", "outsiders:fedrep"),
        "two algorithms are called 'fedrep': 'fedrep' and 'outsiders:fedrep'; each mu",
    ),
    (("fedavg", *config("fewest=3")), "unknown setting 'fewest'; known: see docs/"),
    (
        ("outsiders:Hooked", *config("fewest=0")),
        "fewest is 0; it must be in [1, 99]",
    ),
    (("--task", "nowhere:task"), "task 'nowhere:task' cannot be imported: ModuleNot"),
    (
        ("srpfl", *config("srpfl-base='srpfl'")),
        "srpfl-base is 'srpfl'; it must be an algorithm that is not SRPFL\n",
    ),
    (
        ("srpfl", *config("srpfl-base='flanp-ft'")),
        "srpfl-base is 'flanp-ft'; it must be an algorithm that is not SRPFL\n",
    ),
    (
        ("srpfl", *config("srpfl-base='outsiders:Homeless'")),
        "algorithm 'outsiders:Homeless' is no strategy; it must be",
    ),
]


@pytest.fixture
def surroundings(tmp_path, monkeypatch):
    """A directory with data that something is wrong with."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("a file")
    for root in ("hollow", "broken"):
        for part in ("train", "test"):
            for name in "ab":
                folder = tmp_path / root / part / name
                folder.mkdir(parents=True)
                pixels = np.zeros((16, 16, 3), np.uint8)
                Image.fromarray(pixels).save(folder / "0.png")
    (tmp_path / "hollow" / "train" / "b" / "0.png").unlink()
    for name in "ab":
        (tmp_path / "broken" / "train" / name / "0.png").write_bytes(b"no image")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def assert_refused(arguments: tuple[str, ...], line: str, root: Path, capfd) -> None:
    before = tree(root)
    given = list(arguments)
    if "--output" not in given:
        given += ["--output", "out"]
    if "--backend" not in given:
        given += ["--backend", "inline"]
    if "--rounds" not in given:
        given += ["--rounds", "1"]
    capfd.readouterr()
    assert simulation.main(given) == 2
    out, err = capfd.readouterr()
    # A progress bar may have left an empty line.
    assert out.strip() == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert line in err
    # Nothing is written, not even a directory.
    assert tree(root) == before


@pytest.mark.parametrize(("arguments", "line"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input(surroundings, capfd, arguments, line):
    assert_refused(arguments, line, surroundings, capfd)


def test_resume_with_other_settings(surroundings, capfd):
    assert run(surroundings / "out", "fedper", "--rounds", "1", checkpoint_every=1) == 0
    for overrides, line in (
        ("seed=3", "'out/fedper' was made with other settings: seed was 0 and is 3\n"),
        (
            "learning-rate=0.5 momentum=0.1",
            "learning-rate was 0.01 and is 0.5, momentum was 0.5 and is 0.1\n",
        ),
    ):
        arguments = ("fedper", "--rounds", "2")
        arguments += config(f"checkpoint-every=1 resume='out' {overrides}")
        assert_refused(arguments, line, surroundings, capfd)


def test_resume_from_a_damaged_checkpoint(surroundings, capfd):
    (surroundings / "out" / "fedper").mkdir(parents=True)
    (surroundings / "out" / "fedper" / FILE).write_bytes(b"\0" * 100)
    arguments = ("fedper", *config("resume='out'"))
    line = f"resume: 'out/fedper/{FILE}' is damaged"
    assert_refused(arguments, line, surroundings, capfd)


def test_a_run_that_is_over_cannot_be_resumed_elsewhere(surroundings, capfd):
    assert run(surroundings / "out", "fedper", "--rounds", "2", checkpoint_every=1) == 0
    arguments = ("fedper", "--rounds", "2", "--output", "new")
    arguments += config("checkpoint-every=1 resume='out'")
    assert_refused(arguments, "resume: the run has ended", surroundings, capfd)


def test_a_refused_run_deletes_nothing(surroundings, capfd):
    kept = {"checkpoint_every": 1, "initial_nodes": 2}
    assert run(surroundings / "out", "srpfl", "--rounds", "2", **kept) == 0
    arguments = ("srpfl", *config("checkpoint-every=1 initial-nodes=11"))
    line = "initial-nodes is 11; it must be at most 10"
    assert_refused(arguments, line, surroundings, capfd)


def test_one_algorithm_of_two_cannot_be_resumed(surroundings, capfd):
    assert run(surroundings / "out", "fedper", "--rounds", "1", checkpoint_every=1) == 0
    arguments = ("fedper", "fedrep", *config("checkpoint-every=1 resume='out'"))
    line = f"there is no checkpoint 'out/fedrep/{FILE}'"
    assert_refused(arguments, line, surroundings, capfd)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["fedrap"], "error: unknown algorithm 'fedrap'"),
        (["--clients", "13"], "error: num-clients is 13"),
    ],
)
def test_bad_input_to_the_real_command(tmp_path, arguments, line):
    result = subprocess.run(
        [sys.executable, ROOT / "simulation.py", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# Settings that do nothing


def folder_of_clients(root: Path, num_clients: int = 2) -> None:
    """Write images that are already split over clients."""
    rng = np.random.default_rng(0)
    for client in range(num_clients):
        for part, name in (("train", "a"), ("train", "b"), ("test", "a")):
            folder = root / f"client-{client}" / part / name
            folder.mkdir(parents=True)
            pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "0.png")


def warnings_of(arguments: list[str], caplog) -> list[str]:
    """Check what a command line gives, and return what is warned of."""
    caplog.clear()
    namespace, given = simulation.parse(arguments)
    simulation.check(namespace.algorithms, given, "inline")
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["fedrep", "--classes-per-client", "3", *config("partition='dirichlet'")],
            [
                "classes-per-client=3 does nothing: partition 'dirichlet' does not "
                "use it"
            ],
        ),
        (
            ["fedrep", *config("dirichlet-alpha=0.5 size-sigma=2")],
            [
                "dirichlet-alpha=0.5 does nothing: partition 'shards' does not use it",
                "size-sigma=2 does nothing: partition 'shards' does not use it",
            ],
        ),
        (
            ["fedavg", *config("nc-weight=0.5")],
            ["nc-weight=0.5 does nothing: fedavg on digits do not read it"],
        ),
        (
            ["fedavg", "fedrep", *config("nc-weight=0.5 head-epochs=3")],
            ["nc-weight=0.5 does nothing: fedavg, fedrep on digits do not read it"],
        ),
        (
            ["fedrep", "--task", "linear", *config("partition='iid' batch-size=5")],
            [
                "partition=iid does nothing: fedrep on linear do not read it",
                "batch-size=5 does nothing: fedrep on linear do not read it",
            ],
        ),
        # All that is read.
        (["fedavg", "flute", *config("nc-weight=0.5 seed=3 resume=''")], []),
        (["fedrep", "--classes-per-client", "4", "--clients", "10"], []),
        (["fedrep", *config("partition='dirichlet' dirichlet-alpha=5")], []),
        (["srpfl", *config("srpfl-base='flute' nc-weight=0.5 initial-nodes=3")], []),
        (["outsiders:Hooked", *config("fewest=3 round-timeout=60")], []),
        (["fedrep", *config("torch-threads=2 communication-time=0.5")], []),
        # What is not given is not warned of.
        (["fedavg"], []),
    ],
)
def test_settings_that_do_nothing_are_warned_of(arguments, lines, caplog):
    assert warnings_of(arguments, caplog) == lines


def test_clients_with_folders_of_their_own_are_not_partitioned(tmp_path, caplog):
    folder_of_clients(tmp_path / "images")
    task = ["--task", "image-folder", "--data-dir", str(tmp_path / "images")]
    task += ["--clients", "2", "--fraction", "1"]
    text = f"cache-dir='{tmp_path / 'cache'}' image-size=16"
    assert warnings_of(["fedavg", *task, *config(text)], caplog) == []
    lines = warnings_of(
        ["fedavg", *task, *config(f"{text} partition='iid' test-partition='all'")],
        caplog,
    )
    assert [line.split(":")[0] for line in lines] == [
        "partition=iid does nothing",
        "test-partition=all does nothing",
    ]


def test_more_training_nodes_than_clients_are_warned_of(caplog):
    lines = warnings_of(["fedavg", *config("min-train-nodes=30")], caplog)
    assert set(lines) == {
        "min-train-nodes is 30, of which there are only 20: all train"
    }
    assert warnings_of(["fedavg", *config("min-train-nodes=20")], caplog) == []


def test_a_run_warns_once(tmp_path, caplog):
    assert run(tmp_path, "fedavg", "fedper", "--rounds", "1", nc_weight=0.5) == 0
    line = "nc-weight=0.5 does nothing: fedavg, fedper on digits do not read it"
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warned == [line]


# From Python


def test_a_simulation_from_python_is_that_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = simulation.simulate("fedrep", num_clients=20, rounds=2, backend="inline")
    assert run(tmp_path / "other", "fedrep", "--rounds", "2") == 0
    assert_same_rows(found.rows, rows_of(tmp_path / "other"), 0)
    assert found.rows == rows_of(tmp_path / "results")
    assert (
        found.summary
        == json_of(tmp_path / "results" / "summary.json")["algorithms"]["fedrep"]
    )
    assert found.summary["rounds"] == 2
    # As a pair, too.
    summary, rows = found
    assert (summary, rows) == (found.summary, found.rows)


def test_a_simulation_from_python_takes_names_as_on_the_command_line(tmp_path):
    found = [
        simulation.simulate(
            algorithm,
            backend="inline",
            output=str(tmp_path / str(i)),
            head_epochs=1,
            evaluate_every=1,
            **named,
        )
        for i, (algorithm, named) in enumerate(
            [
                ("fedrep", {"rounds": 2, "clients": 5, "fraction": 0.6}),
                (FedRep, {"rounds": 2, "num_clients": 5, "fraction_train": 0.6}),
                (
                    "outsiders:Plain",
                    {"num_server_rounds": 2, "clients": 5, "fraction": 0.6},
                ),
            ]
        )
    ]
    first, *others = found
    assert [row["clients"] for row in first.rows] == [3, 3]
    for other in others:
        assert_same_rows(other.rows, first.rows, 0)
    places = [tmp_path / "1" / "FedRep", tmp_path / "2" / "Plain"]
    assert all((place / "metrics.jsonl").is_file() for place in places)


class Local(FedRep):
    """Where no import path leads to."""


@pytest.mark.parametrize(
    ("algorithm", "settings", "line"),
    [
        ("fedrap", {}, "unknown algorithm 'fedrap'"),
        ("fedrep", {"sede": 3}, "unknown setting 'sede'; did you mean 'seed'"),
        ("fedrep", {"fraction": 2.0}, "fraction-train is 2.0; it must be in"),
        ("fedrep", {"backend": "dask"}, "backend is 'dask'; it must be ray or inline"),
        (Homeless, {}, "algorithm 'outsiders:Homeless' is no strategy; it must be"),
        (
            type("Nowhere", (FedRep,), {"__module__": "outsiders"}),
            {},
            "algorithm 'outsiders:Nowhere' cannot be imported: module 'outsiders' has",
        ),
    ],
)
def test_bad_input_from_python(tmp_path, monkeypatch, algorithm, settings, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=f"^{line}") as caught:
        simulation.simulate(algorithm, **{"backend": "inline", **settings})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# Somebody else's package


@pytest.fixture
def guest(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "guest")


GUEST = ("guest.algorithm:Guest", "--task", "guest.task:sensors", "--clients", "6")


def test_a_guest_s_algorithm_and_task_stop_and_resume(tmp_path, guest):
    own = {"roll": 0.8, "warm_up": 3, "readings": 40, "evaluate_every": 1}
    assert run(tmp_path / "a", *GUEST, "--rounds", "5", **own) == 0
    saved = {**own, "checkpoint_every": 2}
    assert run(tmp_path / "b", *GUEST, "--rounds", "3", **saved) == 0
    again = {**saved, "resume": str(tmp_path / "b")}
    assert run(tmp_path / "b", *GUEST, "--rounds", "5", **again) == 0
    whole, resumed = (rows_of(tmp_path / name, "Guest") for name in "ab")
    assert_same_rows(resumed, whole, 1e-12)
    assert whole[-1]["loss"] < whole[0]["loss"]
    summary = json_of(tmp_path / "a" / "summary.json")
    assert list(summary["algorithms"]) == ["Guest"]
    assert (summary["config"]["roll"], summary["config"]["readings"]) == (0.8, 40)
    # Its settings do something.
    assert run(tmp_path / "c", *GUEST, "--rounds", "5", **{**own, "roll": 0.0}) == 0
    other = rows_of(tmp_path / "c", "Guest")
    assert other[0]["train-loss"] == whole[0]["train-loss"]
    assert other[-1]["train-loss"] != whole[-1]["train-loss"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("roll=1.0", "roll is 1.0; it must be in [0, 1)"),
        ("warm-up=-1", "warm-up is -1; it must be at least 0"),
        ("readings=1", "readings is 1; it must be at least 2"),
        ("warm-upp=1", "unknown setting 'warm-upp'; did you mean 'warm-up'?"),
    ],
)
def test_a_guest_s_settings_are_checked(surroundings, guest, capfd, text, line):
    assert_refused((*GUEST, *config(text)), line, surroundings, capfd)


def test_flags_and_settings():
    namespace, given = simulation.parse([])
    assert given == {}
    assert namespace.backend == "ray"
    line = (
        "--clients 30 --fraction 1 --seed 4 --rounds 9 --classes-per-client 3 "
        "--task mnist --data-dir d --output o --run-config momentum=0.9 model='mlp'"
    )
    _, given = simulation.parse(line.split())
    assert given == {
        "num-clients": 30,
        "fraction-train": 1.0,
        "seed": 4,
        "num-server-rounds": 9,
        "classes-per-client": 3,
        "task": "mnist",
        "data-dir": "d",
        "output": "o",
        "momentum": 0.9,
        "model": "mlp",
    }


def test_what_is_not_given_has_its_default(tmp_path):
    given = {"seed": 4, "learning-rate": 1}
    settings = simulation.check(["fedavg"], given, "inline")
    # Simulated clients that do not answer never will.
    expected = {**defaults(), "seed": 4, "learning-rate": 1.0, "max-empty-rounds": 3}
    assert settings == expected
    settings = simulation.check(["fedavg"], {"max-empty-rounds": 7}, "inline")
    assert settings["max-empty-rounds"] == 7
