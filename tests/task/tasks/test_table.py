"""The task ``table``: columns, standardisation, missing numbers, windows, numbers."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from command_line import rows_of, run
from named_tasks import task_of
from pandas import DataFrame
from pyarrow import parquet
from refusals import code_of, refusal

from flwr_frl.predict import load_model, load_run, personalize
from flwr_frl.task.tasks.table import of_client

PEOPLE, EACH = 4, 20


def write(path: Path, columns: dict[str, list], separator: str = ",") -> Path:
    """Write a CSV file; None is an empty cell."""
    cells = (
        ["" if c is None else str(c) for c in row]
        for row in zip(*columns.values(), strict=True)
    )
    lines = [separator.join(row) for row in ([*columns], *cells)]
    path.write_text("\n".join(lines))
    return path


def people(people: int = PEOPLE, each: int = EACH) -> dict[str, list]:
    """Return columns whose label depends on the person; ``age`` is a thousandfold."""
    rng = np.random.default_rng(people)
    person = np.tile(np.arange(people), each)
    x = rng.standard_normal((len(person), 2))
    active = x[:, 0] * np.where(person % 2, 1, -1) > 0
    return {
        "row": list(range(len(person))),
        "person": [f"p{i}" for i in person],
        "heart": x[:, 0].round(4).tolist(),
        "age": (1000 * x[:, 1]).round(1).tolist(),
        "fixed": [7] * len(person),
        "activity": [("rest", "run")[int(a)] for a in active],
    }


@pytest.fixture
def built(tmp_path):
    """Return a function that builds the task of a path."""

    def build(path: Path, clients: int = PEOPLE, **settings):
        return task_of(
            "table",
            clients,
            data_dir=str(path),
            cache_dir=str(tmp_path / "cache"),
            **{"label_column": "activity", **settings},
        )

    return build


def inputs_of(task, clients=range(PEOPLE)) -> np.ndarray:
    return torch.cat([task.train_examples(i).inputs for i in clients]).numpy()


def test_columns_that_no_setting_names_are_found_and_reported(tmp_path, built):
    task = built(write(tmp_path / "people.csv", people()))
    assert task.client_names == ("p0", "p1", "p2", "p3")
    assert task.classes == ("rest", "run")
    assert task.columns == ("heart", "age", "fixed")
    assert "from heart, age, fixed; not used: row;" in task.notes[0]
    assert "the 4 of 'person'" in task.notes[0]


@pytest.mark.parametrize("form", ["semicolons", "tabs", "parquet"])
def test_files_of_other_forms_have_the_same_examples(tmp_path, built, form):
    expected = built(write(tmp_path / "people.csv", people()))
    path = tmp_path / f"{form}.{'tsv' if form == 'tabs' else 'csv'}"
    if form == "parquet":
        path = tmp_path / "people.parquet"
        parquet.write_table(pa.table(people()), path)
    else:
        write(path, people(), separator={"semicolons": ";", "tabs": "\t"}[form])
    task = built(path)
    np.testing.assert_array_equal(inputs_of(task), inputs_of(expected))


def test_each_file_of_a_folder_is_a_client(tmp_path, built):
    columns = people()
    (tmp_path / "folder").mkdir()
    for name in ("ann", "bob"):
        write(tmp_path / "folder" / f"{name}.csv", {**columns, "person": [1] * 80})
    task = built(tmp_path / "folder", 2, input_columns="heart,age")
    assert task.client_names == ("ann", "bob")
    assert len(task.train_examples(0)) + len(task.test_examples(0)) == 80


def test_a_split_by_time_holds_out_the_last_rows_of_each_client(tmp_path, built):
    columns = {**people(), "t": list(range(PEOPLE * EACH))}
    path = write(tmp_path / "people.csv", columns)
    task = built(path, split="time", input_columns="t", standardize="none")
    for client in range(PEOPLE):
        rows = list(range(client, PEOPLE * EACH, PEOPLE))
        assert task.train_examples(client).inputs[:, 0].tolist() == rows[:16]
        assert task.test_examples(client).inputs[:, 0].tolist() == rows[16:]


# Standardisation


def test_columns_have_mean_0_and_deviation_1_in_the_training_data_of_all(
    tmp_path, built
):
    path = write(tmp_path / "people.csv", people())
    raw, task = built(path, standardize="none"), built(path)
    x = inputs_of(raw).astype(np.float64)
    expected = (x - x.mean(0)) / np.where(x.std(0) == 0, np.inf, x.std(0))
    np.testing.assert_allclose(inputs_of(task), expected, atol=1e-5)
    test = task.test_examples(0).inputs.numpy()[:, :2]
    x, of_test = x[:, :2], raw.test_examples(0).inputs.numpy()[:, :2]
    np.testing.assert_allclose(test, (of_test - x.mean(0)) / x.std(0), atol=1e-5)


@pytest.mark.parametrize("clients", [PEOPLE, 0])
def test_columns_are_standardised_for_each_client_and_on_each_device(
    tmp_path, built, clients
):
    path = write(tmp_path / "people.csv", people())
    # A device knows its own data only.
    task = built(path, clients, standardize="client" if clients else "global")
    for i in range(clients or 1):
        x = inputs_of(task, [i])
        np.testing.assert_allclose(x.mean(0), 0, atol=1e-6)
        np.testing.assert_allclose(x.std(0), [1, 1, 0], atol=1e-6)


def test_a_column_that_varies_in_the_test_data_only_has_no_effect(tmp_path, built):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.csv", people())
    other = {**people(), "fixed": [-9] * PEOPLE * EACH}
    write(tmp_path / "data" / "test.csv", other)
    test = built(tmp_path / "data").test_examples(0).inputs
    assert not test[:, 2].any()


def test_missing_numbers_are_an_error_that_names_them_or_become_the_mean(
    tmp_path, built
):
    columns = people()
    path = tmp_path / "people.csv"
    write(path, {**columns, "age": [1.0, "?", None, *columns["age"][3:]]})
    error = refusal(built, path)
    assert error.code == "missing"
    assert "'age' has no finite number in row 2 of 'people.csv'" in str(error)
    task = built(path, missing="mean")
    x = np.concatenate(
        [inputs_of(task), *(task.test_examples(i).inputs for i in range(4))]
    )
    assert (x[:, 1] == 0).sum() == 2


def test_a_text_among_numbers_is_an_error_that_names_it(tmp_path, built):
    columns = people()
    age = [*columns["age"][:2], "n/a?", *columns["age"][3:]]
    path = write(tmp_path / "people.csv", {**columns, "age": age})
    error = refusal(built, path)
    assert error.code == "input-columns"
    assert "'age' has 'n/a?' in row 3 of 'people.csv'" in str(error)
    assert built(path, input_columns="heart").columns == ("heart",)


def test_the_default_model_has_a_head_of_one_layer(tmp_path, built):
    # Two layers are the default of LG-FedAvg.
    task = built(write(tmp_path / "people.csv", people()), head_layers=2)
    assert [*task.initial_model().head.state_dict()] == ["weight", "bias"]


# Labels


def numbers() -> dict[str, list]:
    columns = people()
    columns["score"] = [50 + 3 * h for h in columns["heart"]]
    return columns


def test_a_label_of_many_numbers_is_predicted_as_a_number(tmp_path, built):
    path = write(tmp_path / "people.csv", numbers())
    task = built(path, label_column="score", input_columns="heart")
    assert task.classes == ()
    assert "'score' is predicted as a number" in task.notes[0]
    y = torch.cat([task.train_examples(i).targets for i in range(PEOPLE)])
    assert y.shape == (len(y), 1)
    assert y.mean() == pytest.approx(0, abs=1e-6)
    assert y.std(correction=0) == pytest.approx(1, abs=1e-6)
    # The same numbers up to a factor, so their standardised values agree.
    torch.testing.assert_close(y[:, 0], torch.tensor(inputs_of(task)[:, 0]))
    outputs, targets = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [3.0]])
    assert task.metrics["r2"](outputs, targets) == 1 - (1 + 4) / 2
    unit = task.scaling(0).label_std
    assert task.metrics["rmse"](outputs, targets) == pytest.approx(unit * 2.5**0.5)


def test_whole_numbers_are_classes_up_to_a_number_that_a_setting_overrules(
    tmp_path, built
):
    path = write(tmp_path / "people.csv", {**people(), "level": [10, 2] * 40})
    assert built(path, label_column="level").classes == ("2", "10")
    assert not built(path, label_column="level", label_type="number").classes
    write(path, {**people(), "level": [i // 2 for i in range(80)]})
    assert len(built(path, label_column="level", label_type="class").classes) == 40


# Windows


def test_windows_have_one_client_and_class_and_share_no_row_with_the_test(
    tmp_path, built
):
    # Two people whose rows alternate; the activity changes after 12 rows of each.
    t = [i // 2 for i in range(60)]
    columns = {
        "person": [f"p{i % 2}" for i in range(60)],
        "t": t,
        "activity": ["sit" if i < 12 else "run" for i in t],
    }
    path = write(tmp_path / "series.csv", columns)
    task = built(path, 2, window=3, stride=2, input_columns="t", standardize="none")
    for client in range(2):
        train, test = task.train_examples(client), task.test_examples(client)
        # A fifth of 12 rows is less than a window, so 9 to 11 are for testing; of 18
        # rows, 3 are a fifth.
        starts = [0, 2, 4, 6, 12, 14, 16, 18, 20, 22, 24]
        assert train.inputs[:, 0, 0].tolist() == starts
        assert train.inputs[1].tolist() == [[2, 3, 4]]
        assert test.inputs[:, 0].tolist() == [[9, 10, 11], [27, 28, 29]]
        assert [task.classes[int(c)] for c in test.targets] == ["sit", "run"]
    assert task.overlap == 1
    # A trained model is used on windows of one client or of all.
    alone = [place for place, _ in of_client(task, 1, "p1").rows(path)]
    starts = range(0, 28, 2)
    assert alone == [f"{path}:{2 * start + 2}" for start in starts]
    assert len([*task.rows(path)]) == 2 * len(starts)
    assert code_of(built, path, 2, window=10, input_columns="t") == "window"


# Bad input


@pytest.mark.parametrize(
    ("changes", "settings", "code"),
    [
        ({}, {"client_column": "fixed"}, "client-column"),
        ({}, {"client_column": "row"}, "client-column"),
        ({}, {"client_column": "town"}, "client-column"),
        ({"activity": [f"note {i}" for i in range(80)]}, {}, "label-column"),
        ({"activity": ["run", None] * 40}, {}, "label-column"),
        ({"activity": [1] * 80}, {"label_type": "number"}, "label-column"),
        ({}, {"label_type": "number"}, "label-type"),
        ({}, {"label_column": "mood"}, "label-column"),
        ({"age": ["old"] * 80}, {"input_columns": "age"}, "input-columns"),
        ({"heart": ["inf"] * 80}, {"missing": "mean"}, "missing"),
        ({}, {"clients": 5}, "num-clients"),
        ({}, {"model": "cnn-1d"}, "window"),
        ({}, {"secure_aggregation": True}, "standardize"),
    ],
)
def test_invalid_columns_are_a_one_line_error(tmp_path, built, changes, settings, code):
    path = write(tmp_path / "people.csv", {**people(), **changes})
    assert code_of(lambda: built(path, **settings).initial_state) == code


def test_a_wrong_name_of_an_input_is_named_with_the_nearest_column(tmp_path, built):
    path = write(tmp_path / "people.csv", people())
    error = refusal(built, path, input_columns="age,hart")
    assert "'hart'; did you mean 'heart'? known: age, fixed, heart" in str(error)


# Runs and trained models


def test_a_table_needs_two_settings_and_its_model_reads_the_same_file(tmp_path, caplog):
    path = write(tmp_path / "people.csv", people(6, 60))
    named = {"label_column": "activity", "cache_dir": str(tmp_path / "cache")}
    named |= {"learning_rate": 0.1, "checkpoint_every": 5}
    flags = ("--task", "table", "--data-dir", str(path), "--rounds", "5")
    out = tmp_path / "out"
    assert run(out, "fedavg", "fedrep", *flags, **named) == 0
    assert rows_of(out, "fedrep")[-1]["clients"] == 3
    entries = json.loads((out / "summary.json").read_text())["algorithms"]
    # The sign of the label differs between people.
    assert entries["fedrep"]["accuracy"] > 0.85 > 0.7 > entries["fedavg"]["accuracy"]
    # The state of a client is enough to use its model, without its data.
    predictor = load_run(out / "fedrep", "p1")
    # The file has several people; only this one's rows are predicted.
    classes, _ = predictor(path)
    own = slice(1, None, 6)
    columns = {name: cells[own] for name, cells in people(6, 60).items()}
    assert np.mean(np.array(classes) == columns["activity"]) > 0.85
    rows = np.column_stack([columns[c] for c in predictor.task.columns])
    # Data frames have named columns, in any order.
    frame = DataFrame(columns)[["person", "activity", *predictor.task.columns[::-1]]]
    for same in (rows.astype(np.float32), rows.tolist(), frame):
        assert predictor(same).classes == classes
    for wrong in ([[1.0], [1.0, 2.0]], [[None]], frame.assign(heart="fast")):
        assert code_of(predictor, wrong) in ("inputs", "input-columns")
    assert code_of(predictor, frame.assign(person="p2")) == "client-name"
    assert predictor(rows[:1]).classes == classes[:1]
    predictor.export(tmp_path / "model.safetensors")
    assert load_model(tmp_path / "model.safetensors")(path).classes == classes
    lacking = write(tmp_path / "few.csv", {"heart": [1.0]})
    assert code_of(predictor, lacking) == "columns"
    lacking.write_text("heart,age\n1,2,3,4")
    assert code_of(predictor, lacking) == "file"
    # The scaling of all people belongs to the global model.
    data = {"data_dir": path, "cache_dir": named["cache_dir"]}
    named_one, of_all = (load_run(out / "fedavg", name, **data) for name in ("p1", ""))
    assert np.array_equal(named_one(path).outputs, of_all(path).outputs[own])
    # A person who comes later
    new = {name: cells for name, cells in columns.items() if name != "person"}
    file = write(tmp_path / "new.csv", new)
    fitted = personalize(out / "fedrep", file, "eve", cache_dir=named["cache_dir"])
    assert fitted.metrics["accuracy"] > 0.7
    # A run that is resumed on a changed file may have other examples.
    write(path, people(6, 61))
    named |= {"resume": str(out), "num_server_rounds": 6}
    assert run(out, "fedrep", *flags[:4], **named) == 0
    assert "may have other examples than before" in caplog.text


def test_numbers_are_predicted_in_their_unit(tmp_path):
    path = write(tmp_path / "people.csv", numbers())
    named = {"label_column": "score", "cache_dir": str(tmp_path / "cache")}
    named |= {"input_columns": "heart", "checkpoint_every": 5, "learning_rate": 0.1}
    flags = ("--task", "table", "--data-dir", str(path), "--rounds", "10")
    assert run(tmp_path / "out", "fedrep", *flags, **named) == 0
    # Without the column of people, all rows are predicted.
    rows = DataFrame(numbers()).drop(columns="person")
    data = {"data_dir": path, "cache_dir": named["cache_dir"]}
    predictor = load_run(tmp_path / "out" / "fedrep", "p0", **data)
    predicted = predictor(rows).outputs[:, 0]
    error = predicted - np.array(numbers()["score"])
    # In another unit, the error is about the scores' mean of 50.
    assert np.sqrt(np.mean(error**2)) < np.std(numbers()["score"])
