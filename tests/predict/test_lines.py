"""Predictions from table rows and lines of text equal those computed by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import one_error
from refusals import assert_says
from safetensors.torch import load_file

from flwr_frl import simulate
from flwr_frl.predict import export, load_model, load_run, predict
from flwr_frl.predict.__main__ import main
from flwr_frl.predict.personalize.__main__ import main as personalize
from flwr_frl.task.training import evaluate

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


@pytest.fixture
def own(write_module):
    """The name of a task defined in a custom module."""
    return write_module("tables", TABLE) + ":table"


@pytest.fixture
def table(own, tmp_path):
    """A directory with a FedRep run on the custom task, and a file of rows."""
    (tmp_path / "rows.csv").write_text("1.0,2.0\n\n-3.0, 0.5\n")
    more = {"backend": "inline", "output": str(tmp_path / "results"), "fraction": 1.0}
    simulate("fedrep", task=own, clients=3, rounds=2, checkpoint_every=1, **more)
    return tmp_path


def by_hand(folder: Path, client: str) -> list[float]:
    """Return a client's outputs for the two rows, from the files of the run."""
    shared = load_file(folder / "results" / "fedrep" / "checkpoint.safetensors")
    b = shared["arrays/representation.weight"].numpy()
    states = folder / "results" / "fedrep" / "clients" / client
    head = load_file(max(states.iterdir()))
    rows = np.array([[1.0, 2.0], [-3.0, 0.5]])
    return (rows @ b.T @ head["head.weight"].numpy().T + head["head.bias"].numpy())[
        :, 0
    ].tolist()


def test_table_rows_are_predicted_with_each_client_s_head(table, own, capsys):
    capsys.readouterr()
    checkpoint = ["--checkpoint", str(table / "results" / "fedrep"), "--task", own]
    rows = str(table / "rows.csv")
    predictions = {}
    for client in ("000000", "000002"):
        assert main([rows, *checkpoint, "--client-name", client]) == 0
        lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
        assert [place for place, _ in lines] == [f"{rows}:1", f"{rows}:3"]
        predictions[client] = [float(value) for _, value in lines]
        assert predictions[client] == pytest.approx(by_hand(table, client), rel=1e-4)
    assert predictions["000000"] != predictions["000002"]


@pytest.mark.parametrize("algorithm", ["fedavg-ft", "fedbabu", "per-fedavg", "hf-maml"])
def test_a_simulated_client_is_fine_tuned_on_its_own_examples(algorithm, own, tmp_path):
    more = {"backend": "inline", "output": str(tmp_path), "fraction": 1.0}
    simulate(algorithm, task=own, clients=3, rounds=2, batch_size=4, **more)
    place = tmp_path / algorithm
    clients = json.loads((place / "clients.json").read_text())
    for name, metrics in clients.items():
        model, card = load_run(place, name, task=own)
        examples = card.task.test_examples(int(name))
        with torch.no_grad():
            outputs = model(examples.inputs)
        loss = torch.nn.functional.mse_loss(outputs, examples.targets).item()
        assert loss == pytest.approx(metrics["loss"], rel=1e-4)
    assert len({metrics["loss"] for metrics in clients.values()}) == 3


DIGITS = """
from flwr_frl.task import ImageTask

class Digits(ImageTask):
    def __init__(self, settings, num_clients):
        super().__init__("digits", settings, num_clients)

    def initial_model(self):
        return super().initial_model()
"""
IID = "flwr_datasets.partitioner:IidPartitioner"


@pytest.mark.parametrize("algorithm", ["fedrep", "fedavg-ft"])
def test_a_custom_partition_must_be_named_by_the_user(
    algorithm, write_module, tmp_path
):
    task = write_module("own_digits", DIGITS) + ":Digits"
    more = {"backend": "inline", "output": str(tmp_path), "model": "logistic"}
    more |= {"partition": IID, "clients": 3, "rounds": 1, "task": task}
    simulate(algorithm, **more, fraction=1.0, head_epochs=1)
    place = tmp_path / algorithm
    clients = json.loads((place / "clients.json").read_text())
    for name, metrics in clients.items():
        model, card = load_run(place, name, task=task, partition=IID)
        _, accuracy = evaluate(
            model, card.task.test_examples(int(name)), card.task.loss
        )
        assert accuracy == pytest.approx(metrics["accuracy"], abs=1e-6)
    # Otherwise the clients' examples are refused: code that files name is not run.
    read = lambda: load_run(place, "000001", task=task)[1].task.test_examples(1)  # noqa: E731
    assert_says("clients' examples were split by ", read)
    call = (load_run, place, "000001")
    line = "partition is 'os:path'; expected that"
    assert_says(line, *call, task=task, partition="os:path")


