"""Untrusted files cannot run code, use other files or contact hosts."""

import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from animals import settings_of, write_images
from command_line import one_error
from refusals import assert_says
from safetensors.numpy import load_file, save_file

from flwr_frl import simulate
from flwr_frl.clients.device.file_settings import followed
from flwr_frl.common.sealed import seal
from flwr_frl.common.settings import defaults, facts
from flwr_frl.predict import load, load_model, load_run
from flwr_frl.predict.__main__ import main as predict_main
from flwr_frl.predict.personalize import personalize
from flwr_frl.predict.personalize.__main__ import main as personalize_main
from flwr_frl.task.models.weights import FORMAT, pack_model

# Audit events that are recorded while the fixture `events` is in use
EVENTS: list[tuple[str, str]] = []
WATCHED = ("open", "os.listdir", "os.scandir", "os.mkdir", "socket.")


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _note.on and event.startswith(WATCHED):
        EVENTS.append((event, str(arguments[:1])))


_note.on = False
sys.addaudithook(_note)


@pytest.fixture
def events():
    """Audit events of a test: files opened, folders listed or created, sockets used."""
    EVENTS.clear()
    _note.on = True
    yield EVENTS
    _note.on = False


PAYLOAD = """
open({marker!r}, "w").close()
from flwr_frl.clients.fedrep import FedRepClient
from flwr_frl.strategies import FedAvg, FedRep

class X(FedAvg):
    pass

class Rep(FedRep):
    pass
"""


@pytest.fixture
def payload(write_module, tmp_path):
    """The name of a module, and the file that it creates when it is imported."""
    marker = tmp_path / "imported"
    return write_module("payload", PAYLOAD.format(marker=str(marker))), marker


