"""The guide to custom tasks, executed as it is written."""

import json
import os
from pathlib import Path

import pytest
from federation import BIN
from guides import follow


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the guide to tasks has been executed."""
    home = tmp_path_factory.mktemp("tasks")
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    follow(
        "your-task.md", home, {**environment, "XDG_CACHE_HOME": str(home / ".cache")}
    )
    return home


def final(home: Path) -> dict[str, dict]:
    return json.loads((home / "summary.json").read_text())["algorithms"]


@pytest.mark.e2e
def test_personal_heads_beat_one_model_for_all_greenhouses(own_tasks):
    algorithms = final(own_tasks / "results")
    assert algorithms["fedrep"]["near"] > 2 * algorithms["fedavg"]["near"]
    assert algorithms["fedrep"]["loss"] < algorithms["fedavg"]["loss"] / 3
    assert "near" in (own_tasks / "run: tables.out").read_text()


@pytest.mark.e2e
def test_a_custom_model_learns_built_in_data(own_tasks):
    home = own_tasks / "digits-results"
    config = json.loads((home / "summary.json").read_text())["config"]
    assert config["task"] == "mine.digits:OnDigits"
    assert final(home)["fedrep"]["accuracy"] > 0.6


@pytest.mark.e2e
def test_personal_heads_predict_texts_better_than_a_global_model(own_tasks):
    algorithms = final(own_tasks / "texts")
    assert algorithms["fedrep"]["accuracy"] > algorithms["fedavg"]["accuracy"] + 0.03
    # Always predicting the most frequent of 27 letters has an accuracy of 1/6.
    assert algorithms["fedavg"]["accuracy"] > 0.5


@pytest.mark.e2e
def test_a_hugging_face_data_set_is_split_by_writers_and_learned(own_tasks):
    home = own_tasks / "letters-results"
    clients = json.loads((home / "fedrep" / "clients.json").read_text())
    # The 1,797 digits are assigned to six writers in turn.
    counts = [c["num-examples"] + c["num-test-examples"] for c in clients.values()]
    assert sorted(counts) == [299, 299, 299, 300, 300, 300]
    for result in final(home).values():
        assert result["accuracy"] > 0.7


@pytest.mark.e2e
def test_twenty_photos_are_enough_with_a_backbone(own_tasks):
    algorithms = final(own_tasks / "photos-results")
    # Each client has photos of five places: the chance level is 20 %.
    assert algorithms["fedrep"]["accuracy"] > 0.4
    assert algorithms["fedrep"]["accuracy"] > algorithms["fedavg"]["accuracy"] + 0.2
