"""The guide to custom algorithms, executed as it is written."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from federation import local_flower, read_lines
from guides import follow


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the guide to algorithms has been executed."""
    home = tmp_path_factory.mktemp("cautious")
    with local_flower(home / ".flwr") as environment:
        follow("your-algorithm.md", home, environment)
        yield home


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
def test_the_regularizer_of_the_variant_restrains_the_training(followed):
    results = followed / "near"
    fedrep, near = (
        read_lines(results / name / "metrics.jsonl")[-1]["train-loss"]
        for name in ("fedrep", "NearFedRep")
    )
    assert near > 1.005 * fedrep


@pytest.mark.e2e
def test_another_optimizer_learns(followed):
    rows = read_lines(followed / "rates" / "Adam" / "metrics.jsonl")
    losses = [row["train-loss"] for row in rows]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.e2e
def test_additional_uploads_are_in_the_rows(followed):
    rows = read_lines(followed / "centroids" / "Centroids" / "metrics.jsonl")
    assert all(row["centroids"] > 0 for row in rows)
    assert not any(row["rejected"] for row in rows)


@pytest.mark.e2e
def test_all_five_clients_train_with_flwr_run(followed):
    rows = read_lines(followed / "flwr-results" / "Cautious" / "metrics.jsonl")
    assert [row["clients"] for row in rows] == [5, 5, 5]
