"""Devices that join after the training can fit personal parameters."""

import json
from pathlib import Path

import numpy as np
import pytest
from animals import train_on
from client_messages import new_context
from disks import full
from pictures import write_images
from PIL import Image
from refusals import assert_says, code_of
from safetensors.numpy import load_file

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.errors import TrainingDivergedError
from flwr_frl.common.messages import FROZEN_DIGEST
from flwr_frl.common.settings import resolve
from flwr_frl.predict import load_run, personalize

BRIGHTNESS = np.array([30, 110, 200])


def write(root: Path, classes: int = 3, seed: int = 7) -> Path:
    """Write a folder of images, whose brightness depends on the class."""
    rng = np.random.default_rng(seed)
    for part, count in (("train", 30), ("test", 12)):
        for label, mean in enumerate(BRIGHTNESS[:classes]):
            images = rng.normal(mean, 15, (count // classes, 8, 8)).clip(0, 255)
            write_images(root / part / str(label), images.astype("u1"))
    return root


def images_in_test(root: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the test images of a folder, and their labels."""
    paths = sorted((root / "test").glob("*/*"))
    images = np.stack([np.asarray(Image.open(path)) for path in paths])
    return images[..., None], np.array([int(path.parent.name) for path in paths])


def train(root: Path, algorithm: str, **more) -> Path:
    """Train on two devices; return the folder of the checkpoint."""
    usual = {"task": "image-folder", "model": "digits-cnn", "algorithm": algorithm}
    usual |= {"cache-dir": str(root / "cache"), "output": str(root / "results")}
    usual |= {"fraction-train": 1.0, "num-server-rounds": 2, "learning-rate": 0.1}
    usual |= {"head-epochs": 2, "representation-epochs": 3, "newcomer-epochs": 30}
    settings = resolve({**usual, **more})
    places = {"pi-1": root / "pi-1", "pi-2": root / "pi-2"}
    for seed, place in enumerate(places.values(), 10):
        if not place.exists():
            write(place, 3, seed)
    return train_on(places, settings, root / "states")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("devices")


@pytest.fixture(scope="module")
def fedrep(root):
    return train(root, "fedrep")


@pytest.fixture
def late(tmp_path):
    """The data of a device that arrives after the training."""
    return write(tmp_path / "late")


def test_personalization_applies_the_privacy_of_the_run(tmp_path, late):
    noise = {"dp-noise": 1.0, "dp-clip": 1.0, "dp-delta": 1e-3}
    few = {"model": "mlp-2", "head-epochs": 1, "representation-epochs": 1}
    folder = train(tmp_path, "fedrep", **few, **noise, **{"newcomer-epochs": 4})
    fitted = personalize(folder, late, "pi-9", tmp_path / "own")
    account = json.loads((fitted.path.parent / "privacy.json").read_text())
    # Four epochs of three steps, with 10 of 30 examples per batch
    assert account == {"noise": [1.0], "rate": [10 / 30], "steps": [4 * 3]}


# FedAS does not fit its prototypes. FedAMP has no personal groups: its clients' models
# are on the server. A device of pFedFDA computes its head from the received Gaussians.
@pytest.mark.parametrize(
    "algorithm", ["fedrep", "flute", "ditto", "apfl", "fedas", "fedamp", "pfedfda"]
)
def test_predict_uses_the_fitted_parameters(root, tmp_path, late, algorithm):
    checkpoint = train(root, algorithm)
    before = (checkpoint / "checkpoint.safetensors").read_bytes()
    fitted = personalize(checkpoint, late, "late", tmp_path / "state")
    assert (fitted.num_examples, fitted.num_test_examples) == (30, 12)
    predictor = load_run(checkpoint, "late", tmp_path / "state", data_dir=late)
    images, labels = images_in_test(late)
    right = np.array(predictor(images).classes) == labels.astype(str)
    assert right.mean() == fitted.metrics["accuracy"]
    # The chance level is 1/3.
    assert fitted.metrics["accuracy"] > 0.5
    assert (checkpoint / "checkpoint.safetensors").read_bytes() == before


def test_the_representation_is_unchanged_and_the_head_is_fitted(
    fedrep, tmp_path, monkeypatch
):
    # The device has two of the three classes of the training.
    data, states = write(tmp_path / "two", 2), tmp_path / "state"
    fitted = personalize(fedrep, data, "late", states)
    model = load_run(fedrep, "late", states).model
    shared = load_file(fedrep / "checkpoint.safetensors")
    for name, value in model.representation.state_dict().items():
        sent = shared[f"arrays/representation.{name}"]
        np.testing.assert_array_equal(value.numpy(), sent)
    kept = load_file(fitted.path)
    assert set(kept) == {"head.weight", "head.bias"}
    assert len(kept["head.bias"]) == 2
    np.testing.assert_array_equal(model.head.bias.detach().numpy(), kept["head.bias"])
    # A later run continues from it.
    where = {"directory": fitted.path.parent, "client": "late"}
    state = PersonalState(new_context(), acknowledged=0, run="next", **where)
    np.testing.assert_array_equal(state.load()["head.bias"], kept["head.bias"])
    # Fitting again gives the same head; it does not depend on saved states.
    again = personalize(fedrep, data, "late", states)
    np.testing.assert_array_equal(load_file(again.path)["head.bias"], kept["head.bias"])
    monkeypatch.setattr("flwr_frl.clients.device.state.write_atomically", full)
    assert code_of(personalize, fedrep, data, "late", states) == "state-dir"


# The models of two of them depend on the device's data.
@pytest.mark.parametrize("algorithm", ["fedrep", "pfedfda", "fedala"])
def test_a_fitted_model_predicts(root, tmp_path, late, algorithm):
    checkpoint, bright = train(root, algorithm), tmp_path / "bright.png"
    Image.new("L", (8, 8), int(BRIGHTNESS[2])).save(bright)
    assert personalize(checkpoint, late, "late", tmp_path).num_examples == 30
    predictor = load_run(checkpoint, "late", tmp_path, data_dir=late)
    assert predictor(bright).classes == ["2"]


def test_bad_input_gives_a_one_line_error(fedrep, root, tmp_path, late):
    others = write(tmp_path / "others", 2)
    fedavg, flute = train(root, "fedavg"), train(root, "flute")
    dpsgd, apple = train(root, "dpsgd", graph="complete"), train(root, "apple")
    for checkpoint, folder, name, line in (
        (fedrep, late, "pi-1", "client-name is 'pi-1'"),
        (fedrep, late, "", "client-name is ''"),
        (fedavg, late, "late", "algorithm is 'fedavg'; expected one with personal"),
        (dpsgd, late, "late", "algorithm is 'dpsgd'"),
        (apple, late, "late", "algorithm is 'apple'"),
        (flute, others, "late", "data-dir is"),
        (fedrep, tmp_path / "no", "late", "data-dir is"),
        (fedrep, "x" * 400, "late", "data-dir is"),
        (fedrep, "~nobody-here/images", "late", "data-dir is"),
        (fedrep, "", "late", "data-dir is"),
        (tmp_path / "no", late, "late", "no' cannot be read: "),
        ("", late, "late", "'.' cannot be read: "),
    ):
        state = tmp_path / "state"
        assert_says(line, personalize, checkpoint, folder, name, state)
    still = {"head-epochs": 0, "representation-epochs": 0, "learning-rate": 1e30}
    diverging = train(root, "fedper", **still)
    with pytest.raises(TrainingDivergedError):
        personalize(diverging, late, "late", tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_a_client_name_cannot_leave_the_state_folder(fedrep, tmp_path, late):
    fitted = personalize(fedrep, late, "../../out", tmp_path / "state")
    assert fitted.path.resolve().is_relative_to((tmp_path / "state").resolve())
    beside = personalize(fedrep, late, "../../out")
    assert beside.path.resolve().is_relative_to((fedrep / "clients").resolve())


@pytest.mark.parametrize("algorithm", ["fedavg-ft", "fedbabu", "hf-maml"])
def test_fine_tuning_before_prediction_uses_the_device_s_data(root, late, algorithm):
    run, data = train(root, algorithm), root / "pi-2"
    predictor = load_run(run, "pi-2", data_dir=data)
    images, labels = images_in_test(data)
    outputs = predictor(images).outputs
    loss = -np.log(outputs[np.arange(len(labels)), labels]).mean()
    # The loss equals that of the last evaluation of the run.
    metrics = json.loads((run / "clients.json").read_text())["pi-2"]
    assert loss == pytest.approx(metrics["loss"], rel=1e-4)
    # The model of another device differs and does not overwrite the first one.
    other = load_run(run, "pi-9", data_dir=late)
    assert not np.allclose(other(images).outputs, outputs)
    assert np.array_equal(predictor(images).outputs, outputs)
    assert code_of(load_run, run, "pi-2") == "data-dir"
    assert code_of(load_run, run, data_dir=data) == "client-name"


def test_a_head_of_another_algorithm_is_refused(root, tmp_path, late):
    fedrep, fedper = (train(root, n, experiment="x") for n in ("fedrep", "fedper"))
    personalize(fedper, late, "late", tmp_path / "state")
    load_run(fedper, "late", tmp_path / "state")
    assert code_of(load_run, fedrep, "late", tmp_path / "state") == "state-dir"


def test_a_device_of_private_training_is_not_trained_without_noise(root, tmp_path):
    run, data = train(root, "fedavg-ft", experiment="x"), str(root / "pi-2")
    (tmp_path / "x" / "pi-2").mkdir(parents=True)
    account = {"noise": [1.0], "rate": [0.5], "steps": [9]}
    (tmp_path / "x" / "pi-2" / "privacy.json").write_text(json.dumps(account))
    line = "counts private training, and the run has"
    assert_says(line, load_run, run, "pi-2", tmp_path, data_dir=data)


def test_another_frozen_part_is_refused(tmp_path, late, monkeypatch):
    with monkeypatch.context() as patched:
        frozen = {FROZEN_DIGEST: "0123456789abcdef"}
        patched.setattr(Client, "_about_frozen", lambda self: frozen)
        folder = train(tmp_path, "fedrep")
    assert code_of(personalize, folder, late, "pi-9") == "weights"
