"""Invalid input of the prediction command gives a one-line error."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from animals import of_device, settings_of, write_images
from command_line import one_error
from refusals import assert_says
from safetensors.torch import load_file, save_file

from flwr_frl.common.sealed import seal
from flwr_frl.predict import export, load_run
from flwr_frl.predict.__main__ import main
from flwr_frl.predict.predictor import files_in
from flwr_frl.running import run
from flwr_frl.task.models.weights import FORMAT, pack_model


@pytest.fixture
def broken(devices, folders, tmp_path):
    shutil.copytree(devices, tmp_path / "copy")
    root = tmp_path / "copy"
    (root / "text.png").write_text("no image")
    (root / "empty").mkdir()
    (root / "text.safetensors").write_text("no model")
    save_file({"a": torch.zeros(3)}, root / "other.safetensors")
    export(*of_device(root, "anna"), root / "model.safetensors")
    tensors = load_file(root / "model.safetensors")
    card = of_device(root, "anna")[1].metadata()
    about = {"format": FORMAT, **card}
    cut = {n: t for n, t in tensors.items() if n != "head.bias"}
    (root / "cut.safetensors").write_bytes(pack_model(cut, about))
    wide = {**tensors, "head.bias": torch.zeros(4)}
    (root / "wide.safetensors").write_bytes(pack_model(wide, about))
    nameless = {**about, "classes": "[1"}
    (root / "nameless.safetensors").write_bytes(pack_model(tensors, nameless))
    damaged = root / "bob" / "animals" / "bob"
    for path in damaged.iterdir():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    (root / "flipped").mkdir()
    data = bytearray((root / "results/fedrep/checkpoint.safetensors").read_bytes())
    data[-1] ^= 1
    (root / "flipped" / "checkpoint.safetensors").write_bytes(bytes(data))
    # A safetensors file that is not a checkpoint of a run
    save_file({"a": torch.zeros(3)}, root / "empty" / "checkpoint.safetensors")
    return root


def test_folders_that_cannot_be_read(folders, monkeypatch):
    hidden = folders / "anna" / "test" / "ant"
    # As root, everything can be read.
    iterdir, access = Path.iterdir, os.access
    monkeypatch.setattr(os, "access", lambda p, mode: p != hidden and access(p, mode))

    def refuse(path: Path):
        if path == hidden:
            raise PermissionError(13, "Permission denied")
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    files = files_in([folders / "anna" / "test"])
    assert {path.parent.name for path in files} == {"bee"}
    assert_says("ant' cannot be read: ", files_in, [hidden])


RUN = ["--checkpoint", "{root}/results/fedrep"]
ANNA = [*RUN, "--client-name", "anna", "--state-dir", "{root}/anna"]
IMAGE = "{folders}/anna/test/ant/0.png"
BAD_INPUT = [
    ([IMAGE], "one of the arguments --model --checkpoint is required"),
    (ANNA, "there is nothing to do: give files or --export FILE"),
    (["{root}/nothing.png", *ANNA], "there is no file or folder '{root}/nothing.png'"),
    (["{root}/bob", *ANNA], "folder '{root}/bob' has no images"),
    (["{root}/text.png", *ANNA], "image '{root}/text.png' cannot be read"),
    ([IMAGE, "--model", "{root}/no"], "model '{root}/no' cannot be read"),
    ([IMAGE, "--model", "{root}/text.safetensors"], "text.safetensors' cannot be read"),
    ([IMAGE, "--model", "{root}/other.safetensors"], "a file that --export has writ"),
    ([IMAGE, "--model", "{root}/cut.safetensors"], "there is no array 'head.bias'"),
    ([IMAGE, "--model", "{root}/wide.safetensors"], "'head.bias' is of shape (4,);"),
    ([IMAGE, "--model", "{root}/nameless.safetensors"], "model is damaged"),
    ([IMAGE, "--checkpoint", "{root}/no"], "checkpoint '{root}/no' cannot be read"),
    ([IMAGE, "--checkpoint", "{root}/results"], "such as '{root}/results/fedrep'"),
    ([IMAGE, "--checkpoint", "{root}/empty"], "it has no checksum; expected a"),
    ([IMAGE, "--checkpoint", "{root}/flipped", *ANNA[2:]], "its checksum is wrong"),
    ([IMAGE, *RUN], "client-name is ''; expected one of anna, bob"),
    ([IMAGE, *RUN, "--client-name", "ann"], "'ann'; did you mean 'anna'"),
    ([IMAGE, *RUN, "--client-name", "anna"], "state-dir must be that of its SuperNode"),
    (
        [IMAGE, *RUN, "--client-name", "bob", "--state-dir", "{root}/bob"],
        "cannot be used: its checksum is wrong",
    ),
    ([*ANNA, "--export", "{root}/model.h5"], "must end with .safetensors, .pt2 or .on"),
    ([*ANNA, "--export", "{root}/text.png/m.pt2"], "export '{root}/text.png/m.pt2': "),
    ([IMAGE, *ANNA, "--modell", "x"], "unrecognized arguments: --modell x"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_gives_a_one_line_error(arguments, message, broken, folders, capsys):
    places = {"root": broken, "folders": folders}
    assert main([argument.format(**places) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message.format(**places) in one_error(err)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "fedavg", "task": "qcqp"}, "task 'qcqp' has nothing to predict"),
        ({"algorithm": "fedrap"}, "unknown algorithm 'fedrap'"),
        ({"momentum": "x"}, "momentum is 'x'; "),
        ({"algorithm": "fedavg"}, "data-dir is ''; expected a directory"),
    ],
)
def test_runs_that_cannot_predict_are_refused(devices, change, message, tmp_path):
    path = devices / "results" / "fedrep" / "checkpoint.safetensors"
    about = {
        "settings": {**settings_of(tmp_path), **change},
        "values": {"acknowledged": {"a": 1}, "run": "x"},
    }
    copy = tmp_path / "checkpoint.safetensors"
    arrays = {name: tensor.numpy() for name, tensor in load_file(path).items()}
    copy.write_bytes(seal(arrays, {"run": json.dumps(about)}))
    assert_says(message, load_run, tmp_path, "a")


def test_arguments_of_load_run_must_be_strings(devices):
    place = str(devices / "results" / "fedrep")
    assert_says("client is 1; expected a string", load_run, place, 1)
    assert_says("task is <built-in function len>;", load_run, place, task=len)
    assert_says("unknown client 'nobody'", load_run, place, "nobody")


def test_a_fine_tuned_model_needs_the_client_s_data(folders, tmp_path):
    settings = settings_of(tmp_path, algorithm="fedavg-ft", data_dir=str(folders))
    run("fedavg-ft", settings, "inline")
    place = tmp_path / "results" / "fedavg-ft"
    message = "algorithm 'fedavg-ft' trains on a client's examples before its model"
    options = {"data_dir": str(folders)}
    assert_says(message, load_run, place, **options)
    for name, state_dir in (("pi-3", ""), ("000000", str(tmp_path))):
        assert_says("by --data-dir", load_run, place, name, state_dir)
    line = "expected one of 000000 to 000001"
    assert_says(line, load_run, place, "000002", **options)


def test_a_run_without_a_model_of_the_task_is_refused(folders, tmp_path):
    algorithm = "representation-transfer"
    overrides = {"algorithm": algorithm, "num-sources": 1, "source-epochs": 1}
    settings = {**settings_of(tmp_path, data_dir=str(folders)), **overrides}
    run(algorithm, settings, "inline")
    message = "algorithm 'representation-transfer' leaves no model of the task's own"
    assert_says(message, load_run, tmp_path / "results" / algorithm, "000001")


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavg-ft"])
def test_a_shared_head_needs_the_classes_of_the_training(tmp_path, algorithm):
    ours, theirs = ("ant", "bee", "cat"), ("bee", "cat", "dog")
    write_images(tmp_path / "images" / "anna", ours, 1)
    write_images(tmp_path / "others", theirs, 2)
    there = str(tmp_path / "images" / "anna")
    settings = settings_of(tmp_path, data_dir=there, partition="iid")
    run(algorithm, settings, "inline")
    checkpoint = tmp_path / "results" / algorithm
    assert load_run(checkpoint, "000000", data_dir=there)[1].classes == ours
    others = {"data_dir": str(tmp_path / "others")}
    line = "has the classes bee, cat, dog; they must"
    assert_says(line, load_run, checkpoint, "000000", **others)


def test_file_names_that_are_not_unicode_or_too_long(folders, tmp_path, capsys):
    settings = settings_of(tmp_path, data_dir=str(folders))
    run("fedrep", settings, "inline")
    image = next((folders / "anna").glob("test/*/*"))
    odd = tmp_path / os.fsdecode(b"photo-\xff.png")
    odd.write_bytes(image.read_bytes())
    capsys.readouterr()
    arguments = ["--checkpoint", str(tmp_path / "results" / "fedrep")]
    arguments += ["--client-name", "000000"]
    assert main([str(odd), *arguments]) == 0
    assert r"photo-\xff.png" in capsys.readouterr().out
    for wrong in (["x" * 400, *arguments], [str(odd), "--checkpoint", "x" * 400]):
        assert main(wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_custom_model_that_does_not_fit_is_a_one_line_error(tmp_path, folders):
    more = {"task": "flat_images:Wrong", "data_dir": str(folders)}
    settings = settings_of(tmp_path, algorithm="fedrep", **more)
    line = "client bob: the model refuses inputs"
    assert_says(line, run, "fedrep", settings, "inline")
