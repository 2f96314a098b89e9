"""Names of clients, settings of devices, and refusals of invalid settings."""

import shutil

import numpy as np
import pytest
from client_messages import (
    app_of,
    context_of,
    equal,
    initial_arrays,
    message_of,
    new_context,
    values_of,
)
from flwr.app import (
    Context,
    MessageType,
    RecordDict,
)
from PIL import Image
from safetensors.numpy import load_file

from flwr_frl.clients import Client
from flwr_frl.clients.algorithms import client_class
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.setup import DeviceSettings, client_name
from flwr_frl.clients.device.state_file import state_directory
from flwr_frl.common.settings import SettingsError, resolve
from flwr_frl.strategies import ALGORITHMS
from flwr_frl.strategies.server.replies import unused_state


def test_client_names():
    assert client_name(context_of(12)) == "000012"
    assert client_name(context_of(12, client_name="kitchen")) == "kitchen"
    names = [client_name(context_of(i)) for i in (2, 10, 100)]
    assert sorted(names) == names
    with pytest.raises(SettingsError, match="neither client-name nor partition-id"):
        client_name(new_context())


# Algorithms that use the clients of another algorithm
WRAPPED = {
    "srpfl": "fedrep",
    "lg-srpfl": "lg-fedavg",
    "flanp": "fedavg",
    "flanp-ft": "fedavg-ft",
    "srpfl-flute": "flute",
}


def test_there_is_a_client_for_every_algorithm():
    for algorithm in ALGORITHMS:
        for task in ("digits", "linear"):
            kind = client_class(resolve({"algorithm": algorithm, "task": task}))
            assert issubclass(kind, Client)
            if algorithm in WRAPPED:
                base = {"algorithm": WRAPPED[algorithm], "task": task}
                assert kind is client_class(resolve(base))


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
    node = {"client-name": name, "state-dir": str(root)}
    device = Context(1, 5, node, RecordDict(), {})
    arrays = initial_arrays(app, device)
    app(message_of(MessageType.TRAIN, arrays, server_round=1), device)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert files == [root / place / "1-00000001.safetensors"]
    # A device trains on all of its data.
    reply = app(message_of(MessageType.QUERY), device)
    properties = reply.content.config_records["properties"]
    assert (properties["client"], properties["num-examples"]) == (name, 1438)


@pytest.mark.parametrize("link", ["cats", "cats/kitchen"])
def test_a_link_in_the_state_directory_is_not_followed(tmp_path, link):
    (tmp_path / "theirs" / "kitchen").mkdir(parents=True)
    place = tmp_path / "state" / link
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path / "theirs")
    node = {"state-dir": str(tmp_path / "state")}
    line = f"^state-dir: '{place}' is a link; expected a folder"
    with pytest.raises(SettingsError, match=line):
        state_directory(node, "kitchen", "1", "cats")


def test_consecutive_runs_of_an_experiment_share_the_head(tmp_path):
    app = app_of(algorithm="fedrep", experiment="cats")
    node = {"client-name": "kitchen", "state-dir": str(tmp_path)}

    def trained(run, context):
        arrays = initial_arrays(app, context)
        message = message_of(MessageType.TRAIN, arrays, server_round=1)
        message.content.config_records["config"]["run"] = run
        app(message, context)
        (path,) = (tmp_path / "cats" / "kitchen").glob(f"{run}-*.safetensors")
        return load_file(path)["head.weight"]

    alone = trained("b", Context(1, 5, node, RecordDict(), {}))
    shutil.rmtree(tmp_path)
    first = trained("a", Context(1, 5, node, RecordDict(), {}))
    after = trained("b", Context(2, 5, node, RecordDict(), {}))
    np.testing.assert_array_equal(first, alone)
    assert np.abs(after - alone).max() > 1e-3


