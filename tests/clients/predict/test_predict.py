"""The personalised model in use: from a run's files to classes of images."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from PIL import Image
from safetensors.numpy import load_file, save_file

from clients.client_app import make_app
from clients.device.card import ModelCard
from clients.device.state import PersonalState
from clients.predict import classify, export, load_model, load_run, predict
from clients.predict.__main__ import main
from simulation import run
from strategies import server_app
from strategies.grids.simulation import InlineGrid
from task.models import build_model
from task.settings import SettingsError, resolve

CLASSES = {"anna": ("ant", "bee"), "bob": ("bee", "cat", "dog")}
BRIGHTNESS = {"ant": 30, "bee": 90, "cat": 150, "dog": 220}


def write_images(root: Path, classes: tuple[str, ...], seed: int) -> None:
    """Write noisy images whose class is their brightness, hard to tell in part."""
    rng = np.random.default_rng(seed)
    for part, count in (("train", 8), ("test", 5)):
        for name in classes:
            for i in range(count):
                pixels = rng.normal(BRIGHTNESS[name], 40, (8, 8, 3)).clip(0, 255)
                path = root / part / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(path)


def settings_of(tmp_path: Path, **more):
    return resolve(
        {
            "task": "image-folder",
            "model": "digits-cnn",
            "cache-dir": str(tmp_path / "cache"),
            "output": str(tmp_path / "results"),
            "num-clients": 2,
            "fraction-train": 1.0,
            "num-server-rounds": 3,
            "checkpoint-every": 2,
            "head-epochs": 2,
            "learning-rate": 0.03,
            **{name.replace("_", "-"): value for name, value in more.items()},
        }
    )


def accuracy(loaded, root: Path) -> float:
    """Return the accuracy on a folder's test images, by their folders' names."""
    images = sorted((root / "test").glob("*/*.png"))
    found = [name for _, name, _ in classify(*loaded, images)]
    return float(np.mean([n == p.parent.name for n, p in zip(found, images, strict=1)]))


def reported(output: Path) -> dict[str, float]:
    clients = json.loads((output / "clients.json").read_text())
    return {name: about["accuracy"] for name, about in clients.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for seed, (name, classes) in enumerate(CLASSES.items()):
        write_images(root / name, classes, seed)
    return root


@pytest.fixture(scope="module")
def devices(folders, tmp_path_factory):
    """FedRep on two devices with own folders, own classes and own state."""
    tmp_path = tmp_path_factory.mktemp("devices")
    settings = settings_of(tmp_path, algorithm="fedrep", experiment="animals")
    grid = InlineGrid(make_app(settings), 2)
    for node, name in enumerate(CLASSES, 1):
        grid.contexts[node].node_config = {
            "client-name": name,
            "data-dir": str(folders / name),
            "state-dir": str(tmp_path / name),
        }
    server_app.run(grid, settings)
    return tmp_path


def of_device(root: Path, name: str):
    return load_run(root / "results" / "fedrep", name, str(root / name))


# The same as the model's own evaluation


@pytest.mark.parametrize(
    "algorithm",
    [
        "fedrep",
        "flute",
        "fedavg",
        "lg-fedavg",
        "local",
        "srpfl-flute",
        # With slots beside the model.
        "scaffold",
        "ditto",
        "apfl",
        "fedproto",
        "fedala",
        "feddbe",
        "l2gd",
        "fedrod",
        "fedcp",
    ],
)
def test_predictions_are_those_of_the_evaluation(algorithm, folders, tmp_path):
    settings = settings_of(tmp_path, algorithm=algorithm, data_dir=str(folders))
    run(algorithm, settings, "inline")
    output = tmp_path / "results" / algorithm
    expected = reported(output)
    # Clients go by their folders' names, in what is written and here.
    assert list(expected) == sorted(CLASSES)
    for client, folder in zip(expected, sorted(CLASSES), strict=True):
        loaded = load_run(output, client)
        assert loaded[1].classes == ("ant", "bee", "cat", "dog")
        assert accuracy(loaded, folders / folder) == pytest.approx(expected[client])
    # Neither all right nor chance: then anything would pass.
    assert 0.2 < np.mean(list(expected.values())) < 1


def test_clients_go_by_their_folders_names_in_errors(folders, tmp_path):
    settings = settings_of(tmp_path, algorithm="fedper", data_dir=str(folders))
    run("fedper", settings, "inline")
    output = tmp_path / "results" / "fedper"
    with pytest.raises(SettingsError, match="unknown client 'zoe'; known: anna, bob"):
        load_run(output, "zoe")
    shutil.rmtree(output / "clients")
    with pytest.raises(SettingsError, match="client 'anna' has nothing of this run"):
        load_run(output, "anna")


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_a_global_model_asks_for_no_client(algorithm, folders, tmp_path):
    settings = settings_of(tmp_path, algorithm=algorithm, data_dir=str(folders))
    run(algorithm, settings, "inline")
    output = tmp_path / "results" / algorithm
    nobody, _ = load_run(output)
    somebody, _ = load_run(output, "000001")
    for name, value in nobody.state_dict().items():
        assert torch.equal(value, somebody.state_dict()[name])


def test_devices_have_their_own_classes(devices, folders):
    output = devices / "results" / "fedrep"
    expected = reported(output)
    for name, classes in CLASSES.items():
        classifier, card = of_device(devices, name)
        assert card.classes == classes
        assert classifier.model.head.out_features == len(classes)
        found = accuracy((classifier, card), folders / name)
        assert found == pytest.approx(expected[name])
    assert 0.5 < np.mean(list(expected.values())) <= 1
    # Only the heads differ.
    one, other = (of_device(devices, name)[0].model for name in CLASSES)
    shared = load_file(output / "checkpoint.safetensors")
    for name, value in one.representation.state_dict().items():
        assert torch.equal(value, other.representation.state_dict()[name])
        sent = shared[f"arrays/representation.{name}"]
        np.testing.assert_array_equal(value.numpy(), sent)


def test_a_device_of_flute_knows_its_classes_from_its_data(folders, tmp_path):
    settings = settings_of(tmp_path, algorithm="flute")
    grid = InlineGrid(make_app(settings), 2)
    for node, name in ((1, "x"), (2, "y")):
        grid.contexts[node].node_config = {
            "client-name": name,
            "data-dir": str(folders / "bob"),
        }
    server_app.run(grid, settings)
    output = tmp_path / "results" / "flute"
    expected = reported(output)
    for name in ("x", "y"):
        loaded = load_run(output, name, data_dir=str(folders / "bob"))
        assert loaded[1].classes == CLASSES["bob"]
        assert accuracy(loaded, folders / "bob") == pytest.approx(expected[name])
    heads = [
        load_run(output, name, data_dir=str(folders / "bob"))[0].model.head.weight
        for name in ("x", "y")
    ]
    assert not torch.equal(*heads)


def test_devices_with_arrays_of_their_own(tmp_path):
    settings = settings_of(tmp_path, algorithm="fedrep", task="arrays")
    grid = InlineGrid(make_app(settings), 2)
    rng = np.random.default_rng(1)
    for node, count in ((1, 2), (2, 3)):
        root = tmp_path / f"data-{node}"
        root.mkdir()
        for part in ("train", "test"):
            labels = np.arange(12) % count
            images = rng.normal(60 + 90 * labels[:, None, None], 20, (12, 8, 8))
            pixels = images.clip(0, 255).astype(np.uint8)
            np.savez(root / f"{part}.npz", images=pixels, labels=labels)
        grid.contexts[node].node_config = {
            "client-name": f"pi-{node}",
            "data-dir": str(root),
            "state-dir": str(tmp_path / "state"),
        }
    server_app.run(grid, settings)
    for node, count in ((1, 2), (2, 3)):
        output = tmp_path / "results" / "fedrep"
        classifier, card = load_run(output, f"pi-{node}", str(tmp_path / "state"))
        assert card.classes == tuple("012")[:count]
        assert card.shape == (1, 8, 8)
        with np.load(tmp_path / f"data-{node}" / "test.npz") as test:
            pixels = torch.from_numpy(test["images"])[..., None]
            right = classifier(pixels).argmax(1).numpy() == test["labels"]
        expected = reported(output)[f"pi-{node}"]
        assert right.mean() == pytest.approx(expected)
        # A photo is made grey, as the model needs it.
        photo = Image.fromarray(pixels[0, ..., 0].numpy()).convert("RGB")
        photo.save(tmp_path / "photo.png")
        ((_, name, _),) = classify(classifier, card, [tmp_path / "photo.png"])
        assert name == card.classes[int(classifier(pixels[:1]).argmax())]


def test_devices_whose_data_do_not_fit_are_refused_in_one_line(
    folders, tmp_path, caplog
):
    settings = settings_of(tmp_path, algorithm="fedrep")
    grid = InlineGrid(make_app(settings), 5)
    places = {"anna": folders / "anna", "bob": folders / "bob"}
    for name, pixels in (
        ("grey", np.zeros((8, 8), np.uint8)),
        ("large", np.zeros((16, 16, 3), np.uint8)),
    ):
        places[name] = tmp_path / name
        for part in ("train", "test"):
            (places[name] / part / "ant").mkdir(parents=True)
            Image.fromarray(pixels).save(places[name] / part / "ant" / "0.png")
    places["nobody"] = tmp_path / "nobody"
    for context, (name, place) in zip(
        grid.contexts.values(), places.items(), strict=True
    ):
        context.node_config = {"client-name": name, "data-dir": str(place)}
    server_app.run(grid, settings)
    output = tmp_path / "results" / "fedrep"
    rows = [json.loads(r) for r in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows] == [2, 2, 2]
    lines = [r.getMessage() for r in caplog.records if "takes no part" in r.message]
    said = {n: {line for line in lines if f"client {n} " in line} for n in places}
    assert not said["anna"] | said["bob"]
    for name, words in (
        ("grey", "its inputs are 1 x 8 x 8"),
        ("large", "its inputs are 3 x 16 x 16"),
        ("nobody", "it must be a directory with train/<class>/*"),
    ):
        (line,) = said[name]
        assert words in line
        assert "\n" not in line
        # The server says it once, the node whenever it is asked.
        levels = [r.levelname for r in caplog.records if r.getMessage() == line]
        assert levels.count("WARNING") == 1
        assert levels.count("ERROR") >= 1


# Which version of the own part


def test_a_round_that_never_counted_is_not_used_and_nothing_is_changed(
    devices, tmp_path
):
    shutil.copytree(devices, tmp_path / "copy")
    root = tmp_path / "copy"
    (last,) = (root / "anna" / "animals" / "anna").glob("*-00000003.safetensors")
    later = last.with_name(last.name.replace("3.safe", "4.safe"))
    later.write_bytes(b"half a file")
    inherited = last.with_name("older-00000009.safetensors")
    inherited.write_bytes(b"of a run before")
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    classifier, _ = of_device(root, "anna")
    expected = load_file(last)["head.weight"]
    np.testing.assert_array_equal(classifier.model.head.weight.detach(), expected)
    assert before == {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_the_head_of_an_earlier_run_counts_until_there_is_a_newer_one(
    devices, tmp_path
):
    shutil.copytree(devices, tmp_path / "copy")
    root = tmp_path / "copy"
    own = root / "anna" / "animals" / "anna"
    # Its rounds have nothing to do with those of the run.
    for path in list(own.iterdir()):
        path.rename(path.with_name("earlier-9" + path.name[14:]))
    newest = max(own.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    classifier, _ = of_device(root, "anna")
    expected = load_file(newest)["head.weight"]
    np.testing.assert_array_equal(classifier.model.head.weight.detach(), expected)


def test_a_head_for_other_classes_is_not_used(tmp_path, caplog):
    def state(classes):
        context = Context(1, 1, {}, RecordDict(), {})
        about = {"classes": json.dumps(classes)}
        return PersonalState(context, tmp_path, client="a", run="r", about=about)

    arrays = {"head.weight": np.ones((2, 3), np.float32)}
    state(["ant", "bee"]).save(arrays, 1)
    assert state(["ant", "bee"]).load() is not None
    # As many classes, but the second output would now mean something else.
    assert state(["ant", "cat"]).load() is None
    assert 'it is for the classes ["ant", "bee"]' in caplog.text
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]


def test_whoever_reads_the_predictions_may_stop(devices, folders, nobody_reads):
    run = ["--checkpoint", str(devices / "results" / "fedrep"), "--client-name", "bob"]
    run += ["--state-dir", str(devices / "bob")]
    with nobody_reads():
        assert main([str(folders / "bob" / "test" / "cat"), *run]) == 0


# Export


@pytest.mark.e2e
def test_an_exported_model_needs_nothing_else(devices, folders, tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    run = ["--checkpoint", str(devices / "results" / "fedrep"), "--client-name", "bob"]
    run += ["--state-dir", str(devices / "bob")]
    images = str(folders / "bob" / "test" / "cat")
    assert main([images, *run, "--export", str(path)]) == 0
    first = capsys.readouterr().out
    assert main([images, "--model", str(path)]) == 0
    assert capsys.readouterr().out == first
    lines = [line.split("\t") for line in first.splitlines()]
    assert [line[0] for line in lines] == [f"{images}/{i}.png" for i in range(5)]
    assert {line[1] for line in lines} <= set(CLASSES["bob"])
    assert all(1 / 3 <= float(line[2]) <= 1 for line in lines)
    # Bit by bit, and in a process that never saw the run.
    pixels = torch.randint(0, 256, (7, 8, 8, 3), dtype=torch.uint8)
    one, other = of_device(devices, "bob"), load_model(path)
    assert one[1] == other[1]
    assert torch.equal(one[0](pixels), other[0](pixels))
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(path, alone)
    shutil.copytree(images, alone / "cat")
    result = subprocess.run(
        [sys.executable, "-m", "clients.predict", "cat", "--model", path.name],
        cwd=alone,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert result.stdout == first.replace(images, "cat")


MODELS = [("digits-cnn", 8, 3), ("cifar10-cnn", 16, 3), ("resnet20", 8, 1)]


@pytest.mark.parametrize(("name", "size", "channels"), [*MODELS, ("mlp", 8, 1)])
def test_torch_export_gives_the_same_logits(name, size, channels, tmp_path):
    torch.manual_seed(0)
    shape = (channels, size, size)
    card = ModelCard(
        name, shape, ("a", "b", "c"), (128.0,) * channels, (60.0,) * channels, 1, ""
    )
    model = build_model(name, shape, 3)
    # As after training, statistics of batch norms included.
    model.train()(torch.randn(4, *shape))
    classifier = card.classifier(model.state_dict())
    for suffix in ("pt2", "safetensors"):
        export(classifier, card, tmp_path / f"model.{suffix}")
    extra = {"card.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra).module()
    assert ModelCard.from_metadata(json.loads(extra["card.json"])) == card
    again = load_model(tmp_path / "model.safetensors")
    assert again[1] == card
    for n in (1, 2, 9):
        pixels = torch.randint(0, 256, (n, size, size, channels), dtype=torch.uint8)
        with torch.no_grad():
            expected = classifier(pixels)
            assert torch.equal(again[0](pixels), expected)
            torch.testing.assert_close(program(pixels), expected, atol=1e-6, rtol=0)
            # By hand, as in training.
            inputs = ((pixels.float() - 128) / 60).permute(0, 3, 1, 2)
            by_hand = model.eval()(inputs)
        torch.testing.assert_close(expected, by_hand, atol=1e-6, rtol=0)


def test_images_of_another_size_and_colour_are_converted(devices, tmp_path):
    pixels = np.full((20, 30), 90, np.uint8)
    Image.fromarray(pixels).save(tmp_path / "grey.png")
    Image.fromarray(np.full((8, 8, 3), 90, np.uint8)).save(tmp_path / "usual.png")
    (_, *one), (_, *other) = classify(
        *of_device(devices, "anna"), [tmp_path / "grey.png", tmp_path / "usual.png"]
    )
    assert one == other


# Bad input


@pytest.fixture
def broken(devices, folders, tmp_path):
    shutil.copytree(devices, tmp_path / "copy")
    root = tmp_path / "copy"
    (root / "text.png").write_text("no image")
    (root / "empty").mkdir()
    (root / "text.safetensors").write_text("no model")
    save_file({"a": np.zeros(3)}, root / "other.safetensors")
    export(*of_device(root, "anna"), root / "model.safetensors")
    tensors = load_file(root / "model.safetensors")
    card = of_device(root, "anna")[1].metadata()
    about = {"format": "flwr-frl model 1", **card}
    cut = {n: t for n, t in tensors.items() if n != "head.bias"}
    save_file(cut, root / "cut.safetensors", metadata=about)
    wide = {**tensors, "head.bias": np.zeros(4, np.float32)}
    save_file(wide, root / "wide.safetensors", metadata=about)
    nameless = {**about, "classes": "[1"}
    save_file(tensors, root / "nameless.safetensors", metadata=nameless)
    damaged = root / "bob" / "animals" / "bob"
    for path in damaged.iterdir():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    # A checkpoint that this run has not written.
    save_file({"a": np.zeros(3)}, root / "empty" / "checkpoint.safetensors")
    return root


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
    ([IMAGE, "--checkpoint", "{root}/empty"], "it must be one that a run has written"),
    ([IMAGE, *RUN], "client-name is ''; it must be one of anna, bob"),
    (
        [IMAGE, *RUN, "--client-name", "ann"],
        "unknown client 'ann'; did you mean 'anna'",
    ),
    ([IMAGE, *RUN, "--client-name", "anna"], "state-dir must be that of its SuperNode"),
    (
        [IMAGE, *RUN, "--client-name", "bob", "--state-dir", "{root}/bob"],
        "cannot be used: its checksum is wrong",
    ),
    (
        [*ANNA, "--export", "{root}/model.h5"],
        "must end with .safetensors, .pt2 or .onnx",
    ),
    ([*ANNA, "--export", "{root}/text.png/m.pt2"], "export '{root}/text.png/m.pt2': "),
    ([IMAGE, *ANNA, "--modell", "x"], "unrecognized arguments: --modell x"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_is_one_line(arguments, message, broken, folders, capsys):
    places = {"root": broken, "folders": folders}
    assert main([argument.format(**places) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message.format(**places) in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "fedavg", "task": "qcqp"}, "task 'qcqp' has nothing to predict"),
        ({"algorithm": "fedrap"}, "unknown algorithm 'fedrap'"),
        ({"momentum": "x"}, "momentum is 'x'; it must be of type float"),
        ({"algorithm": "fedavg"}, "data-dir is ''; it must be a directory"),
    ],
)
def test_runs_that_leave_nothing_to_predict_with(devices, change, message, tmp_path):
    path = devices / "results" / "fedrep" / "checkpoint.safetensors"
    about = {
        "settings": {**settings_of(tmp_path), **change},
        "values": {"acknowledged": {"a": 1}, "run": "x"},
    }
    copy = tmp_path / "checkpoint.safetensors"
    save_file(load_file(path), copy, metadata={"run": json.dumps(about)})
    with pytest.raises(SettingsError, match=message) as error:
        load_run(tmp_path, "a")
    assert "\n" not in str(error.value)


def test_a_model_of_more_parts_is_exported_as_a_program_alone(folders, tmp_path):
    settings = settings_of(tmp_path, algorithm="fedcp", data_dir=str(folders))
    run("fedcp", settings, "inline")
    loaded = load_run(tmp_path / "results" / "fedcp", "000000")
    with pytest.raises(SettingsError, match=r"it must end with .pt2, as this algorit"):
        export(*loaded, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
    export(*loaded, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    images = loaded[1].read(sorted((folders / sorted(CLASSES)[0]).glob("test/*/*")))
    torch.testing.assert_close(program(images), loaded[0](images))


def test_a_run_whose_clients_keep_no_head(folders, tmp_path):
    settings = settings_of(tmp_path, algorithm="fedavg-ft", data_dir=str(folders))
    run("fedavg-ft", settings, "inline")
    message = "algorithm 'fedavg-ft' keeps no head: it fine-tunes a new one"
    with pytest.raises(SettingsError, match=message) as error:
        load_run(tmp_path / "results" / "fedavg-ft", "000000")
    assert "\n" not in str(error.value)


def test_a_run_whose_clients_have_models_of_other_shapes(folders, tmp_path):
    algorithm = "representation-transfer"
    own = {"algorithm": algorithm, "num-sources": 1, "source-epochs": 1}
    settings = {**settings_of(tmp_path, data_dir=str(folders)), **own}
    run(algorithm, settings, "inline")
    message = "algorithm 'representation-transfer' leaves no model of the task's own"
    with pytest.raises(SettingsError, match=message):
        load_run(tmp_path / "results" / algorithm, "000001")


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavg-ft"])
def test_a_shared_head_is_for_the_run_s_classes(tmp_path, algorithm):
    ours, theirs = ("ant", "bee", "cat"), ("bee", "cat", "dog")
    write_images(tmp_path / "images" / "anna", ours, 1)
    write_images(tmp_path / "others", theirs, 2)
    there = str(tmp_path / "images" / "anna")
    settings = settings_of(tmp_path, data_dir=there, partition="iid")
    run(algorithm, settings, "inline")
    checkpoint = tmp_path / "results" / algorithm
    assert load_run(checkpoint, "000000", data_dir=there)[1].classes == ours
    with pytest.raises(SettingsError, match="has the classes bee, cat, dog; they must"):
        load_run(checkpoint, "000000", data_dir=str(tmp_path / "others"))


def test_names_that_are_no_text_or_too_long(folders, tmp_path, capsys):
    settings = settings_of(tmp_path, data_dir=str(folders))
    run("fedrep", settings, "inline")
    image = next((folders / "anna").glob("test/*/*"))
    odd = tmp_path / os.fsdecode(b"photo-\xff.png")
    odd.write_bytes(image.read_bytes())
    capsys.readouterr()
    given = ["--checkpoint", str(tmp_path / "results" / "fedrep")]
    given += ["--client-name", "000000"]
    assert main([str(odd), *given]) == 0
    assert r"photo-\xff.png" in capsys.readouterr().out
    for wrong in (["x" * 400, *given], [str(odd), "--checkpoint", "x" * 400]):
        assert main(wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_images_with_a_model_of_one_s_own(tmp_path, folders):
    settings = settings_of(
        tmp_path, algorithm="fedrep", task="flat_images:Flat", data_dir=str(folders)
    )
    run("fedrep", settings, "inline")
    place, own = tmp_path / "results" / "fedrep", tmp_path / "own.safetensors"
    said = reported(place)
    for name in CLASSES:
        loaded = load_run(place, name)
        export(*loaded, own)
        for model, card in (loaded, load_model(own)):
            images = sorted((folders / name / "test").glob("*/*.png"))
            rows = list(predict(model, card, images))
            right = [
                row[1] == path.parent.name
                for row, path in zip(rows, images, strict=True)
            ]
            assert np.mean(right) == pytest.approx(said[name])

    # A head is for its classes alone.
    for part in ("train", "test"):
        (folders / "anna" / part / "bee").rename(folders / "anna" / part / "cow")
    try:
        with pytest.raises(SettingsError, match=r"one with the classes .*bee"):
            load_run(place, "anna", data_dir=str(folders))
    finally:
        for part in ("train", "test"):
            (folders / "anna" / part / "cow").rename(folders / "anna" / part / "bee")


def test_a_model_of_one_s_own_that_does_not_fit_is_one_line(tmp_path, folders):
    settings = settings_of(
        tmp_path, algorithm="fedrep", task="flat_images:Wrong", data_dir=str(folders)
    )
    with pytest.raises(SettingsError, match="train examples: the model refuses inputs"):
        run("fedrep", settings, "inline")
