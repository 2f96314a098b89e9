"""Folders and data sets of Hugging Face, with the real libraries."""

import socket
from pathlib import Path
from threading import Thread

import named_tasks
import numpy as np
import pyarrow as pa
import pytest
import torch
from command_line import rows_of, run
from flwr.app import Context, RecordDict
from PIL import Image
from pyarrow import parquet
from refusals import code_of

from flwr_frl.clients.algorithms import client_setup
from flwr_frl.clients.device.setup import build_client
from flwr_frl.common.settings import resolve
from flwr_frl.task.tasks import build_task
from flwr_frl.task.tasks.image import ImageTask

WRITERS, EACH = 4, 10
BY_WRITER = {"client_column": "writer_id"}


def task_of(home: Path, name: str, num_clients: int, cache: Path | None = None, **own):
    """Return the task of a folder or file in ``home``."""
    place = {"cache-dir": str(cache or home / "cache"), "data-dir": str(home / name)}
    fixed = {"partition": "iid", "standardize": "none"}
    named = {**fixed, **place, **named_tasks.dashed(own)}
    return named_tasks.task_of("table", num_clients, **named)


def letter(writer: int, number: int) -> np.ndarray:
    """Return an image that encodes its writer and number."""
    pixels = np.zeros((16, 16), np.uint8)
    pixels[0, :2] = writer, number
    return pixels


