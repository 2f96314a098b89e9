"""What the documentation says is current; the tests of the guides follow it."""

import json
import sys
from collections.abc import Iterator

import pytest

from docs import settings as settings_page
from flwr_frl import simulate
from flwr_frl.clients.device.evaluation import evaluate_model
from flwr_frl.clients.predict import load_run
from flwr_frl.task.settings import resolve
from flwr_frl.task.tasks import build_task


def test_the_page_of_settings_is_current():
    written = settings_page.PAGE.read_text(encoding="utf-8")
    assert written == settings_page.page(), "run `python -m docs.settings`"


def test_the_examples_of_a_built_in_task_are_those_of_the_run(
    monkeypatch, tmp_path, capsys
):
    more = {**SMALL, "rounds": 1, "fraction": 1.0, "output": str(tmp_path / "results")}
    simulate("fedrep", **more)
    _, about = load_run(tmp_path / "results/fedrep", "000003")
    assert about.images is not None
    text = (settings_page.PAGE.parent / "your-task.md").read_text(encoding="utf-8")
    before, _, after = text.partition("task = build_task(config")
    code = before.rpartition("```python\n")[2] + "task = build_task(config" + after
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(code.partition("```")[0], {})
    known = json.loads((tmp_path / "results/fedrep/clients.json").read_text())
    assert int(capsys.readouterr().out) == known["000003"]["num-test-examples"]


@pytest.fixture
def fedamp(monkeypatch, tmp_path) -> Iterator[str]:
    """The example of what a server keeps of each client, as it stands."""
    text = (settings_page.PAGE.parent / "your-algorithm.md").read_text(encoding="utf-8")
    start = "<!-- file: cautious/attentive.py -->\n```python\n"
    code = text.partition(start)[2].partition("```\n<!-- end -->")[0]
    (tmp_path / "attentive_example.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "attentive_example:FedAMP"
    sys.modules.pop("attentive_example", None)


SMALL = {"backend": "inline", "clients": 5, "seed": 1, "model": "mlp-2"}
SMALL |= {"evaluate_every": 1, "cohort": "off"}


def test_the_example_of_state_per_client_personalises(fedamp, tmp_path):
    more = {**SMALL, "clients": 10, "rounds": 8, "evaluate_last": 1}
    more |= {"output": str(tmp_path), "evaluate_every": 0}
    accuracy = {
        name: simulate(name, **more).summary["accuracy"]
        for name in ("fedavg", "local", fedamp)
    }
    # Cosines of the models themselves gain 0.11.
    assert accuracy[fedamp] > accuracy["fedavg"] + 0.2
    assert accuracy[fedamp] >= accuracy["local"]


def test_the_example_of_state_per_client_goes_on_with_the_same_numbers(
    fedamp, tmp_path
):
    whole = simulate(fedamp, rounds=4, output=str(tmp_path / "whole"), **SMALL)
    cut = str(tmp_path / "cut")
    simulate(fedamp, rounds=2, output=cut, **SMALL)
    resumed = simulate(fedamp, rounds=4, output=cut, resume=cut, **SMALL)
    assert [(r["train-loss"], r["loss"]) for r in resumed.rows] == [
        (r["train-loss"], r["loss"]) for r in whole.rows
    ]


def test_the_example_of_state_per_client_predicts_as_it_was_evaluated(fedamp, tmp_path):
    simulate(fedamp, rounds=3, fraction=1.0, output=str(tmp_path), **SMALL)
    known = json.loads((tmp_path / "FedAMP" / "clients.json").read_text())
    task = build_task(resolve({"task": "digits", "model": "mlp-2", "seed": 1}), 5)
    for name, said in known.items():
        classifier, _ = load_run(tmp_path / "FedAMP", name, algorithm=fedamp)
        loss, *_ = evaluate_model(task, int(name), classifier.model)
        assert loss == pytest.approx(said["loss"], rel=1e-5)
    assert len({said["loss"] for said in known.values()}) == 5