def test_a_head_for_other_classes_is_not_used_and_the_reason_is_sent(
    tmp_path,
):
    for part in ("train", "test"):
        for name in "ab":
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / "0.png")
    task_settings = {"task": "image-folder", "image_size": 8, "model": "mlp"}
    app = app_of(algorithm="fedrep", experiment="cats", **task_settings)
    node = {"client-name": "kitchen", "data-dir": str(tmp_path / "images")}
    node["state-dir"] = str(tmp_path / "state")

    def told(run, server_round=1):
        device = Context(1, 5, node, RecordDict(), {})
        config = {"server_round": server_round, "run": run}
        config["acknowledged_round"] = server_round - 1
        arrays = initial_arrays(app, device)
        reply = app(message_of(MessageType.TRAIN, arrays, **config), device)
        return unused_state(reply)

    assert told("a") == ""
    assert told("b") == ""
    # The device restarts, with one more class in its folder.
    node["data-dir"] = str(shutil.copytree(tmp_path / "images", tmp_path / "more"))
    for part in ("train", "test"):
        shutil.copytree(*(tmp_path / "more" / part / name for name in "ac"))
    # The reason does not mention the shape, and names of classes stay on the device.
    assert told("c") == "it is for other classes than the client has now"
    # The server has acknowledged the new head.
    assert told("c", 2) == ""


def test_counts_are_rounded_to_a_multiple_and_only_0_becomes_0():
    exact, rounded = DeviceSettings(), DeviceSettings(count_multiple=100)
    assert [exact.rounded(n) for n in (0, 1, 1437)] == [0, 1, 1437]
    counts = {0: 0, 3: 100, 149: 100, 1437: 1400, 1450: 1500}
    assert {n: rounded.rounded(n) for n in counts} == counts


def test_a_device_can_round_its_example_counts():
    app = app_of(algorithm="fedrep")
    counts = []
    for more in ({}, {"count-multiple": 1000}):
        device = Context(1, 5, {"client-name": "kitchen", **more}, RecordDict(), {})
        reply = app(message_of(MessageType.QUERY), device)
        properties = reply.content.config_records["properties"]
        arrays = initial_arrays(app, device)
        reported = [properties["num-examples"], properties["num-test-examples"]]
        for kind in (MessageType.TRAIN, MessageType.EVALUATE):
            reply = app(message_of(kind, arrays, server_round=1), device)
            reported.append(reply.content.metric_records["metrics"]["num-examples"])
        counts.append(reported)
    # The 1,797 digits are split into 1,438 training and 359 test examples.
    assert counts == [[1438, 359, 1438, 359], [1000, 1000, 1000, 1000]]


def test_a_node_overrides_only_the_settings_that_its_algorithm_names():
    app = app_of(algorithm="fedrep")
    arrays = initial_arrays(app, context_of())
    replies = [
        app(message_of(MessageType.TRAIN, arrays, server_round=1), context)
        for context in (context_of(), context_of(learning_rate=9.0, num_sources="x"))
    ]
    assert equal(*(reply.content.array_records["arrays"] for reply in replies))
    for algorithm, role in (("representation-transfer", "target"), ("fedrep", None)):
        app = app_of(algorithm=algorithm)
        reply = app(message_of(MessageType.QUERY), context_of(num_sources=0))
        assert reply.content.config_records["properties"].get("role") == role


@pytest.mark.parametrize(
    ("settings", "node", "line"),
    [
        ({"learning_rate": -1.0}, {}, "learning-rate is -1.0; "),
        ({"torch_threads": 0}, {}, "torch-threads is 0; "),
        ({"classes_per_client": 0}, {}, "classes-per-client is 0; "),
        ({"algorithm": "fedavg", "task": "qcqp"}, {}, "algorithm 'fedavg' and task 'q"),
        ({"algorithm": "flute", "task": "transfer"}, {}, "algorithm 'flute' and task"),
        ({"algorithm": "fedrap"}, {}, "unknown algorithm 'fedrap'; did you mean"),
        ({"task": "image-folder"}, {"data-dir": "/no"}, "data-dir is '/no'; "),
        ({}, {"count-multiple": 0}, "count-multiple is 0; "),
        ({}, {"client-name": ""}, "client-name is ''; "),
        # A misspelled name must not leave a device without noise or without a state.
        ({}, {"dp_noise": "1"}, "unknown name in the node config 'dp_noise'; did you "),
        ({}, {"data-dri": "1"}, "unknown name in the node config 'data-dri'; did you "),
        ({}, {"state_dir": "1"}, "unknown name in the node config 'state_dir'; did y"),
        ({}, {"Dp-noise": "1"}, "unknown name in the node config 'Dp-noise'; did you "),
        (
            {"algorithm": "representation-transfer"},
            {"num-sources": "none"},
            "num-sources is 'none'; ",
        ),
    ],
)
def test_invalid_settings_are_refused_in_one_line(settings, node, line):
    context = Context(1, 5, {"client-name": "kitchen", **node}, RecordDict(), {})
    reply = app_of(**settings)(message_of(MessageType.QUERY), context)
    properties = reply.content.config_records["properties"]
    assert set(properties) == {"client", "refusal"}
    assert properties["refusal"].startswith(line)
    assert "\n" not in properties["refusal"]


