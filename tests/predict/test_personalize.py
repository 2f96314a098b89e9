"""Devices that join after the training can fit personal parameters."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from client_messages import new_context
from command_line import one_error
from disks import full
from PIL import Image
from refusals import assert_says
from safetensors.numpy import load_file

from flwr_frl import simulate
from flwr_frl.clients.base import Client
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.messages import FROZEN_BYTES, FROZEN_DIGEST
from flwr_frl.common.settings import resolve
from flwr_frl.predict import load_run
from flwr_frl.predict.__main__ import main as predict
from flwr_frl.predict.personalize import personalize
from flwr_frl.predict.personalize.__main__ import main
from flwr_frl.strategies import server_app
from flwr_frl.strategies.grids.simulation import InlineGrid

BRIGHTNESS = np.array([30, 110, 200])


def write(root: Path, classes: int, seed: int) -> Path:
    """Write images for the task ``arrays``, whose brightness depends on the class."""
    rng = np.random.default_rng(seed)
    root.mkdir()
    for part, count in (("train", 30), ("test", 12)):
        labels = np.arange(count) % classes
        means = BRIGHTNESS[labels][:, None, None]
        images = rng.normal(means, 15, (count, 8, 8)).clip(0, 255)
        np.savez(root / f"{part}.npz", images=images.astype("u1"), labels=labels)
    return root


def train(root: Path, algorithm: str, **more) -> Path:
    """Train on two devices; return the folder of the checkpoint."""
    usual = {"task": "arrays", "model": "digits-cnn", "algorithm": algorithm}
    usual |= {"cache-dir": str(root / "cache"), "output": str(root / "results")}
    usual |= {"fraction-train": 1.0, "num-server-rounds": 2, "learning-rate": 0.1}
    usual |= {"head-epochs": 2, "representation-epochs": 3, "newcomer-epochs": 30}
    settings = resolve({**usual, **more})
    grid = InlineGrid(make_app(settings), 2)
    for node, name in enumerate(("pi-1", "pi-2"), 1):
        data = root / name
        if not data.exists():
            write(data, 3, node)
        grid.contexts[node].node_config = {
            "client-name": name,
            "data-dir": str(data),
            "state-dir": str(root / "states" / name),
        }
    server_app.run(grid, settings)
    return root / "results" / algorithm


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("devices")


def test_personalization_applies_the_privacy_of_the_run(tmp_path):
    noise = {"dp-noise": 1.0, "dp-clip": 1.0, "dp-delta": 1e-3}
    few = {"model": "mlp-2", "head-epochs": 1, "representation-epochs": 1}
    settings = {**few, **noise, "newcomer-epochs": 4}
    folder = train(tmp_path, "fedrep", **settings)
    data, states = write(tmp_path / "new", 3, 9), tmp_path / "own"
    fitted = personalize(folder, str(data), "pi-9", str(states))
    account = json.loads((fitted.path.parent / "privacy.json").read_text())
    # Four epochs of three steps, with 10 of 30 examples per batch
    assert account == {"noise": [1.0], "rate": [10 / 30], "steps": [4 * 3]}


@pytest.fixture(scope="module")
def fedrep(root):
    return train(root, "fedrep")


def accuracy(loaded, data: Path) -> float:
    """Return the accuracy of a loaded model on the test images."""
    classifier, card = loaded
    with np.load(data / "test.npz") as test:
        images = torch.from_numpy(test["images"])[..., None]
        with torch.no_grad():
            best = classifier(images).argmax(1)
        assert card.classes == ("0", "1", "2")
        return float(np.mean(best.numpy() == test["labels"]))


# FedAS does not fit its prototypes. FedAMP has no personal groups: its clients' models
# are on the server. A device of pFedFDA computes its head from the received Gaussians.
@pytest.mark.parametrize(
    "algorithm", ["fedrep", "flute", "ditto", "apfl", "fedas", "fedamp", "pfedfda"]
)
def test_predict_uses_the_fitted_parameters(root, tmp_path, algorithm):
    checkpoint = train(root, algorithm)
    before = (checkpoint / "checkpoint.safetensors").read_bytes()
    data = write(tmp_path / "late", 3, 7)
    state_dir = str(tmp_path / "state")
    fitted = personalize(checkpoint, str(data), "late", state_dir)
    assert (fitted.num_examples, fitted.num_test_examples) == (30, 12)
    loaded = load_run(checkpoint, "late", state_dir, str(data))
    assert accuracy(loaded, data) == fitted.metrics["accuracy"]
    # The chance level is 1/3.
    assert fitted.metrics["accuracy"] > 0.5
    assert (checkpoint / "checkpoint.safetensors").read_bytes() == before


def test_the_representation_is_unchanged_and_the_head_is_fitted(fedrep, tmp_path):
    # The device has two of the three classes of the training.
    data = write(tmp_path / "late", 2, 7)
    fitted = personalize(fedrep, str(data), "late", str(tmp_path / "state"))
    model = load_run(fedrep, "late", str(tmp_path / "state"))[0].model
    shared = load_file(fedrep / "checkpoint.safetensors")
    for name, value in model.representation.state_dict().items():
        sent = shared[f"arrays/representation.{name}"]
        np.testing.assert_array_equal(value.numpy(), sent)
    kept = load_file(fitted.path)
    assert set(kept) == {"head.weight", "head.bias"}
    assert len(kept["head.bias"]) == 2
    np.testing.assert_array_equal(
        model.head.weight.detach().numpy(), kept["head.weight"]
    )
    # A later run continues from it.
    where = {"directory": fitted.path.parent, "client": "late"}
    context = new_context()
    state = PersonalState(context, acknowledged=0, run="next", **where)
    np.testing.assert_array_equal(state.load()["head.bias"], kept["head.bias"])
    # Fitting again gives the same head; it does not depend on saved states.
    again = personalize(fedrep, str(data), "late", str(tmp_path / "state"))
    np.testing.assert_array_equal(load_file(again.path)["head.bias"], kept["head.bias"])


def test_the_command_line(fedrep, tmp_path, capsys):
    data = write(tmp_path / "pi-9", 3, 7)
    arguments = ["--checkpoint", str(fedrep), "--data-dir", str(data)]
    assert main(arguments) == 0
    line, command = capsys.readouterr().out.splitlines()
    assert line.startswith("fitted on 30 examples, accuracy ")
    options = f"--checkpoint {fedrep} --client-name pi-9 --data-dir {data}"
    assert command.endswith(options)
    # By default, the state is saved next to those of simulated clients.
    assert load_run(fedrep, "pi-9")[1].classes == ("0", "1", "2")


def test_a_disk_that_cannot_be_written_is_an_error(
    fedrep, tmp_path, monkeypatch, capsys
):
    data = write(tmp_path / "pi-9", 3, 7)
    arguments = ["--checkpoint", str(fedrep), "--data-dir", str(data)]
    arguments += ["--state-dir", str(tmp_path / "state")]
    # The second time the file of the first fit stays.
    assert main(arguments) == 0
    monkeypatch.setattr("flwr_frl.clients.device.state.write_atomically", full)
    capsys.readouterr()
    assert main(arguments) == 2
    assert "cannot be written" in capsys.readouterr().err


# The models of both depend on the device's data.
@pytest.mark.parametrize("algorithm", ["pfedfda", "fedala"])
def test_the_printed_command_predicts(root, tmp_path, capsys, algorithm):
    checkpoint, data = train(root, algorithm), write(tmp_path / "pi-9", 3, 7)
    Image.new("L", (8, 8), int(BRIGHTNESS[2])).save(tmp_path / "bright.png")
    capsys.readouterr()
    assert main(["--checkpoint", str(checkpoint), "--data-dir", str(data)]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:4] == ["python", "-m", "flwr_frl.predict", "FILES"]
    assert predict([str(tmp_path / "bright.png"), *command[4:]]) == 0
    assert capsys.readouterr().out.split("\t")[1] == "2"


def test_bad_input_gives_a_one_line_error(fedrep, root, tmp_path, capsys):
    data = write(tmp_path / "late", 3, 7)
    others = write(tmp_path / "others", 2, 7)
    fedavg, flute = train(root, "fedavg"), train(root, "flute")
    dpsgd = train(root, "dpsgd", graph="complete")
    capsys.readouterr()
    for checkpoint, folder, name, line in (
        (fedrep, data, "pi-1", "client-name is 'pi-1', and that client has trained"),
        (fedavg, data, "late", "algorithm 'fedavg' leaves nothing to fit to a device"),
        (dpsgd, data, "late", "'dpsgd' leaves no model for devices that come after"),
        (flute, others, "late", "has the classes 0, 1; they must be those of the"),
        (fedrep, tmp_path / "no", "late", "data-dir is"),
        (fedrep, "x" * 400, "late", "data-dir is"),
        (fedrep, "~nobody-here/images", "late", "data-dir is"),
        (tmp_path / "no", data, "late", "cannot be read"),
    ):
        arguments = ["--checkpoint", str(checkpoint), "--data-dir", str(folder)]
        arguments += ["--client-name", name, "--state-dir", str(tmp_path / "state")]
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert line in one_error(err)
    assert not (tmp_path / "state").exists()
    assert main(["--data-dir", str(data)]) == 2
    assert "--checkpoint" in capsys.readouterr().err


def test_a_client_name_cannot_leave_the_state_folder(fedrep, tmp_path):
    data = write(tmp_path / "late", 3, 7)
    fitted = personalize(fedrep, str(data), "../../out", str(tmp_path / "state"))
    assert fitted.path.resolve().is_relative_to((tmp_path / "state").resolve())
    beside = personalize(fedrep, str(data), "../../out")
    assert beside.path.resolve().is_relative_to((fedrep / "clients").resolve())


@pytest.mark.parametrize("algorithm", ["fedavg-ft", "fedbabu", "hf-maml"])
def test_fine_tuning_before_prediction_uses_the_device_s_data(root, algorithm):
    run = train(root, algorithm)
    late, data = write(root / f"late-{algorithm}", 3, 7), root / "pi-2"
    model, _ = load_run(run, "pi-2", data_dir=str(data))
    tested = np.load(data / "test.npz")
    with torch.no_grad():
        outputs = model(torch.from_numpy(tested["images"])[..., None])
        loss = torch.nn.functional.cross_entropy(
            outputs, torch.from_numpy(tested["labels"])
        )
    # The loss equals that of the last evaluation of the run.
    metrics = json.loads((run / "clients.json").read_text())["pi-2"]
    assert loss.item() == pytest.approx(metrics["loss"], rel=1e-5)
    # The model of another device differs and does not overwrite the first one.
    images = torch.from_numpy(tested["images"])[..., None]
    other, _ = load_run(run, "pi-9", data_dir=str(late))
    assert not torch.allclose(other(images), outputs)
    assert torch.equal(model(images), outputs)
    for arguments, line in (
        (("pi-2",), "data-dir is ''; expected a directory with train.npz"),
        (("", "", str(data)), "client-name is ''; expected the device's name"),
    ):
        assert_says(line, load_run, run, *arguments)


def test_a_head_of_another_algorithm_is_refused(root, tmp_path):
    data, states = write(tmp_path / "late", 3, 7), str(tmp_path / "state")
    fedrep, fedper = (train(root, n, experiment="x") for n in ("fedrep", "fedper"))
    personalize(fedper, str(data), "late", states)
    load_run(fedper, "late", states)
    assert_says("FedPerClient, not ", load_run, fedrep, "late", states)


def test_a_device_of_private_training_is_not_trained_without_noise(root, tmp_path):
    run, data = train(root, "fedavg-ft", experiment="x"), str(root / "pi-2")
    (tmp_path / "x" / "pi-2").mkdir(parents=True)
    account = {"noise": [1.0], "rate": [0.5], "steps": [9]}
    (tmp_path / "x" / "pi-2" / "privacy.json").write_text(json.dumps(account))
    line = "counts private training, and the run has"
    assert_says(line, load_run, run, "pi-2", str(tmp_path), data)


def test_another_frozen_part_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        frozen = {FROZEN_DIGEST: "0123456789abcdef", FROZEN_BYTES: 4}
        patched.setattr(Client, "_about_frozen", lambda self: frozen)
        folder = train(tmp_path, "fedrep")
    data = write(tmp_path / "new", 3, 9)
    call = (str(data), "pi-9", str(tmp_path / "own"))
    assert_says("another frozen part", personalize, folder, *call)
    # An algorithm that sends clients several models
    line = "simulate new clients with new-clients"
    assert_says(line, personalize, train(tmp_path, "fedfomo"), *call)


def test_divergence_is_a_one_line_error(root, tmp_path, capsys):
    still = {"head-epochs": 0, "representation-epochs": 0, "learning-rate": 1e30}
    run = train(root, "fedrep", **still)
    data = write(tmp_path / "late", 3, 7)
    capsys.readouterr()
    arguments = ["--checkpoint", str(run), "--data-dir", str(data)]
    assert main([*arguments, "--state-dir", str(tmp_path / "state")]) == 2
    one_error(capsys.readouterr().err)


def test_a_task_that_reads_no_data_of_a_device_is_refused(tmp_path):
    data = write(tmp_path / "late", 3, 7)
    settings = {"output": str(tmp_path / "results"), "rounds": 1, "head_epochs": 1}
    simulate("fedrep", "inline", num_clients=5, fraction=0.4, **settings)
    call = (personalize, tmp_path / "results" / "fedrep", str(data), "late")
    assert_says("and task 'digits' reads none: it has", *call)
