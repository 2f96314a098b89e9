"""Untrusted files cannot run code, use other files or contact hosts."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from animals import settings_of, write_images
from refusals import assert_says, code_of
from safetensors.numpy import load_file, save_file

from flwr_frl import simulate
from flwr_frl.common.sealed import seal
from flwr_frl.common.settings import defaults, facts
from flwr_frl.predict import load_model, load_run, personalize
from flwr_frl.predict.file_settings import separate
from flwr_frl.task.models.weights import FORMAT, pack_model

# Audit events that are recorded while the fixture `events` is in use
EVENTS: list[str] = []
WATCHED = ("open", "os.listdir", "os.scandir", "os.mkdir", "socket.")


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _note.on and event.startswith(WATCHED):
        EVENTS.append(f"{event} {arguments[:1]}")


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
    metadata = {"run": about, "order": json.dumps([*tensors])}
    path.write_bytes(seal(tensors or {"x": np.zeros(1)}, metadata))
    return path


def assert_refused(line, function, *arguments) -> None:
    """Check the one-line error of a function, which must fail within 20 seconds."""
    began = time.monotonic()
    assert_says(line, function, *arguments)
    assert time.monotonic() - began < 20


@pytest.fixture
def own(tmp_path) -> Path:
    """The user's own images."""
    write_images(tmp_path / "own", ("ant", "bee"), 1)
    return tmp_path / "own"


@pytest.fixture
def private(tmp_path):
    """A folder of private images and texts."""
    root = tmp_path / "private"
    write_images(root, ("ant", "bee"), 1)
    (root / "a.txt").write_text("secret " * 300)
    return root


CODE = {"partition": "{module}:own", "metrics": "macro-f1,{module}:own"}
PLACES = {"data-dir": "{private}", "cache-dir": "{planted}"}
LINEAR, TEXT = {"task": "linear"}, {"task": "text-folder", "data-dir": "{private}"}
# Settings of a file, and a part of the error
FILES = [
    ({"algorithm": "{module}:X"}, "algorithm is"),
    ({"algorithm": "srpfl", "srpfl-base": "{module}:X"}, "srpfl-base is"),
    ({"task": "{module}:task"}, "task is"),
    ({"task": "image-folder", "image-size": 60000}, "image-size is"),
    *(
        ({"task": name, **PLACES}, "data-dir is")
        for name in ("image-folder", "text-folder", "table")
    ),
    *(
        ({"task": name}, "task is")
        for name in ("hf:owner/name", "hf-text:owner/name", "cifar10", "mnist")
    ),
    ({"task": "digits", **CODE}, "array 'representation."),
    # Sizes are bounded before anything is allocated.
    ({**LINEAR, "dimension": 10**5, "rank": 10**3}, "the model's size is"),
    ({**LINEAR, "dimension": 10**6, "rank": 10**6}, "dimension times the largest"),
    ({**LINEAR, "samples": 10**6, "dimension": 10**4}, "dimension times the larg"),
    ({**LINEAR, "num-clients": 10**12}, "num-clients is"),
]


@pytest.mark.parametrize(("settings", "line"), FILES)
def test_what_only_a_file_names_is_not_used(
    settings, line, payload, private, own, tmp_path, events
):
    module, marker = payload
    places = {"module": module, "private": private, "planted": tmp_path / "planted"}
    given = {
        name: value.format(**places) if isinstance(value, str) else value
        for name, value in {"algorithm": "fedavg", **settings}.items()
    }
    path = checkpoint(tmp_path / "file", given)
    assert_refused(line, load_run, path)
    if line in ("algorithm is", "task is", "srpfl-base is"):
        # It fails even with a folder of data, which would make downloads unnecessary.
        assert_refused(line, personalize, path, own, "late")
    assert not marker.exists()
    assert not (tmp_path / "planted").exists()
    # No private file is read, and no host is contacted.
    used = [e for e in events if str(private) in e or e.startswith("socket.")]
    assert not used