def letters():
    """Return a data set like FEMNIST: no test split, and a column of writers."""
    import datasets

    pairs = [(w, i) for i in range(EACH) for w in range(WRITERS)]
    columns = {
        "image": [Image.fromarray(letter(*pair)) for pair in pairs],
        "writer_id": [f"f{w:02d}" for w, _ in pairs],
        "character": [i % 3 for _, i in pairs],
    }
    kinds = {"image": datasets.Image(), "writer_id": datasets.Value("string")}
    kinds["character"] = datasets.ClassLabel(names=["a", "b", "c"])
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with data in all supported forms."""
    root = tmp_path_factory.mktemp("hub")
    letters().save_to_disk(root / "saved")
    rng = np.random.default_rng(0)
    lines = ["width,height,place,kind"]
    for i in range(120):
        kind = i % 2
        x, y = rng.normal(3 * kind, 0.5, 2).round(3)
        lines.append(f"{x},{y},p{i % 3},{('low', 'high')[kind]}")
    (root / "table").mkdir()
    (root / "table" / "rows.csv").write_text("\n".join(lines))
    # A format that can link to other files
    (root / "h5").mkdir()
    (root / "h5" / "rows.h5").write_bytes(b"\x89HDF")
    return root


def pairs_in(examples) -> list[tuple[int, int]]:
    return [tuple(map(int, image[0, :2, 0])) for image in examples.inputs]


def test_clients_have_the_examples_of_their_writer(home):
    task = task_of(home, "saved", WRITERS, **BY_WRITER)
    assert isinstance(task, ImageTask)
    assert task.classes == ("a", "b", "c")
    assert task.client_names == ("f00", "f01", "f02", "f03")
    tested = 0
    for writer in range(WRITERS):
        train, test = task.train_examples(writer), task.test_examples(writer)
        pairs = pairs_in(train) + pairs_in(test)
        assert sorted(pairs) == [(writer, i) for i in range(EACH)]
        for examples in (train, test):
            numbers = [number for _, number in pairs_in(examples)]
            assert examples.targets.tolist() == [number % 3 for number in numbers]
        tested += len(test)
    assert tested == 0.2 * WRITERS * EACH
    assert task.notes == (
        f"'{home / 'saved'}' has no test split: 8 of the 40 examples, drawn at "
        "random, are held out for testing",
    )


def test_cached_data_set_is_not_read_again(home, monkeypatch):
    first = task_of(home, "saved", 2)
    monkeypatch.setattr("flwr_frl.task.data.tables._read", None)
    again = task_of(home, "saved", 2, seed=1)
    assert again is not first
    assert np.array_equal(again.dataset.train.images, first.dataset.train.images)
    assert again.notes == first.notes
    # Other columns, or a larger held-out part, make another data set.
    assert code_of(task_of, home, "saved", 2, test_fraction=0.5) == "task"


def test_data_set_of_the_hub_is_downloaded_once_and_read_like_a_folder(
    home, tmp_path, monkeypatch
):
    import huggingface_hub

    asked = []

    def snapshot_download(name, *, repo_type, allow_patterns):
        asked.append((name, repo_type))
        return str(home)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    cache = str(tmp_path / "cache")
    options = {"task": "hf:flwrlabs/femnist", "cache-dir": cache}
    options |= {"data-subset": "saved", "client-column": "writer_id"}
    config = " ".join(f"{name}={value!r}" for name, value in options.items())
    flags = ("--clients", str(WRITERS), "--rounds", "2", "--run-config", config)
    assert run(tmp_path / "out", "fedavg", *flags) == 0
    assert len(rows_of(tmp_path / "out", "fedavg")) == 2
    assert asked == [("flwrlabs/femnist", "dataset")]


def test_the_header_of_a_table_may_have_blanks_around_names(home, tmp_path):
    header, *lines = (home / "table" / "rows.csv").read_text().splitlines()
    table = tmp_path / "rows.csv"
    table.write_text("\n".join([header.replace(",", ", "), *lines]))
    columns = {"input_columns": "width, height", "label_column": "kind"}
    task = task_of(tmp_path, "rows.csv", 3, **columns)
    assert task.classes == ("high", "low")


@pytest.mark.parametrize("clients", ["north south", "3 4"])
@pytest.mark.parametrize("tested", [False, True])
def test_a_row_without_a_client_is_an_error(tmp_path, clients, tested):
    first, second = clients.split()
    rows = [f"{i},{(first, second)[i % 2]},{'ab'[i // 2 % 2]}" for i in range(12)]
    for name in ("train", *["test"] * tested):
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,site,kind", *rows]))
    (tmp_path / f"{name}.csv").write_text("\n".join(["x,site,kind", *rows, "1,,a"]))
    given = {"input_columns": "x", "label_column": "kind"}
    cache = tmp_path.parent / "cache"
    code = code_of(task_of, tmp_path, ".", 2, cache, client_column="site", **given)
    assert code == "client-column"


def test_device_reads_its_own_data_dir(home):
    node = {"client-name": "pi", "data-dir": str(home / "saved")}
    config = {"task": "hf:flwrlabs/femnist", "cache-dir": str(home / "cache")}
    context = Context(0, 0, node, RecordDict(), {**config, "algorithm": "fedrep"})
    client = build_client(context, client_setup(context, None), {})
    assert len(client.task.train_examples(0)) == 32


BY_KIND = {"label_column": "kind"}
BAD = [
    ("nowhere", {}, "data-dir"),
    ("table", {}, "label-column"),
    ("table", {**BY_KIND, "test_fraction": 0.999}, "test-fraction"),
    ("table", {**BY_KIND, "data_subset": "x"}, "data-subset"),
    ("table", {**BY_KIND, "model": "cifar10-cnn"}, "settings"),
    ("h5", BY_KIND, "data-dir"),
]


@pytest.mark.parametrize(("name", "settings", "code"), BAD)
def test_invalid_settings_are_a_one_line_error(home, name, settings, code):
    call = lambda: task_of(home, name, 2, **settings).initial_state  # noqa: E731
    assert code_of(call) == code


@pytest.mark.parametrize("name", ["hf:~nobody-has-it/x", f"hf:{'a' * 5000}"])
def test_invalid_names_of_data_sets_are_an_error(name):
    assert code_of(build_task, resolve({"task": name}), 2) == "task"


LABEL = [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({"x": [1.0, None, 2.0, 3.0, 4.0], "label": LABEL}, "missing"),
        ({"x": [[1.0], [1.0, 2.0]] * 2 + [[1.0]], "label": LABEL}, "input-columns"),
        ({"x": [[1.0]] * 4 + [None], "label": LABEL}, "input-columns"),
        ({"x": [1.0] * 5, "label": [[c] for c in LABEL]}, "label-column"),
        ({"x": [1.0] * 5, "of\nwhat": LABEL}, "label-column"),
        ({"x": [1.0] * 5, "label": [0, 1, 0, None, 0]}, "label-column"),
    ],
)
def test_missing_numbers_and_irregular_rows_are_an_error(tmp_path, columns, code):
    import datasets

    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "rows")
    assert code_of(task_of, tmp_path, "rows", 0, input_columns="x") == code


# Classes, clients and held-out examples


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


def test_small_clients_share_the_held_out_examples(tmp_path):
    rows = [f"{i}.5,{i // 2},{'ab'[i % 2]}" for i in range(40)]
    write_table(tmp_path / "rows.csv", "size,client,label", rows)
    task = task_of(tmp_path, "rows.csv", 20)
    tested = [len(task.test_examples(i)) for i in range(20)]
    # A fifth of 40 examples, of which no client can lose more than one
    assert sorted(tested) == [0] * 12 + [1] * 8


def test_spellings_of_a_label_are_one_class(tmp_path):
    labels = ["none", "1", "1", " 1 "]
    rows = [f"{i % 4}.5,{labels[i % 4]}" for i in range(40)]
    write_table(tmp_path / "rows.csv", "x,label", rows)
    task = task_of(tmp_path, "rows.csv", 0, input_columns="x")
    assert task.classes == ("1", "none")
    for examples in task.train_examples(0), task.test_examples(0):
        is_none = examples.inputs[:, 0] == 0.5
        assert torch.equal(examples.targets, is_none.long())


# Formats, and files that are not the data set's own


def test_files_of_each_format_have_the_same_rows(tmp_path):
    import datasets

    columns = {"x": [[float(i), 0.5] for i in range(10)], "label": list("ab") * 5}
    rows = datasets.Dataset.from_dict(columns)
    for name in ("parquet", "json"):
        (tmp_path / name).mkdir()
        getattr(rows, f"to_{name}")(tmp_path / name / f"rows.{name}")
    rows.save_to_disk(tmp_path / "arrow")
    found = [
        list(task_of(tmp_path, name, 0).train_examples(0).batches(50))
        for name in ("parquet", "json", "arrow")
    ]
    for ((x, y),) in found:
        assert torch.equal(x, found[0][0][0])
        assert torch.equal(y, found[0][0][1])


def test_splits_are_named_by_files_and_a_subset_is_a_folder(tmp_path):
    rows = [f"{i}.5,{'ab'[i % 2]}" for i in range(8)]
    for subset in ("one", "two"):
        (tmp_path / subset).mkdir()
        for split, count in (("train-0", 6), ("train-1", 2), ("Test", 4)):
            write_table(tmp_path / subset / f"{split}.csv", "x,label", rows[:count])
    given = {"data_subset": "two", "input_columns": "x"}
    task = task_of(tmp_path, ".", 0, tmp_path.parent / "elsewhere", **given)
    assert len(task.train_examples(0)) == 8
    assert len(task.test_examples(0)) == 4
    given["data_subset"] = "three"
    assert code_of(task_of, tmp_path, ".", 0, **given) == "data-subset"


@pytest.fixture
def url():
    """The URL of a server that no data set may contact."""
    contacts = []
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            contacts.append(connection)
            connection.close()

    Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}"
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    assert not contacts


@pytest.mark.parametrize("place", ["{other}", "file://{other}", "{url}/0.png"])
def test_images_outside_of_the_data_are_not_read(tmp_path, url, place):
    other = tmp_path / "secret.png"
    Image.fromarray(letter(1, 2)).save(other)
    place = place.format(other=other, url=url)
    cell = pa.scalar(
        {"bytes": None, "path": place}, pa.struct({"bytes": pa.binary(), "path": "str"})
    )
    rows = pa.table({"image": [cell] * 10, "label": [0, 1] * 5})
    (tmp_path / "data").mkdir()
    parquet.write_table(rows, tmp_path / "data" / "rows.parquet")
    # Metadata is not read, either.
    config = f"configs:\n- config_name: default\n  data_files: '{url}/s.csv'"
    (tmp_path / "data" / "README.md").write_text(f"---\n{config}\n---\n")
    assert code_of(task_of, tmp_path, "data", 0) == "data-dir"
