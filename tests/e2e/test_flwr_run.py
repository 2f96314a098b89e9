"""``flwr run . local``: the guide to algorithms, and the results of a simulation."""

import json
from pathlib import Path

import pytest
from command_line import run
from deploy_commands import command
from federation import BIN, project, read_lines
from guides import follow

# Rounds 2, 4 and 5 are evaluated.
SETTINGS = (
    "evaluate-last=1 num-clients=4 classes-per-client=5 num-server-rounds=5 "
    "evaluate-every=2 "
)
# The speed model determines the arrival order.
ASYNCHRONOUS = 'async-base="fedrep" speed-model="dynamic" concurrency=3 buffer-size=2'
SECURED = "fraction-train=1.0 secure-aggregation=true"
NODES = "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=1"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("algorithm", "more"), [("fedbuff", ASYNCHRONOUS), ("fedrep", SECURED)]
)
def test_flwr_run_equals_inline(local, tmp_path: Path, algorithm, more) -> None:
    inline, simulated = tmp_path / "inline", tmp_path / "simulated"
    config = f'algorithm="{algorithm}" {SETTINGS + more} output="{simulated}"'
    words = (BIN / "flwr", "run", project(), "local", "--stream")
    options = ("--federation-config", NODES, "--run-config", config)
    result = command(*words, *options, seconds=400, env=local, cwd=tmp_path)
    log = result.stdout + result.stderr
    rows = read_lines(simulated / algorithm / "metrics.jsonl")
    assert rows, log
    # The log names the folder of the results and reports each round.
    assert f"results are written to {simulated}/{algorithm}" in log
    assert "connected clients: " in log
    clients, total = rows[-1]["clients"], len(rows)
    assert f"round {total} of {total}: {clients} clients, train loss " in log
    assert run(inline, algorithm, "--run-config", SETTINGS + more) == 0
    for actual, expected in zip(
        rows, read_lines(inline / algorithm / "metrics.jsonl"), strict=True
    ):
        del actual["seconds"], expected["seconds"]
        # pytest.approx does not compare lists within dictionaries.
        assert actual.pop("staleness", []) == expected.pop("staleness", [])
        assert actual == pytest.approx(expected, abs=1e-6)
    assert [row["round"] for row in rows if "accuracy" in row] == [2, 4, 5]
    assert any(row.get("staleness-max") for row in rows) == (algorithm == "fedbuff")
    assert json.loads((simulated / "summary.json").read_text())["algorithms"]


# The guide, executed as it is written


@pytest.fixture(scope="module")
def followed(home: Path, local: dict[str, str]) -> Path:
    """A folder in which the guide to algorithms has been executed."""
    follow("your-algorithm.md", home, local)
    return home


@pytest.mark.e2e
def test_the_algorithm_of_the_guide_runs_and_beats_fedavg(followed):
    summary = json.loads((followed / "results" / "summary.json").read_text())
    algorithms = summary["algorithms"]
    assert list(algorithms) == ["fedavg", "Cautious"]
    assert algorithms["Cautious"]["accuracy"] > algorithms["fedavg"]["accuracy"] + 0.2
    assert summary["config"]["caution"] == 0.7
    assert len(read_lines(followed / "results" / "Cautious" / "metrics.jsonl")) == 20


@pytest.mark.e2e
def test_simulate_from_python_gives_summary_and_rows(followed):
    # The lines before it are the progress bar.
    printed = (followed / "python.out").read_text().splitlines()[-1]
    accuracy, losses = printed.split(" ", 1)
    assert 0 < float(accuracy) <= 1
    assert len(losses.split(",")) == 5


@pytest.mark.e2e
def test_the_variants_of_the_guide_train(followed):
    def rows_of(*place: str) -> list[dict]:
        return read_lines(followed.joinpath(*place, "metrics.jsonl"))

    # The regularizer restrains the training.
    fedrep, near = (rows_of("near", n)[-1] for n in ("fedrep", "NearFedRep"))
    assert near["train-loss"] > 1.005 * fedrep["train-loss"]
    losses = [row["train-loss"] for row in rows_of("rates", "Adam")]
    assert losses[-1] < 0.9 * losses[0]
    rows = rows_of("centroids", "Centroids")
    assert all(row["centroids"] > 0 for row in rows)
    assert not any(row["rejected"] for row in rows)
    rows = rows_of("flwr-results", "Cautious")
    assert [row["clients"] for row in rows] == [5, 5, 5]
