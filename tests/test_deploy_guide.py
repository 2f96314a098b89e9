"""The deployment guide: links, settings, examples, and Flower's configuration."""

import re
import sys
import tomllib
from collections import Counter
from types import ModuleType

import pytest
import torch
from deploy_commands import DEPLOY, command
from flwr.app import Context, RecordDict
from flwr.common.config import parse_config_args
from torch import nn

from flwr_frl.common.settings import resolve
from flwr_frl.strategies.grids.simulation import InlineGrid

# The guide


def guide() -> str:
    return (DEPLOY / "README.md").read_text()


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
    for message, reply in trained:
        for part in (message, reply):
            (record,) = part.content.array_records.values()
            assert set(record) == {"weight", "bias"}
    # Each client has continued to train its own head.
    nodes = [message.metadata.dst_node_id for message, _ in trained]
    for node, count in Counter(nodes).items():
        head = grid.contexts[node].state["head"].to_torch_state_dict()
        expected = Net().head.bias + 0.5 * count
        torch.testing.assert_close(head["bias"], expected.detach())


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
