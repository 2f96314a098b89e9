"""Invalid input of predictions gives a one-line error."""

import json
import shutil

import pytest
import torch
from animals import of_device, settings_of, write_images
from refusals import assert_says, code_of
from safetensors.torch import load_file, save_file

from flwr_frl.common.sealed import seal
from flwr_frl.predict import load_model, load_run
from flwr_frl.running import run
from flwr_frl.task.models.weights import pack_model, read_safetensors


def damage(path):
    """Change the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.fixture
def broken(devices, tmp_path):
    """A copy of the devices' files, with some that are damaged or of another kind."""
    root = shutil.copytree(devices, tmp_path / "copy")
    (root / "text.png").write_text("no image")
    (root / "text.safetensors").write_text("no model")
    save_file({"a": torch.zeros(3)}, root / "other.safetensors")
    of_device(root, "anna").export(root / "model.safetensors")
    about, tensors = read_safetensors(root / "model.safetensors")
    cut = {n: t for n, t in tensors.items() if n != "head.bias"}
    wide = {**tensors, "head.bias": torch.zeros(4)}
    nameless = {**about, "model-card": about["model-card"].replace("classes", "c")}
    for name, arrays, metadata in (
        ("cut", cut, about),
        ("wide", wide, about),
        ("nameless", tensors, nameless),
    ):
        (root / f"{name}.safetensors").write_bytes(pack_model(arrays, metadata))
    for path in (root / "bob" / "animals" / "bob").iterdir():
        damage(path)
    shutil.copytree(root / "results" / "fedrep", root / "flipped")
    damage(root / "flipped" / "checkpoint.safetensors")
    shutil.copytree(root / "results" / "fedrep", root / "nb" / "seed-0" / "fedrep")
    # A safetensors file that is not a checkpoint of a run
    (root / "empty").mkdir()
    save_file({"a": torch.zeros(3)}, root / "empty" / "checkpoint.safetensors")
    return root


RUN = "{root}/results/fedrep"
RUNS = [
    (("",), "expected the folder of a run, DIR/ALGORITHM"),
    (("x" * 400,), "xxx' cannot be read: "),
    (("{root}/nb/fedrep",), "DIR/seed-SEED/ALGORITHM"),
    (("{root}/empty",), "it has no checksum; expected a"),
    (("{root}/flipped", "anna", "{root}/anna"), "its checksum is wrong"),
    ((RUN,), "unknown client ''; known: anna, bob"),
    ((RUN, "ann"), "'ann'; did you mean 'anna'"),
    ((RUN, "anna"), "clients/anna'; expected the folder"),
    ((RUN, "bob", "{root}/bob"), "cannot be read: ChecksumError: its checksum is wr"),
]


@pytest.mark.parametrize(("arguments", "message"), RUNS)
def test_a_run_that_cannot_be_loaded(arguments, message, broken):
    assert_says(message, load_run, *(text.format(root=broken) for text in arguments))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no", "no' cannot be read"),
        ("text.safetensors", "text.safetensors' cannot be read"),
        ("other.safetensors", "a file that Predictor.export has writ"),
        ("cut.safetensors", "array 'head.bias' is None"),
        ("wide.safetensors", "array 'head.bias' is (4,)"),
        ("nameless.safetensors", "model is damaged"),
    ],
)
def test_a_model_that_cannot_be_loaded(name, message, broken):
    assert_says(message, load_model, broken / name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.png", "nothing.png'; expected one that"),
        ("bob", "bob'; expected one with images"),
        ("x" * 400, "file is '"),
        ("text.png", "text.png cannot be predicted from: "),
    ],
)
def test_files_that_cannot_be_predicted(name, message, broken):
    assert_says(message, of_device(broken, "anna"), f"{broken}/{name}")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"algorithm": "fedavg", "task": "qcqp"}, "settings"),
        ({"algorithm": "fedrap"}, "algorithm"),
        ({"momentum": "x"}, "momentum"),
        ({"algorithm": "fedavg"}, "data-dir"),
    ],
)
def test_runs_that_cannot_predict_are_refused(devices, change, code, tmp_path):
    path = devices / "results" / "fedrep" / "checkpoint.safetensors"
    about = {
        "settings": {**settings_of(tmp_path), **change},
        "values": {"acknowledged": {"a": 1}, "run": "x"},
    }
    copy = tmp_path / "checkpoint.safetensors"
    arrays = {name: tensor.numpy() for name, tensor in load_file(path).items()}
    metadata = {"run": json.dumps(about), "order": json.dumps([*arrays])}
    copy.write_bytes(seal(arrays, metadata))
    assert code_of(load_run, tmp_path, "a") == code


def test_a_fine_tuned_model_needs_the_client_s_data(folders, tmp_path):
    settings = settings_of(tmp_path, algorithm="fedavg-ft", data_dir=str(folders))
    run("fedavg-ft", settings, "inline")
    place = tmp_path / "results" / "fedavg-ft"
    predictor = load_run(place, "000000", data_dir=folders)
    assert predictor.classes == ("ant", "bee", "cat", "dog")
    for client, named, code in (
        ("", {"data_dir": folders}, "client-name"),
        ("pi-3", {}, "data-dir"),
        ("000000", {}, "data-dir"),
        ("000002", {"data_dir": folders}, "client-name"),
    ):
        assert code_of(load_run, place, client, **named) == code


def test_a_run_without_a_model_of_the_task_is_refused(folders, tmp_path):
    algorithm = "representation-transfer"
    overrides = {"algorithm": algorithm, "num-sources": 1, "source-epochs": 1}
    settings = {**settings_of(tmp_path, data_dir=str(folders)), **overrides}
    run(algorithm, settings, "inline")
    place = tmp_path / "results" / algorithm
    assert code_of(load_run, place, "000001") == "arrays"


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavg-ft"])
def test_a_shared_head_needs_the_classes_of_the_training(tmp_path, algorithm):
    ours, theirs = ("ant", "bee", "cat"), ("bee", "cat", "dog")
    write_images(tmp_path / "images" / "anna", ours, 1)
    write_images(tmp_path / "others", theirs, 2)
    there = str(tmp_path / "images" / "anna")
    settings = settings_of(tmp_path, data_dir=there, partition="iid")
    run(algorithm, settings, "inline")
    checkpoint = tmp_path / "results" / algorithm
    assert load_run(checkpoint, "000000", data_dir=there).classes == ours
    others = {"data_dir": tmp_path / "others"}
    assert code_of(load_run, checkpoint, "000000", **others) == "data-dir"


def test_a_custom_model_that_does_not_fit_is_a_one_line_error(tmp_path, folders):
    more = {"task": "flat_images:Wrong", "data_dir": str(folders)}
    settings = settings_of(tmp_path, algorithm="fedrep", **more)
    line = "client bob: the model or the loss fails"
    assert_says(line, run, "fedrep", settings, "inline")
