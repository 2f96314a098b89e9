"""Hugging Face data sets that name files and URLs which are not theirs."""

import json
import os
import socket
import zipfile
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import refusals
from hub_data import by_column, task_of
from PIL import Image

from flwr_frl.common.settings import resolve
from flwr_frl.task.tasks import build_task

pytestmark = pytest.mark.e2e

GREY = 77
CELLS = "x,label\n" + "1,0\n2,1\n" * 5


@pytest.fixture(scope="module")
def secret(tmp_path_factory) -> Path:
    """A folder with data that no data set may read."""
    root = tmp_path_factory.mktemp("secret")
    write_image(root / "s.png")
    (root / "table").mkdir()
    (root / "table" / "s.csv").write_text(CELLS)
    save(root / "saved", {"x": [[1.0]] * 10, "label": [0, 1] * 5})
    return root


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


def write_image(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), GREY, np.uint8)).save(path)


def save(folder: Path, columns) -> None:
    import datasets

    datasets.Dataset.from_dict(columns).save_to_disk(folder)


def write_parquet(folder: Path, place: str, column: str = "image") -> Path:
    """Write a table whose images consist of a path; other columns are valid."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    columns = {"x": [[1.0]] * 10, "label": [0, 1] * 5}
    rows = datasets.Dataset.from_dict({**columns, column: [place] * 10})
    rows = rows.cast_column(column, datasets.Image(decode=False))
    metadata = {"info": {"features": datasets.Features(rows.features).to_dict()}}
    metadata["info"]["features"][column] = {"_type": "Image"}
    text = {"huggingface": json.dumps(metadata)}
    path = folder / "rows.parquet"
    pq.write_table(pa.table(rows.data.table).replace_schema_metadata(text), path)
    return path


def code_of(home: Path, **settings) -> str:
    """Return the code of the error that the data set in ``home / "data"`` raises."""
    name = settings.pop("name", "data")
    return refusals.code_of(task_of, home, name, 1, home / "cache", **settings)


# Paths and URLs of images


@pytest.mark.parametrize(
    "place",
    [
        "{secret}/s.png",
        "{relative}/s.png",
        "file://{secret}/s.png",
        "zip://s.png::{secret}/s.zip",
        "{url}/s.png",
        "zip://s.png::{url}/s.zip",
    ],
)
def test_images_outside_of_the_data_are_not_read(tmp_path, secret, url, place):
    with zipfile.ZipFile(secret / "s.zip", "w") as file:
        file.write(secret / "s.png", "s.png")
    relative = os.path.relpath(secret)
    place = place.format(secret=secret, relative=relative, url=url)
    write_parquet(tmp_path / "data", place)
    assert code_of(tmp_path, input_columns="image") == "data-dir"


def test_images_in_other_columns_are_not_read(tmp_path, url, monkeypatch):
    # A URL is a relative path as well, which would be below this folder.
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / "data", f"{url}/s.png", "label")
    assert code_of(tmp_path, input_columns="x") == "label-column"
    write_parquet(tmp_path / "more", f"{url}/s.png", "who")
    named = {"name": "more", "input_columns": "x", **by_column("who")}
    assert code_of(tmp_path, **named) == "partition"


def test_links_that_leave_the_folder_are_not_followed(tmp_path, secret):
    for name in "ab":
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
        for i in range(5):
            link = tmp_path / "data" / "train" / name / f"{i}.png"
            link.symlink_to(secret / "s.png")
    assert code_of(tmp_path) == "task"
    # The name of a link may be given.
    (tmp_path / "rows.csv").symlink_to(secret / "table" / "s.csv")
    assert len(task_of(tmp_path, "rows.csv", 0, input_columns="x").classes) == 2


def test_downloads_of_the_hub_consist_of_links(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "blobs").write_text(CELLS)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "rows.csv").symlink_to(tmp_path / "blobs")
    for name in "snapshot", "snapshot/rows.csv":
        assert len(task_of(tmp_path, name, 0, input_columns="x").classes) == 2


# Metadata


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "line",
    [
        "data_files: {secret}/table/s.csv",
        "data_files: '{url}/s.csv'",
        "data_dir: 'zip://a::{url}/s.zip'",
        "version: ../../../../../escaped",
    ],
)
def test_metadata_of_a_folder_is_not_read(tmp_path, secret, url, line, file):
    folder = tmp_path / "home" / "data"
    folder.mkdir(parents=True)
    (folder / "rows.csv").write_text("x,label\n" + "5,0\n6,1\n" * 5)
    text = line.format(secret=secret, url=url)
    mark = "---\n" * (file == "README.md")
    config = f"{mark}configs:\n- config_name: default\n  {text}\n{mark}"
    (folder / file).write_text(config)
    task = task_of(tmp_path / "home", "data", 0, input_columns="x")
    ((inputs, _),) = task.train_examples(0).batches(50)
    assert set(inputs.flatten().tolist()) == {5.0, 6.0}
    assert not list(tmp_path.rglob("escaped*"))


def test_a_subset_of_a_folder_is_a_folder_in_it(tmp_path):
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "rows.csv").write_text(CELLS)
    for name in "ab":
        subset = {"input_columns": "x", "data_subset": name}
        assert len(task_of(tmp_path, "data", 0, **subset).train_examples(0)) == 8
    assert code_of(tmp_path, data_subset="c") == "data-subset"
    # A single file is read without its neighbours.
    named = {"input_columns": "x"}
    task = task_of(tmp_path, "data/a/rows.csv", 0, **named)
    assert len(task.train_examples(0)) == 8


def test_saved_data_cannot_name_other_files(tmp_path, secret):
    save(tmp_path / "data", {"x": [[1.0]] * 5, "label": [0, 1, 0, 1, 0]})
    state = tmp_path / "data" / "state.json"
    content = json.loads(state.read_text())
    name = content["_data_files"][0]["filename"]
    content["_data_files"] = [{"filename": f"{secret / 'saved'}/{name}"}]
    state.write_text(json.dumps(content))
    assert len(task_of(tmp_path, "data", 0).train_examples(0)) == 4


def test_formats_that_can_link_to_other_files_are_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.h5").write_bytes(b"\x89HDF")
    assert code_of(tmp_path) == "task"


# Relative paths


def test_a_relative_path_is_not_the_name_of_a_reader(tmp_path, monkeypatch):
    counts = {"csv/rows.csv": 20, "rows.csv": 10, "json/rows.csv": 30}
    for name, count in counts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x,label\n" + "1,0\n2,1\n" * count)
    monkeypatch.chdir(tmp_path)
    names = {**counts, "csv": 20, "./csv": 20, "json": 30}
    for name, count in names.items():
        own = {"task": f"hf:{name}", "input-columns": "x", "partition": "iid"}
        cache = str(tmp_path / "cache")
        task = build_task(resolve({**own, "cache-dir": cache}), 0)
        assert len(task.train_examples(0)) + len(task.test_examples(0)) == 2 * count


@pytest.mark.parametrize("name", ["p[1]/rows.csv", "p[1]", "p1/r*s.csv", "p1/r?ws.csv"])
def test_a_path_is_not_a_pattern(tmp_path, name):
    path = tmp_path / (name if name.endswith("csv") else f"{name}/rows.csv")
    path.parent.mkdir()
    path.write_text(CELLS)
    (tmp_path / "p1").mkdir(exist_ok=True)
    (tmp_path / "p1" / "rows.csv").write_text(CELLS * 2)
    task = task_of(tmp_path, name, 0, input_columns="x")
    assert len(task.train_examples(0)) == 8