OWN = """
from dataclasses import dataclass
import numpy as np
from flwr_frl.clients.base import Client, TrainingSettings
from flwr_frl.strategies.base import Strategy
from flwr_frl.common.settings import setting

@dataclass(frozen=True)
class OwnSettings(TrainingSettings):
    shift: float = setting(2.0, ge=0)

class OwnClient(Client, task_settings={"head-layers": 2}):
    settings_type = OwnSettings
    personal = ("count.",)

    def initial_group(self, slot):
        import torch
        return {"rounds": torch.zeros(1)}

    def update(self):
        self.saved["count.rounds"] += 1
        self.metrics["rounds"] = float(self.saved["count.rounds"])
        shift = self.settings.shift
        self.upload = {n: value + shift for n, value in self.model.tensors.items()}
        return 0.5

class Own(Strategy, client=f"{__name__}:OwnClient"):
    pass

class Nobody(Strategy):
    pass

class Wrong(Strategy, client=f"{__name__}:Own"):
    pass

class Lost(Strategy, client=f"{__name__}:Nowhere"):
    pass
"""


@pytest.fixture
def own(write_module):
    """The name of a module that defines a custom algorithm."""
    return write_module("own_algorithm", OWN)


@pytest.mark.parametrize(("shift", "expected"), [(None, 2.0), (0.25, 0.25)])
def test_a_custom_algorithm_runs_with_its_settings(own, shift, expected):
    overrides = {} if shift is None else {"shift": shift}
    app = make_app({"algorithm": f"{own}:Own", **overrides})
    context = context_of(3)
    arrays = initial_arrays(app, context)
    # The client class sets the default of head-layers to 2.
    assert {n.split(".")[1] for n in arrays if n.startswith("head.")} == {"fc1", "fc2"}
    for server_round in (1, 2):
        reply = app(
            message_of(MessageType.TRAIN, arrays, server_round=server_round), context
        )
        assert reply.content.metric_records["metrics"]["rounds"] == server_round
        for name, value in values_of(reply.content.array_records["arrays"]).items():
            np.testing.assert_allclose(
                value, arrays[name].numpy() + expected, rtol=1e-6
            )


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"shift": -1.0}, "shift is -1.0; "),
        ({"shift": "far"}, "shift is 'far'; "),
        ({"shif": 1.0}, "unknown setting 'shif'; did you mean 'shift'? known: "),
        (
            {"algorithm": "{own}:Nobody"},
            "has no client; declare the import path",
        ),
        ({"algorithm": "{own}:Wrong"}, "'{own}:Own' is no client;"),
        (
            {"algorithm": "{own}:Lost"},
            "module '{own}' has no 'Nowhere'",
        ),
        (
            {"algorithm": "{own}:OwnClient"},
            "is no strategy; expected a subcl",
        ),
        ({"algorithm": "no_algorithm:Own"}, "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_errors_of_a_custom_algorithm_are_one_line(own, given, line):
    named = {"algorithm": "{own}:Own", **given}
    named["algorithm"] = named["algorithm"].format(own=own)
    reply = make_app(named)(message_of(MessageType.QUERY, run="r1"), context_of())
    properties = reply.content.config_records["properties"]
    assert set(properties) == {"client", "refusal"}
    assert line.format(own=own) in properties["refusal"]
    assert "\n" not in properties["refusal"]


def test_settings_default_to_those_of_the_run():
    context = context_of()
    context.run_config = {"algorithm": "local"}
    assert len(initial_arrays(make_app(), context)) == 0
    context.run_config = {"algorithm": "fedrep"}
    assert len(initial_arrays(make_app(), context)) > 0


def test_unknown_node_settings_are_logged_once(caplog):
    # `partition` is a setting of the run, so it is not refused as a misspelled name.
    node = {"client-name": "kitchen", "camera": 2, "device-id": 7, "partition": "x"}
    device = Context(1, 5, node, RecordDict(), {})
    app = app_of()
    reply = app(message_of(MessageType.QUERY), device)
    assert "refusal" not in reply.content.config_records["properties"]
    # Other messages, which have processes of their own, do not log it again.
    initial_arrays(app, device)
    for name in ("camera", "device-id", "partition"):
        line = f"{name} in the node config is not read"
        assert caplog.messages.count(line) == 1