IMAGES = {"source": "mnist", "model": "mlp", "head_layers": 1}
IMAGES |= {"shape": (8, 8, 3), "classes": ("a", "b")}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model": "resnet20", "shape": (60000, 60000, 3)}, "the shape of an input is"),
        ({"shape": (4000, 4000, 3)}, "the model's size is"),
        ({"shape": (-1, 8, 3)}, "the description of the model is damaged"),
        ({"model": ""}, "the description of the model is damaged"),
        ({"model": "payload:X"}, "unknown model"),
        ({"classes": 2}, "the description of the model is damaged"),
        ({"head_layers": 10**9}, "head-layers is"),
        ({"weights": "/private"}, "array 'representation."),
    ],
)
def test_a_hostile_card_of_an_image_model_is_refused(change, line, tmp_path):
    about = {"format": FORMAT, "model-card": json.dumps({**IMAGES, **change})}
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack_model({"x": torch.zeros(1)}, about))
    assert_says(line, load_model, path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Settings and arrays of the checkpoint of a FedRep run."""
    root = tmp_path_factory.mktemp("trained")
    write_images(root / "data", ("ant", "bee"), 1)
    settings = {"backend": "inline", "output": str(root / "results"), "rounds": 1}
    settings |= {"task": "image-folder", "data_dir": str(root / "data")}
    settings |= {"model": "mlp-2", "partition": "iid"}
    simulate("fedrep", clients=2, fraction=1.0, **settings)
    arrays = load_file(root / "results" / "fedrep" / "checkpoint.safetensors")
    run_settings = settings_of(
        root, algorithm="fedrep", model="mlp-2", newcomer_epochs=1
    )
    return run_settings, {n.removeprefix("arrays/"): a for n, a in arrays.items()}


def test_personalize_uses_no_path_that_only_the_file_names(
    trained, private, own, tmp_path, events
):
    settings, arrays = trained
    planted = tmp_path / "planted"
    places = {"cache-dir": str(planted), "data-dir": str(private)}
    # A run name that would lead out of the device's state folder
    run = "/../../../out"
    path = checkpoint(tmp_path / "file", {**settings, **places}, arrays, run)
    state = tmp_path / "states" / "state"
    fitted = personalize(path, own, "late", state)
    assert fitted.path.resolve().is_relative_to(state.resolve())
    assert not (tmp_path / "out").exists()
    assert not planted.exists()
    assert not [event for event in events if str(private) in event]
    predictor = load_run(path, "late", state)
    assert predictor.classes == ("ant", "bee")
    assert predictor(np.zeros((1, 8, 8, 3), np.uint8)).outputs.shape == (1, 2)


def test_weights_are_loaded_only_if_the_user_names_them(trained, own, tmp_path):
    settings, arrays = trained
    weights = str(tmp_path / "private.safetensors")
    save_file(arrays, weights)
    path = checkpoint(tmp_path / "file", {**settings, "weights": weights}, arrays)
    assert code_of(personalize, path, own, "late") == "weights"
    assert personalize(path, own, "late", weights=weights).num_examples == 16


def test_a_run_with_adapters_needs_the_weights_of_its_backbone(trained, own, tmp_path):
    _, arrays = trained
    weights = str(tmp_path / "backbone.safetensors")
    save_file(arrays, weights)
    options = {"task": "image-folder", "data_dir": str(own), "model": "mlp-2"}
    options |= {"backend": "inline", "output": str(tmp_path / "results"), "rounds": 1}
    options |= {"adapters": "lora", "weights": weights, "partition": "iid"}
    simulate("local", clients=2, fraction=1.0, **options)
    place = tmp_path / "results" / "local"
    assert code_of(load_run, place, "000000", data_dir=own) == "weights"
    model = load_run(place, "000000", data_dir=own, weights=weights).model
    frozen = [tensor for n, tensor in model.named_buffers() if n.endswith("weight")]
    shared = [torch.from_numpy(a) for n, a in arrays.items() if n.endswith("weight")]
    assert frozen
    assert all(any(torch.equal(f, a) for a in shared) for f in frozen)


def test_code_that_the_user_also_names_is_used(payload, tmp_path):
    module, marker = payload
    more = {"backend": "inline", "output": str(tmp_path), "model": "logistic"}
    more |= {"clients": 5, "rounds": 1, "head_epochs": 1}
    simulate(f"{module}:X", **more)
    base = f"{module}:Rep"
    simulate("srpfl", srpfl_base=base, **more, fraction=1.0, initial_nodes=5)
    marker.unlink()
    assert code_of(load_run, tmp_path / "X") == "algorithm"
    named = {"algorithm": f"{module}:X"}
    assert load_run(tmp_path / "X", **named).classes == tuple("0123456789")
    predictor = load_run(tmp_path / "srpfl", "000001", srpfl_base=base)
    assert predictor.classes == tuple("0123456789")
    assert_says("unknown setting 'base'", load_run, tmp_path / "X", **named, base=base)


def test_only_harmless_strings_of_a_file_are_used():
    texts = {name for name, value in defaults().items() if isinstance(value, str)}
    assert {"model", "device", "aggregation"} <= facts("safe") < texts
    written = dict.fromkeys(texts - facts("safe"), "os:system")
    # Settings of a custom class
    written |= {"notes": "/private", "host": "example.org"}
    kept, withheld = separate(written, {})
    assert withheld == written
    assert not {"os:system", "/private", "example.org"} & {*kept.values()}


def test_a_data_dir_in_a_file_may_be_anything(tmp_path):
    for place in ("~nobody-here/images", "/private\0"):
        path = checkpoint(tmp_path / "file", {"algorithm": "fedavg", "data-dir": place})
        assert code_of(load_run, path) == "arrays"
