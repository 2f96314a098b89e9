"""Predictions from table rows and lines of text equal those computed by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
from refusals import assert_says, code_of
from safetensors.torch import load_file

from flwr_frl import simulate
from flwr_frl.predict import load_run, personalize
from flwr_frl.task.tasks import build_task

TABLE = """
import torch
from typing import Annotated
from torch import nn
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel, setting

def table(num_clients, data_dir: Annotated[str, setting()] = ""):
    torch.manual_seed(1)
    x = torch.randn(12, 2)
    sets = [ExampleSet(x, x @ torch.tensor([[1.0], [i]])) for i in range(3)]
    sets = [sets[int(open(data_dir + "/mine").read())]] if num_clients == 0 else sets
    build = lambda: SplitModel(nn.Linear(2, 2, bias=False), nn.Linear(2, 1))
    return ExampleTask(build, sets, sets, nn.functional.mse_loss)
"""
ROWS = np.array([[1.0, 2.0], [-3.0, 0.5]])


@pytest.fixture
def own(write_module):
    """The name of a task defined in a custom module."""
    return write_module("tables", TABLE) + ":table"


@pytest.fixture
def table(own, tmp_path):
    """A directory with a FedRep run on the custom task."""
    more = {"backend": "inline", "output": str(tmp_path / "results"), "fraction": 1.0}
    simulate("fedrep", task=own, clients=3, rounds=2, checkpoint_every=1, **more)
    return tmp_path


def by_hand(run: Path, client: str) -> np.ndarray:
    """Return a client's outputs for the rows, from the files of the run."""
    b = load_file(run / "checkpoint.safetensors")["arrays/representation.weight"]
    head = load_file(max((run / "clients" / client).iterdir()))
    bias = head["head.bias"].numpy()
    return ROWS @ b.numpy().T @ head["head.weight"].numpy().T + bias


def test_table_rows_are_predicted_with_each_client_s_head(table, own):
    run = table / "results" / "fedrep"
    for client in ("000000", "000002"):
        expected = by_hand(run, client)
        predictor = load_run(run, client, task=own)
        for inputs in (["1.0,2.0", "-3.0,0.5"], ROWS):
            np.testing.assert_allclose(predictor(inputs).outputs, expected, rtol=1e-5)
        assert predictor(ROWS).classes == []


@pytest.mark.parametrize("algorithm", ["fedavg-ft", "fedbabu", "per-fedavg", "hf-maml"])
def test_a_simulated_client_is_fine_tuned_on_its_own_examples(algorithm, own, tmp_path):
    more = {"backend": "inline", "output": str(tmp_path), "fraction": 1.0}
    simulate(algorithm, task=own, clients=3, rounds=2, batch_size=4, **more)
    place, task = tmp_path / algorithm, build_task({"task": own}, 3)
    clients = json.loads((place / "clients.json").read_text())
    for name, metrics in clients.items():
        examples = task.test_examples(int(name))
        outputs = load_run(place, name, task=own)(examples.inputs).outputs
        loss = np.square(outputs - examples.targets.numpy()).mean()
        assert loss == pytest.approx(metrics["loss"], rel=1e-4)
    assert len({metrics["loss"] for metrics in clients.values()}) == 3


def test_a_custom_partition_must_be_named(tmp_path, write_module):
    body = "return [range(i, len(labels), num_clients) for i in range(num_clients)]"
    text = f"def in_turn(labels, num_clients, seed):\n    {body}\n"
    partition = f"{write_module('turns', text)}:in_turn"
    more = {"backend": "inline", "output": str(tmp_path), "model": "logistic"}
    more |= {"partition": partition, "clients": 3, "rounds": 1, "head_epochs": 1}
    simulate("fedavg-ft", **more, fraction=1.0)
    place = tmp_path / "fedavg-ft"
    clients = json.loads((place / "clients.json").read_text())
    examples = build_task({"task": "digits", "partition": partition}, 3).test_examples(
        1
    )
    classes, _ = load_run(place, "000001", partition=partition)(examples.inputs)
    hits = np.array(classes, int) == examples.targets.numpy()
    assert hits.mean() == pytest.approx(clients["000001"]["accuracy"], abs=1e-6)
    # Code that only a file names is not run.
    assert code_of(load_run, place, "000001") == "partition"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1,2,3", "'1,2,3' cannot be predicted from: "),
        ("nan,2", "'nan,2' cannot be predicted from: the model's output is not"),
        ("a,b", "'a,b' cannot be predicted from: could not convert string to"),
    ],
)
def test_an_invalid_line_is_named_in_the_error(table, own, text, line):
    predictor = load_run(table / "results" / "fedrep", "000000", task=own)
    assert_says(line, predictor, text)


def test_a_custom_task_must_be_named(table, own, tmp_path):
    (tmp_path / "mine").write_text("2")
    run = table / "results" / "fedrep"
    assert code_of(personalize, run, tmp_path, "late") == "task"
    personalize(run, tmp_path, "late", task=own)
    predictor = load_run(run, "late", data_dir=tmp_path, task=own)
    np.testing.assert_allclose(predictor(ROWS).outputs, by_hand(run, "late"), rtol=1e-4)


@pytest.mark.parametrize("suffix", ["txt", "csv"])
def test_lines_of_text_are_predicted(tmp_path, suffix):
    lines = {
        "txt": "abcabcabcabc" * 4,
        "csv": "label,text\n" + "größer,it rises\nC:\\x,it falls\n" * 10,
    }
    for client in ("anna", "bob"):
        (tmp_path / f"{client}.{suffix}").write_text(lines[suffix], "utf-8")
    more = {"task": "text-folder", "data_dir": str(tmp_path), "clients": 2, "rounds": 6}
    more |= {"sequence_length": 3, "lstm_width": 8, "learning_rate": 0.5}
    more |= {"momentum": 0.9, "representation_epochs": 5, "fraction": 1.0}
    simulate("fedavg", "inline", output=str(tmp_path / "results"), **more)
    asked = {"txt": ["xxab", "bc"], "csv": ["it rises", "it falls\t "]}
    expected = {"txt": ["c", "a"], "csv": ["größer", "C:\\x"]}
    predictor = load_run(tmp_path / "results" / "fedavg", data_dir=tmp_path)
    classes, probabilities = predictor(asked[suffix])
    assert classes == expected[suffix]
    assert (probabilities.max(1) > 0.5).all()
