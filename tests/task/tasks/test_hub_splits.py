"""Classes, clients and held-out examples of Hugging Face data sets and tables."""

from pathlib import Path

import pytest
import torch
from hub_data import by_column, task_of
from refusals import code_of, refusal

from flwr_frl.common.settings import resolve
from flwr_frl.task.tasks import build_task

pytestmark = pytest.mark.e2e

A = range(20)


def save(folder: Path, **names_of: dict[str, list[str]]) -> None:
    """Save splits of ten examples; the arguments have the class names of the columns.

    The class of an example is x. The other columns have the class 0.
    """
    import datasets

    splits = datasets.DatasetDict()
    for part, names in names_of.items():
        labels = [names["label"].index(name) for name in ("cat", "dog")] * 5
        zeros = {column: [0] * 10 for column in names}
        columns = {**zeros, "x": [[0.0], [1.0]] * 5, "label": labels}
        kinds = {n: datasets.ClassLabel(names=listed) for n, listed in names.items()}
        kinds["x"] = datasets.Sequence(datasets.Value("float32"))
        features = datasets.Features(kinds)
        splits[part] = datasets.Dataset.from_dict(columns, features=features)
    splits.save_to_disk(folder)


def write_table(path: Path, header: str, rows: list[str]) -> None:
    path.write_text("\n".join([header, *rows]))


def test_parts_have_the_same_classes_in_the_same_order(tmp_path):
    train = {"label": ["cat", "dog"]}
    save(tmp_path / "animals", train=train, test=train)
    before = sorted(tmp_path.rglob("*"))
    task = task_of(tmp_path, "animals", 0, tmp_path.parent / "elsewhere")
    for examples in task.train_examples(0), task.test_examples(0):
        assert examples.targets.tolist() == examples.inputs[:, 0].int().tolist()
    # Nothing is written into the user's folder.
    assert sorted(tmp_path.rglob("*")) == before
    for i, names in enumerate((["dog", "cat"], ["bird", "cat", "dog"])):
        save(tmp_path / f"others-{i}", train=train, test={"label": names})
        assert code_of(task_of, tmp_path, f"others-{i}", 0) == "label-column"


def test_other_columns_of_the_test_split_may_have_other_classes(tmp_path):
    label = ["cat", "dog"]
    train, test = {"writer": ["w1", "w2"]}, {"writer": ["w3"]}
    parts = {"train": {**train, "label": label}, "test": {**test, "label": label}}
    save(tmp_path / "written", **parts)
    task = task_of(tmp_path, "written", 0, label_column="label")
    assert len(task.test_examples(0)) == 10


def test_clients_of_a_table_have_the_names_in_its_column(tmp_path):
    rows = [f"{i % 7}.5,{i % 3},{10 + i % 3},{'ab'[i % 2]}" for i in range(60)]
    write_table(tmp_path / "rows.csv", "size,ward,hospital,label", rows)
    named = {"input_columns": "*", **by_column("hospital")}
    task = task_of(tmp_path, "rows.csv", 3, **named)
    assert task.client_names == ("10", "11", "12")
    for client in range(3):
        # The column of the clients is no input.
        inputs = task.train_examples(client).first(1)
        assert inputs.shape == (1, 2)
        assert inputs[0, 1] == client
        # A fifth of each client's 20 rows
        assert len(task.train_examples(client)) == 16
        assert len(task.test_examples(client)) == 4
    assert task.notes[-1] == "the inputs are size, ward, without hospital"


def test_small_clients_share_the_held_out_examples(tmp_path):
    rows = [f"{i}.5,{i // 2},{'ab'[i % 2]}" for i in range(40)]
    write_table(tmp_path / "rows.csv", "size,client,label", rows)
    named = {"input_columns": "*", **by_column("client")}
    task = task_of(tmp_path, "rows.csv", 20, **named)
    tested = [len(task.test_examples(i)) for i in range(20)]
    # A fifth of 40 examples, of which no client can lose more than one
    assert sorted(tested) == [0] * 12 + [1] * 8


def test_a_column_that_names_no_clients_is_an_input(tmp_path):
    rows = [f"{i % 7}.5,{i % 3},{'ab'[i % 2]}" for i in range(60)]
    write_table(tmp_path / "rows.csv", "size,ward,label", rows)
    unused = {"partitioner-arguments": "partition_by=ward"}
    task = task_of(tmp_path, "rows.csv", 3, input_columns="*", **unused)
    assert task.train_examples(0).inputs.shape[1] == 2


def test_spellings_of_a_label_are_one_class(tmp_path):
    labels = ["none", "1", "1.0", " 1 "]
    rows = [f"{i % 4}.5,{labels[i % 4]}" for i in range(40)]
    write_table(tmp_path / "rows.csv", "x,label", rows)
    task = task_of(tmp_path, "rows.csv", 0, input_columns="x")
    assert task.classes == ("1", "none")
    # Without strings the classes are counted, and those without examples are named.
    write_table(tmp_path / "odd.csv", "x,label", [f"{i},{(1, 3)[i % 2]}" for i in A])
    odd = task_of(tmp_path, "odd.csv", 2, input_columns="x")
    assert odd.notes[-1] == "2 of the 4 classes have no examples"
    for examples in task.train_examples(0), task.test_examples(0):
        is_none = examples.inputs[:, 0] == 0.5
        assert torch.equal(examples.targets, is_none.long())


def test_the_error_of_a_name_says_that_it_is_no_local_path(tmp_path, monkeypatch):
    import datasets

    def unreachable(*given, **named):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    given = resolve({"task": "hf:patiens", "cache-dir": str(tmp_path)})
    error = str(refusal(build_task, given, 2))
    assert error.startswith("the data set 'patiens' (not a local path) cannot be loade")