def test_an_exported_model_predicts_the_same(table, own, capsys):
    model, card = load_run(table / "results" / "fedrep", "000001", task=own)
    for suffix in ("safetensors", "pt2"):
        export(model, card, table / f"model.{suffix}")
    again = load_model(table / "model.safetensors", own)
    files = [table / "rows.csv"]
    assert list(predict(*again, files)) == list(predict(model, card, files))
    program = torch.export.load(table / "model.pt2").module()
    rows = torch.tensor([[1.0, 2.0], [-3.0, 0.5], [0.0, 1.0]])
    torch.testing.assert_close(program(rows), model(rows))


def test_a_device_predicts_with_its_data_dir(table, own):
    (table / "mine").write_text("2")
    place = table / "results" / "fedrep"
    model, card = load_run(place, "000002", data_dir=str(table), task=own)
    assert card.num_clients == 0
    ((_, one), (_, two)) = predict(model, card, [table / "rows.csv"])
    assert [float(one), float(two)] == pytest.approx(by_hand(table, "000002"), rel=1e-4)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1,2\n1,2,3\n", "x.csv:2 cannot be predicted from: "),
        ("\n \n", "x.csv' has nothing to predict from"),
        ("nan,2\n", "x.csv:1 cannot be predicted from: the model's output is not"),
        ("a,b\n", "x.csv:1 cannot be predicted from: could not convert string to"),
        (b"\xff\xfe", "x.csv' cannot be read: 'utf-8' codec"),
    ],
)
def test_an_invalid_line_gives_a_one_line_error(table, own, capsys, text, line):
    path = table / "x.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    checkpoint = ["--checkpoint", str(table / "results" / "fedrep"), "--task", own]
    assert main([str(path), *checkpoint, "--client-name", "000000"]) == 2
    assert line in one_error(capsys.readouterr().err)


def test_personalize_needs_the_name_of_a_custom_task(table, own, tmp_path, capsys):
    (tmp_path / "mine").write_text("2")
    arguments = ["--checkpoint", str(table / "results" / "fedrep")]
    arguments += ["--client-name", "late", "--data-dir", str(tmp_path)]
    assert personalize(arguments) == 2
    assert "run only where you name it" in capsys.readouterr().err
    assert personalize([*arguments, "--task", own]) == 0
    assert f"--task {own}" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["txt", "tsv"])
def test_lines_of_text_are_predicted(tmp_path, capsys, suffix):
    lines = {
        "txt": "abcabcabcabc" * 4,
        "tsv": "größer\tit rises\nC:\\x\tit falls\n" * 10,
    }
    for client in ("anna", "bob"):
        (tmp_path / f"{client}.{suffix}").write_text(lines[suffix], "utf-8")
    more = {"task": "text-folder", "data_dir": str(tmp_path), "clients": 2, "rounds": 6}
    more |= {"sequence_length": 3, "lstm_width": 8, "learning_rate": 0.5}
    more |= {"momentum": 0.9, "representation_epochs": 5, "fraction": 1.0}
    simulate("fedavg", "inline", output=str(tmp_path / "results"), **more)
    # A class before the text is left out, and other tabs are part of it.
    asked = {"txt": "xxab\nbc\n", "tsv": "it rises\nC:\\x\tit falls\t \n"}
    expected = {"txt": ["c", "a"], "tsv": ["größer", "C:\\x"]}
    (tmp_path / "asked").write_text(asked[suffix])
    checkpoint = ["--checkpoint", str(tmp_path / "results" / "fedavg")]
    checkpoint += ["--data-dir", str(tmp_path)]
    capsys.readouterr()
    assert main([str(tmp_path / "asked"), *checkpoint]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [name for _, name, _ in rows] == expected[suffix]
    assert all(0.5 < float(probability) <= 1 for *_, probability in rows)


def test_rows_of_the_linear_task_are_predicted(tmp_path):
    # The prediction is y = wᵀ Bᵀ x, with B and w from the files of the run.
    more = {"backend": "inline", "output": str(tmp_path)}
    simulate(
        "fedrep",
        **{"task": "linear", "dimension": 2, "rank": 1, "clients": 3, "rounds": 2},
        **{"initial_nodes": 2, "checkpoint_every": 1, "fraction": 1.0, **more},
    )
    (tmp_path / "row.csv").write_text("3,-1\n")
    model, card = load_run(tmp_path / "fedrep", "000001")
    ((_, value),) = predict(model, card, [tmp_path / "row.csv"])
    shared = load_file(tmp_path / "fedrep" / "checkpoint.safetensors")
    head = load_file(max((tmp_path / "fedrep" / "clients" / "000001").iterdir()))
    b, w = shared["arrays/representation.weight"], head["head.weight"]
    expected = (w @ b @ torch.tensor([3.0, -1.0], dtype=b.dtype)).item()
    assert float(value) == pytest.approx(expected, rel=1e-4)
