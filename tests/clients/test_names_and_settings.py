"""Names of clients, settings of devices, and refusals of invalid settings."""

import shutil

import numpy as np
import pytest
from client_messages import (
    app_of,
    context_of,
    device,
    equal,
    initial_arrays,
    message_of,
    properties_of,
    trained,
)
from flwr.app import MessageType
from pictures import write_images
from refusals import assert_says

from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.setup import client_name
from flwr_frl.clients.device.state import state_directory
from flwr_frl.strategies.server.replies import reply_properties


def test_client_names():
    assert client_name(context_of(12).node_config) == "000012"
    assert client_name(context_of(12, client_name="kitchen").node_config) == "kitchen"
    names = [client_name(context_of(i).node_config) for i in (2, 10, 100)]
    assert sorted(names) == names
    assert_says("neither client-name nor partition-id", client_name, {})


@pytest.mark.parametrize(
    ("name", "experiment", "place"),
    [
        ("kitchen", "", "run-1/kitchen"),
        ("kitchen", "cats", "cats/kitchen"),
        ("../../etc", "../x", "%2E%2E%2Fx/%2E%2E%2F%2E%2E%2Fetc"),
        ("..", ".", "%2E/%2E%2E"),
    ],
)
def test_experiment_and_client_name_are_folders_in_the_state_directory(
    tmp_path, name, experiment, place
):
    app = app_of(algorithm="fedrep", experiment=experiment)
    root = tmp_path / "state"
    context = device(name, state_dir=str(root))
    trained(app, initial_arrays(app, context), context, server_round=1)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert files == [root / place / "00000001-00000000-1-00000001.safetensors"]
    # A device trains on all of its data.
    properties = properties_of(app, context)
    assert (properties["client"], properties["num-examples"]) == (name, 1438)


@pytest.mark.parametrize("link", ["cats", "cats/kitchen"])
def test_a_link_in_the_state_directory_is_not_followed(tmp_path, link):
    (tmp_path / "theirs" / "kitchen").mkdir(parents=True)
    place = tmp_path / "state" / link
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path / "theirs")
    state = str(tmp_path / "state")
    line = f"state-dir: '{place}' is a link; expected a folder"
    assert_says(line, state_directory, state, "kitchen", "1", "cats")


def test_a_head_for_other_classes_is_not_used_and_the_reason_is_sent(tmp_path):
    images, more = tmp_path / "images", tmp_path / "more"
    for place in ("train/a", "train/b", "test/a", "test/b"):
        write_images(images / place, [np.zeros((8, 8, 3), np.uint8)])
    task_settings = {"task": "image-folder", "image_size": 8, "model": "mlp"}
    app = app_of(algorithm="fedrep", experiment="cats", **task_settings)

    def told(run, data, server_round=1):
        context = device(data_dir=str(data), state_dir=str(tmp_path / "state"))
        config = {"server_round": server_round, "run": run}
        config["acknowledged_round"] = server_round - 1
        arrays = initial_arrays(app, context)
        reply = app(message_of(MessageType.TRAIN, arrays, **config), context)
        return reply_properties(reply).get("unused-state", "")

    assert told("a", images) == ""
    assert told("b", images) == ""
    # The device restarts, with one more class in its folder.
    shutil.copytree(images, more)
    for part in ("train", "test"):
        shutil.copytree(more / part / "a", more / part / "c")
    # The reason does not mention the shape, and names of classes stay on the device.
    assert told("c", more) == "its file cannot be used"
    # The server has acknowledged the new head.
    assert told("c", more, 2) == ""


def test_a_node_overrides_only_the_settings_that_its_algorithm_names():
    app = app_of(algorithm="fedrep")
    arrays = initial_arrays(app, context_of())
    contexts = context_of(), context_of(learning_rate=9.0, num_sources="x")
    assert equal(*(trained(app, arrays, each, server_round=1) for each in contexts))
    for algorithm, role in (("representation-transfer", "target"), ("fedrep", None)):
        app = app_of(algorithm=algorithm)
        assert properties_of(app, context_of(num_sources=0)).get("role") == role


MISSPELLED = "unknown name in the node config "


@pytest.mark.parametrize(
    ("settings", "node", "line"),
    [
        ({"learning_rate": -1.0}, {}, "learning-rate is -1.0; "),
        ({"torch_threads": 0}, {}, "torch-threads is 0; "),
        ({"classes_per_client": 0}, {}, "classes-per-client is 0; "),
        ({"algorithm": "fedavg", "task": "qcqp"}, {}, "algorithm 'fedavg' and task 'q"),
        ({"algorithm": "flute", "task": "transfer"}, {}, "algorithm 'flute' and task"),
        ({"algorithm": "fedrap"}, {}, "unknown algorithm 'fedrap'; did you mean"),
        ({"algorithm": "no_module:Own"}, {}, "algorithm 'no_module:Own' cannot be"),
        ({"task": "image-folder"}, {"data-dir": "/no"}, "data-dir is '/no'; "),
        ({}, {"dp-noise": -1.0}, "dp-noise is -1.0; "),
        ({}, {"client-name": ""}, "client-name is ''; "),
        *(
            ({}, {"partition-id": value}, f"partition-id is {value!r}; ")
            for value in ("x", -1, 1.5)
        ),
        *(
            ({}, {"partition-id": 0, "num-partitions": n}, f"num-partitions is {n}; ")
            for n in (0, -1)
        ),
        # A misspelled name must not leave a device without noise or without a state.
        ({}, {"dp_noise": "1"}, f"{MISSPELLED}'dp_noise'; did you "),
        ({}, {"data-dri": "1"}, f"{MISSPELLED}'data-dri'; did you "),
        ({}, {"Dp-noise": "1"}, f"{MISSPELLED}'Dp-noise'; did you "),
        (
            {"algorithm": "representation-transfer"},
            {"num-sources": "none"},
            "num-sources is 'none'; ",
        ),
    ],
)
def test_invalid_settings_are_refused_in_one_line(settings, node, line):
    context = device()
    context.node_config.update(node)
    properties = properties_of(app_of(**settings), context)
    assert set(properties) == {"client", "refusal"}
    assert properties["refusal"].startswith(line)
    assert "\n" not in properties["refusal"]


def test_settings_default_to_those_of_the_run():
    context = context_of()
    for algorithm, shares in (("local", False), ("fedrep", True)):
        context.run_config = {"algorithm": algorithm}
        assert bool(initial_arrays(make_app(), context)) is shares


def test_names_of_other_apps_and_settings_are_no_misspellings():
    context = device(camera=2, device_id=7, partition="x")
    assert "refusal" not in properties_of(app_of(), context)
