"""The deployment guide: links, settings, examples, and Flower's configuration."""

import re
import sys
import tomllib
from collections import Counter
from types import ModuleType

import numpy as np
import pytest
import torch
from deploy_commands import DEPLOY, command
from flwr.app import Context, RecordDict
from flwr.common.config import parse_config_args
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from torch import nn

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import FedRep
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.rounds import run_rounds

# The guide


def guide() -> str:
    return (DEPLOY / "README.md").read_text()


def test_links_of_the_guide_exist():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", guide()):
        assert (DEPLOY / link).exists(), link


def test_the_guide_s_settings_exist_with_and_without_containers():
    runs = re.findall(
        r"--run-config '(algorithm.*?|\s+algorithm.*?)'\n", guide(), re.DOTALL
    )
    first, second = (parse_config_args([text]) for text in runs)
    assert first == second
    assert resolve(first)["task"] == "image-folder"


class Net(nn.Module):
    """A third-party model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 3)
        self.head = nn.Linear(3, 2)


def train_locally(net: Net) -> tuple[float, int]:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.5)
    return 0.25, 7


@pytest.fixture
def example(monkeypatch):
    """A function that runs a Python block of the guide and returns its app."""
    yours = ModuleType("your_app")
    yours.Net, yours.train_locally = Net, train_locally
    monkeypatch.setitem(sys.modules, "your_app", yours)

    def run(name: str):
        pattern = rf"<!-- {name} -->\n```python\n(.*?)```\n<!-- end -->"
        scope: dict[str, object] = {}
        exec(re.search(pattern, guide(), re.DOTALL)[1], scope)
        return scope["app"]

    return run


class Spy(InlineGrid):
    """Records all messages and replies."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.seen: list[tuple[object, object]] = []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = super().send_and_receive(messages)
        self.seen += list(zip(messages, replies, strict=True))
        return replies


def test_the_guide_s_custom_app_with_differential_privacy(example):
    grid = Spy(example("client"), 10)
    for i, context in grid.contexts.items():
        context.node_config = {"client-name": f"pi-{i:02}"}
    context = Context(1, 0, {}, RecordDict(), {})
    example("server")(grid, context)
    trained = [(m, r) for m, r in grid.seen if str(m.metadata.message_type) == "train"]
    # Ten rounds, with five of ten clients each
    assert len(trained) == 50
    assert not any(reply.has_error() for _, reply in trained)
    assert len({m.metadata.dst_node_id for m, _ in trained}) > 5
    for message, reply in trained:
        for part in (message, reply):
            (record,) = part.content.array_records.values()
            assert set(record) == {"weight", "bias"}
            assert record["weight"].numpy().shape == (3, 4)
    # In each of ten rounds, all 15 weights move by 0.5. The norm 0.5 √15 = 1.94 is
    # clipped to 1, and noise of 0.2 · 1 / 5 = 0.04 is added.
    first = trained[0][0].content["arrays"]
    last = trained[-1][0].content["arrays"]
    moved = np.concatenate(
        [(last[n].numpy() - first[n].numpy()).ravel() for n in first]
    )
    step = 1 / np.sqrt(15)
    assert moved.mean() == pytest.approx(9 * step, abs=4 * 0.04 * 3 / np.sqrt(15))
    assert 0.03 < moved.std() < 0.25
    # Each client has continued to train its own head.
    nodes = [message.metadata.dst_node_id for message, _ in trained]
    for node, count in Counter(nodes).items():
        head = grid.contexts[node].state["head"].to_torch_state_dict()
        expected = Net().head.bias + 0.5 * count
        torch.testing.assert_close(head["bias"], expected.detach())


def test_the_guide_s_mod_adds_noise_on_the_device(example):
    settings = {"algorithm": "fedrep", "head-epochs": 1, "batch-size": 100}

    def trained(app):
        grid = Spy(app, 5, settings)
        strategy = FedRep(seed=1, fraction_train=1.0)
        initial = strategy.initialize(grid)
        run_rounds(strategy, grid, initial, range(1, 2))
        errors = [reply.error for _, reply in grid.seen if reply.has_error()]
        assert errors == []
        return initial, {
            message.metadata.dst_node_id: reply.content["arrays"]
            for message, reply in grid.seen
            if message.metadata.message_type == "train"
        }

    np.random.seed(0)
    initial, noisy = trained(example("mod"))
    _, plain = trained(make_app())
    assert len(noisy) == 5
    # The formula of Flower's mod: sensitivity √(2 ln(1.25 / δ)) / ε
    sigma = np.sqrt(2 * np.log(1.25 / 1e-5)) / 100
    for node, arrays in noisy.items():
        differences = [
            (arrays[n].numpy() - plain[node][n].numpy()).ravel() for n in arrays
        ]
        spread = np.concatenate(differences).std()
        assert spread == pytest.approx(sigma, rel=0.05)
        assert list(arrays) == list(initial)


# Flower's configuration file


@pytest.mark.e2e
def test_the_federation_is_added_to_the_configuration_of_flower(tmp_path, monkeypatch):
    from flwr.cli.flower_config import init_flwr_config

    home = tmp_path / ".flwr"
    monkeypatch.setenv("FLWR_HOME", str(home))
    init_flwr_config()
    original = tomllib.loads((home / "config.toml").read_text())["superlink"]
    marked = re.search(r"<!-- superlink -->\n```sh\n(.*?)```", guide(), re.DOTALL)[1]
    # `init_flwr_config` has already created the file.
    lines = marked.replace("flwr config list >/dev/null\n", "")
    federation = {"address": "127.0.0.1:8000"}
    federation["root-certificates"] = "/etc/flwr-frl/ca.crt"
    # The second time, nothing is added.
    for _ in range(2):
        environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        assert command("bash", "-euc", lines, env=environment).returncode == 0
        updated = tomllib.loads((home / "config.toml").read_text())["superlink"]
        added = {"default": "federation", "federation": federation}
        assert updated == {**original, **added}


@pytest.mark.parametrize("name", ["README.md", "proxy.conf"])
def test_the_proxy_accepts_one_chunk_of_an_array_but_not_two(name):
    text = (DEPLOY / name).read_text()
    (megabytes,) = re.findall(r"^ *client_max_body_size (\d+)m;", text, re.MULTILINE)
    piece = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    assert piece < int(megabytes) * 2**20 < 2 * piece
