"""Complete runs of the command line in this process."""

import logging
from pathlib import Path

import numpy as np
import pytest
from command_line import STEADY, assert_same_rows, json_of, rows_of, run
from PIL import Image

from flwr_frl import cli, compare, running
from flwr_frl.cli import parse
from flwr_frl.common.settings import defaults
from flwr_frl.results.comparison import PER_RUN, write_figures


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    """Output of FedAvg and FedRep on digits."""
    output = tmp_path_factory.mktemp("compared") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flwr_frl.results.comparison.write_figures", write_figures)
        words = ("fedavg", "fedrep", "--rounds", "15")
        quick = {"model": "mlp-2", "batch_size": 25, "head_epochs": 5}
        assert run(output, *words, **quick) == 0
    return output


def test_the_files_of_a_run(compared):
    files = {str(p.relative_to(compared)) for p in compared.rglob("*") if p.is_file()}
    # The last head of each client that has trained, which a resumed run needs
    heads = {name for name in files if name.startswith("fedrep/clients/")}
    assert len(heads) == 20
    own = ("metrics.jsonl", "clients.json", "status.json", "checkpoint.safetensors")
    assert files - heads == {
        *("accuracy.png", "report.html", "summary.json"),
        *("table.tex", "references.bib", "accuracy.pdf", "accuracy.svg"),
        *(f".{name}.lock" for name in ("fedavg", "fedrep", "results")),
        *(f"{name}/{file}" for name in ("fedavg", "fedrep") for file in own),
    }
    with Image.open(compared / "accuracy.png") as image:
        assert image.format == "PNG"
    config = json_of(compared / "summary.json")["config"]
    assert config["num-server-rounds"] == 15
    assert set(config) == set(defaults()) - set(PER_RUN)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedrep"])
def test_rows_have_the_documented_names(compared, algorithm):
    rows = rows_of(compared, algorithm)
    assert [row["round"] for row in rows] == list(range(1, 16))
    for row in rows:
        # Every fifth round is evaluated, and so are the last ten.
        assert ("accuracy" in row) is (row["round"] >= 5)
        assert row.get("evaluated", 20) == 20
        assert row["train-loss"] > 0
        # Half of the 20 clients
        assert (row["clients"], row["rejected"]) == (10, 0)
        assert min(row["bytes-down"], row["bytes-up"]) > 0


@pytest.mark.parametrize("algorithm", ["fedavg", "fedrep"])
def test_clients_and_summary_agree_with_the_rows(compared, algorithm):
    rows = rows_of(compared, algorithm)
    clients = json_of(compared / algorithm / "clients.json")
    assert list(clients) == [f"{i:06d}" for i in range(20)]
    accuracies = [client["accuracy"] for client in clients.values()]
    assert np.mean(accuracies) == pytest.approx(rows[-1]["accuracy"])
    # The complete data set: 1,438 training and 359 test examples
    assert sum(client["num-examples"] for client in clients.values()) == 1438
    assert sum(client["num-test-examples"] for client in clients.values()) == 359
    summary = json_of(compared / "summary.json")["algorithms"][algorithm]
    last = [row["accuracy"] for row in rows[-10:]]
    assert summary["accuracy"] == pytest.approx(np.mean(last))
    assert summary["accuracy"] != max(last)
    assert summary["accuracy-last"] == last[-1]
    # The tables show the same number.
    results = {row.method: row.result for row in compare(compared).rows}
    assert results[algorithm] == summary["accuracy"]
    page = (compared / "report.html").read_text()
    assert f"{summary['accuracy']:.2%}" in page
    assert summary["protocol"] == "mean of last 10 rounds"
    tested = {"fedavg": "received", "fedrep": "with personal parts"}
    assert summary["tested-model"] == tested[algorithm]
    assert summary["accuracy-std-clients"] == pytest.approx(np.std(accuracies))
    assert summary["rounds"] == 15
    assert summary["seconds"] == rows[-1]["seconds"]
    assert summary["bytes"] == sum(row["bytes-down"] + row["bytes-up"] for row in rows)


def test_the_seed_determines_the_results(tmp_path):
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        options = ("fedrep", "--rounds", "2", "--seed", seed)
        assert run(tmp_path / name, *options, **STEADY) == 0
    assert_same_rows(rows_of(tmp_path / "a"), rows_of(tmp_path / "b"), 0)
    a, c = rows_of(tmp_path / "a"), rows_of(tmp_path / "c")
    assert all(r["train-loss"] != s["train-loss"] for r, s in zip(a, c, strict=True))


def test_settings_on_the_command_line_and_in_a_file_are_equivalent(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("num-server-rounds = 2\nbatch-size = 32\nmodel = 'mlp-2'\n")
    common = ["fedper", "--backend", "inline", "--run-config", str(file)]
    cli.main([*common, "--output", str(tmp_path / "a")])
    run(tmp_path / "b", "fedper", "--rounds", "2", batch_size=32, model="mlp-2")
    from_file = rows_of(tmp_path / "a", "fedper")
    assert_same_rows(from_file, rows_of(tmp_path / "b", "fedper"), 0)
    # A flag takes precedence over a file and a setting.
    for text in ("num-clients=5 batch-size=32", str(file)):
        words = ["--rounds", "1", "--clients", "10", "--fraction", "1", "--seed", "4"]
        _, parsed = parse([*words, "--run-config", text])
        flags = {"num-server-rounds": 1, "num-clients": 10, "fraction-train": 1.0}
        flags |= {"seed": 4, "batch-size": 32}
        assert flags.items() <= parsed.items()


def test_options_that_are_given_twice_are_combined(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("momentum = 0.5\nresume = 'former'\n")
    first, second = "batch-size=10", "resume='results' batch-size=20"
    each = ["--run-config", first, "--run-config", str(file), "--run-config", second]
    grid = ["--grid", "momentum=0,0.9", "--grid", "batch-size=5,10"]
    namespace, parsed = parse(["tune", "fedrep", *each, *grid])
    assert parsed == {"batch-size": 20, "momentum": 0.5, "resume": "results"}
    assert namespace.grid == ["momentum=0,0.9", "batch-size=5,10"]


def test_a_command_restores_the_level_of_flower_s_logger(tmp_path, caplog):
    level = logging.getLogger("flwr").level
    assert run(tmp_path / "a", "local", "--rounds", "1", num_clients=5) == 0
    assert logging.getLogger("flwr").level == level
    assert not [r for r in caplog.records if r.levelno == logging.INFO]


def test_the_run_config_can_name_the_algorithm(tmp_path, caplog):
    quick = {"num_clients": 5, "algorithm": "fedper", "fraction_train": 1.0}
    assert run(tmp_path / "a", "--rounds", "1", **quick) == 0
    assert list(json_of(tmp_path / "a" / "summary.json")["algorithms"]) == ["fedper"]
    # The command line takes precedence.
    assert run(tmp_path / "b", "local", "--rounds", "1", **quick) == 0
    assert list(json_of(tmp_path / "b" / "summary.json")["algorithms"]) == ["local"]


def test_omitted_settings_have_their_defaults(tmp_path):
    overrides = {"seed": 4, "learning-rate": 1}
    settings = running.check(["fedavg"], overrides, "inline")
    # Simulated clients without a reply will never reply, and slow ones are awaited.
    others = {"max-empty-rounds": 3, "round-timeout": 365 * 86400.0}
    assert settings == {**defaults(), "seed": 4, "learning-rate": 1.0, **others}
    settings = running.check(["fedavg"], {"max-empty-rounds": 7}, "inline")
    assert settings["max-empty-rounds"] == 7