def checkpoint(path: Path, settings, arrays=None, run="x") -> Path:
    """Write a checkpoint with arbitrary settings."""
    values = {"acknowledged": {"a": 1}, "run": run}
    about = json.dumps({"settings": {"task": "digits", **settings}, "values": values})
    tensors = {f"arrays/{n}": a for n, a in (arrays or {}).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(seal(tensors or {"x": np.zeros(1)}, {"run": about}))
    return path


def exported(path: Path, settings) -> Path:
    """Write an exported model with arbitrary settings."""
    about = json.dumps({"settings": settings, "clients": 0})
    path.write_bytes(
        pack_model({"x": torch.zeros(1)}, {"format": FORMAT, "task": about})
    )
    return path


def refused(capsys, main, arguments) -> str:
    """Return the one-line error of a command, which must fail within 20 seconds."""
    capsys.readouterr()
    began = time.monotonic()
    assert main([str(argument) for argument in arguments]) == 2
    assert time.monotonic() - began < 20
    out, err = capsys.readouterr()
    assert out == ""
    return one_error(err)


@pytest.mark.parametrize(
    ("names", "option"),
    [
        ({"algorithm": "{}:X"}, "--algorithm"),
        ({"algorithm": "{}:X-ft"}, "--algorithm"),
        ({"algorithm": "srpfl", "srpfl-base": "{}:X"}, "--run-config 'srpfl-base="),
        ({"task": "{}:task"}, "--task"),
    ],
)
def test_code_that_a_file_names_is_not_imported(
    names, option, payload, tmp_path, capsys
):
    module, marker = payload
    settings = {name: text.format(module) for name, text in names.items()}
    path = checkpoint(tmp_path / "file", settings)
    where = ["--checkpoint", path, "--client-name", "a"]
    data, out = write(tmp_path / "own"), ["--export", tmp_path / "out.safetensors"]
    for main, more in ((predict_main, out), (personalize_main, ["--data-dir", data])):
        assert option in refused(capsys, main, [*where, *more])
    for function in (load_run, load):
        assert_says("only where you name it", function, path, "a")
    # Naming an algorithm or a task other than that of the file is an error, too.
    if option == "--algorithm":
        assert_says("that of the file", load_run, path, "a", algorithm="fedavg")
    if option == "--task":
        path = exported(tmp_path / "model", settings)
        for extra in ([], ["--task", "mine:task"]):
            assert "task is" in refused(
                capsys, predict_main, ["--model", path, *out, *extra]
            )
    assert not marker.exists()


def write(root: Path) -> Path:
    """Write a folder of images and return it."""
    write_images(root, ("ant", "bee"), 1)
    return root


@pytest.fixture
def private(tmp_path):
    """A folder of private images, texts and arrays."""
    root = write(tmp_path / "private")
    (root / "a.txt").write_text("secret " * 300)
    pixels, labels = np.zeros((4, 8, 8), np.uint8), np.arange(4) % 2
    for part in ("train", "test"):
        np.savez(root / f"{part}.npz", images=pixels, labels=labels)
    return root


FOLDERS = ("image-folder", "arrays", "text-folder", "hf")
DOWNLOADS = ("hf:owner/name", "hf-text:owner/name", "cifar10", "mnist")
CODE = {"partition": "{module}:own", "metrics": "macro-f1,{module}:own"}
PLACES = {"data-dir": "{private}", "cache-dir": "{planted}"}
# Settings of a file, and a part of the error
FILES = [
    ({"task": "digits", **CODE}, "there is no array"),
    *(({"task": name, **PLACES}, "by --data-dir") for name in FOLDERS),
    *(({"task": name}, "by --task") for name in DOWNLOADS),
]


@pytest.mark.parametrize(("settings", "line"), FILES)
@pytest.mark.parametrize("kind", ["model", "checkpoint"])
def test_what_only_a_file_names_is_not_used(
    kind, settings, line, payload, private, tmp_path, capsys, events
):
    module, marker = payload
    planted = tmp_path / "planted"
    places = {"module": module, "private": private, "planted": planted}
    given = {name: text.format(**places) for name, text in settings.items()}
    make = {"model": exported, "checkpoint": checkpoint}[kind]
    path = make(tmp_path / "file", {"algorithm": "fedavg", **given})
    arguments = [f"--{kind}", path, "--export", tmp_path / "out.safetensors"]
    del events[:]
    assert line in refused(capsys, predict_main, arguments)
    if kind == "checkpoint" and settings["task"] in ("cifar10", "mnist"):
        # It fails even with a folder of data, which would make downloads unnecessary.
        path = checkpoint(tmp_path / "file", {"algorithm": "fedrep", **given})
        arguments = ["--checkpoint", path, "--data-dir", write(tmp_path / "own")]
        assert line in refused(capsys, personalize_main, arguments)
    assert not marker.exists()
    assert not planted.exists()
    # No private file is read, and no host is contacted.
    assert not [event for event in events if str(private) in event[1]]
    assert not [event for event in events if event[0].startswith("socket.")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Settings and arrays of the checkpoint of a FedRep run."""
    root = tmp_path_factory.mktemp("trained")
    data = write(root / "data")
    settings = {"backend": "inline", "output": str(root / "results"), "rounds": 1}
    settings |= {"task": "image-folder", "data_dir": str(data), "model": "mlp-2"}
    simulate("fedrep", clients=2, fraction=1.0, partition="iid", **settings)
    arrays = load_file(root / "results" / "fedrep" / "checkpoint.safetensors")
    run_settings = settings_of(
        root, algorithm="fedrep", model="mlp-2", newcomer_epochs=1
    )
    return run_settings, {n.removeprefix("arrays/"): a for n, a in arrays.items()}


def test_personalize_uses_no_path_that_only_the_file_names(
    trained, private, tmp_path, events
):
    settings, arrays = trained
    planted = tmp_path / "planted"
    places = {"cache-dir": str(planted), "data-dir": str(private)}
    # A run name that would lead out of the device's state folder
    run = "/../../../out"
    path = checkpoint(tmp_path / "file", {**settings, **places}, arrays, run)
    data, state = write(tmp_path / "own"), tmp_path / "states" / "state"
    fitted = personalize(path, str(data), "late", str(state))
    assert fitted.path.resolve().is_relative_to(state.resolve())
    assert not (tmp_path / "out").exists()
    assert not planted.exists()
    assert not [event for event in events if str(private) in event[1]]
    model, card = load_run(path, "late", str(state))
    assert card.classes == ("ant", "bee")
    assert model(torch.zeros(1, 8, 8, 3)).shape == (1, 2)


def test_weights_are_loaded_only_if_the_user_names_them(trained, tmp_path):
    settings, arrays = trained
    weights = str(tmp_path / "private.safetensors")
    save_file(arrays, weights)
    path = checkpoint(tmp_path / "file", {**settings, "weights": weights}, arrays)
    arguments = path, str(write(tmp_path / "own")), "late"
    assert_says("--run-config 'weights=", personalize, *arguments)
    assert personalize(*arguments, named={"weights": weights}).num_examples == 16


def test_a_run_with_adapters_needs_the_weights_of_its_backbone(trained, tmp_path):
    _, arrays = trained
    weights = str(tmp_path / "backbone.safetensors")
    data = str(write(tmp_path / "data"))
    save_file(arrays, weights)
    options = {"task": "image-folder", "data_dir": data, "model": "mlp-2"}
    options |= {"backend": "inline", "output": str(tmp_path / "results"), "rounds": 1}
    options |= {"adapters": "lora", "weights": weights, "partition": "iid"}
    simulate("local", clients=2, fraction=1.0, **options)
    place = tmp_path / "results" / "local"
    assert_says("its weights is", load_run, place, "000000", data_dir=data)
    named = {"weights": weights}
    model, _ = load_run(place, "000000", data_dir=data, named=named)
    frozen = [tensor for n, tensor in model.named_buffers() if n.endswith("weight")]
    shared = [torch.from_numpy(a) for n, a in arrays.items() if n.endswith("weight")]
    assert frozen
    assert all(any(torch.equal(f, a) for a in shared) for f in frozen)


@pytest.mark.parametrize("size", [60000, 4000])
def test_an_image_size_that_does_not_fit_the_arrays_is_refused_at_once(
    size, trained, tmp_path, capsys
):
    settings, arrays = trained
    path = checkpoint(tmp_path / "file", {**settings, "image-size": size}, arrays)
    data = write(tmp_path / "own")
    arguments = ["--checkpoint", path, "--data-dir", data, "--client-name", "late"]
    assert f"image-size is {size}" in refused(capsys, personalize_main, arguments)
    fedavg = {**settings, "image-size": size, "algorithm": "fedavg"}
    arguments[1] = checkpoint(tmp_path / "file", fedavg, arrays)
    arguments += ["--export", tmp_path / "out.safetensors"]
    assert f"image-size is {size}" in refused(capsys, predict_main, arguments)


LINEAR = {"algorithm": "fedavg", "task": "linear"}
TEXT = {"algorithm": "fedavg", "task": "text-folder"}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({**LINEAR, "dimension": 10**5, "rank": 10**3}, "is of shape (2, 10); task"),
        ({**LINEAR, "dimension": 10**6, "rank": 10**6}, "dimension times the largest"),
        ({**LINEAR, "samples": 10**12}, "its samples is 1000000000000"),
        ({**LINEAR, "samples": 10**6, "dimension": 10**4}, "dimension times the larg"),
        ({**LINEAR, "num-clients": 10**12}, "its num-clients is 1000000000000"),
        ({**TEXT, "lstm-width": 10**5}, "the size of task 'text-folder' is"),
        ({**TEXT, "sequence-length": 10**6}, "sequence-length is 1000000;"),
    ],
)
def test_sizes_are_bounded_before_anything_is_allocated(
    settings, line, private, tmp_path, capsys
):
    arrays = {"representation.weight": np.zeros((2, 10), np.float32)}
    path = checkpoint(tmp_path / "file", settings, arrays)
    arguments = ["--checkpoint", path, "--export", tmp_path / "out.safetensors"]
    if settings["task"] == "text-folder":
        arguments += ["--data-dir", private]
    assert line in refused(capsys, predict_main, arguments)


@pytest.mark.parametrize(
    ("model", "side", "line"),
    [
        ("resnet20", 60000, "the shape of an input is (3, 60000, 60000); expected"),
        ("mlp", 4000, "there is no array 'representation.fc1.weight' for model"),
    ],
)
def test_a_model_larger_than_its_file_is_refused(model, side, line, tmp_path, capsys):
    about = {"model": model, "shape": (3, side, side), "mean": (0,) * 3}
    about |= {"std": (1,) * 3, "head_layers": 1, "model_head": "", "grey": False}
    metadata = {"format": FORMAT, "model": json.dumps(about)}
    metadata["classes"] = json.dumps(["a", "b"])
    data = pack_model({"x": torch.zeros(1)}, metadata)
    (tmp_path / "m.safetensors").write_bytes(data)
    arguments = ["--model", tmp_path / "m.safetensors", "--export", tmp_path / "m.pt2"]
    assert line in refused(capsys, predict_main, arguments)


def test_code_that_the_user_also_names_is_used(payload, tmp_path):
    module, marker = payload
    more = {"backend": "inline", "output": str(tmp_path), "model": "logistic"}
    more |= {"clients": 5, "rounds": 1, "head_epochs": 1}
    simulate(f"{module}:X", **more)
    base = f"{module}:Rep"
    simulate("srpfl", srpfl_base=base, **more, fraction=1.0, initial_nodes=5)
    marker.unlink()
    classifier, _ = load_run(tmp_path / "X", algorithm=f"{module}:X")
    assert classifier(torch.zeros(1, 8, 8, 1)).shape == (1, 10)
    named = {"srpfl-base": base}
    classifier, _ = load_run(tmp_path / "srpfl", "000001", named=named)
    assert classifier(torch.zeros(1, 8, 8, 1)).shape == (1, 10)
    shutil.copytree(tmp_path / "srpfl", tmp_path / "copy")
    arguments = ["--checkpoint", str(tmp_path / "copy"), "--client-name", "000001"]
    arguments += ["--export", str(tmp_path / "out.safetensors")]
    assert predict_main([*arguments, "--run-config", f'srpfl-base="{base}"']) == 0
    assert load(tmp_path / "out.safetensors").classes == tuple("0123456789")
    unknown = {"srpfl-bass": base}
    line = "unknown setting 'srpfl-bass'"
    assert_says(line, load_run, tmp_path / "X", named=unknown)


def test_only_harmless_strings_of_a_file_are_used():
    texts = {name for name, value in defaults().items() if isinstance(value, str)}
    assert {"model", "device", "aggregation"} <= facts("safe") < texts
    written = dict.fromkeys(texts - facts("safe"), "os:system")
    # Settings of a custom class
    written |= {"notes": "/private", "host": "example.org", "kind": "a, b"}
    kept, withheld = followed(written, {})
    assert withheld == {n: text for n, text in written.items() if n != "kind"}
    assert kept["kind"] == "a, b"
    assert not {"os:system", "/private", "example.org"} & {*kept.values()}


def test_a_data_dir_in_a_file_is_only_compared(tmp_path, private):
    for place in ("~nobody-here/images", "/private\0"):
        settings = {"algorithm": "fedavg", "data-dir": place}
        path = checkpoint(tmp_path / "file", settings)
        assert_says("there is no array", load_run, path)
    # A model of a task of folders needs the folder.
    settings = {"task": "text-folder", "data-dir": str(private), "lstm-width": 2}
    path = exported(tmp_path / "file", settings)
    assert_says("there is no array", load_model, path, data_dir=str(private))
