"""Our strategies with ClientApps like those of Flower's templates.

Such a ClientApp has no query handler. It loads the complete state dict that it
receives, trains, and replies with the complete state dict and metrics under its own
names.
"""

import logging

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from torch import nn

from flwr_frl.common.errors import SettingsError
from flwr_frl.strategies import DPSGD, FLUTE, SCAFFOLD, SRPFL, ChocoSGD, FedPer, FedRep
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.simulation import InlineGrid

N = 4
RATE = 0.25


class Net(nn.Module):
    """A weight w for the input x = 1, and the number of examples seen so far."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1, bias=False)
        self.register_buffer("seen", torch.tensor(0))


def start_at(w: float) -> ArrayRecord:
    net = Net()
    nn.init.constant_(net.fc.weight, w)
    return ArrayRecord(net.state_dict())


class Template:
    """A template's ClientApp: client i has i + 1 examples, all with target i."""

    def __init__(self, **names: str | None) -> None:
        self.loss = names.get("loss", "train_loss")
        self.trained: list[list[int]] = []
        self.rates: list[float] = []
        self.app = ClientApp()
        self.app.train()(self.train)
        self.app.evaluate()(self.evaluate)

    def load(self, message: Message, context: Context):
        net = Net()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        i = int(context.node_config["partition-id"])
        targets = torch.full((i + 1, 1), float(i))
        return net, torch.ones(i + 1, 1), targets

    def train(self, message: Message, context: Context) -> Message:
        net, inputs, targets = self.load(message, context)
        rate = message.content["config"]["lr"]
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        # The gradient of 1/2 (w - i)^2 is w - i.
        loss = nn.functional.mse_loss(net.fc(inputs), targets) / 2
        loss.backward()
        optimizer.step()
        net.seen += len(targets)
        self.trained.append([message.metadata.dst_node_id, len(targets)])
        metrics = MetricRecord({"num-examples": len(targets)})
        if self.loss is not None:
            metrics[self.loss] = loss.item()
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}
        return Message(content=RecordDict(content), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        net, inputs, targets = self.load(message, context)
        error = (net.fc(inputs) - targets).abs().mean().item()
        metrics = {
            "eval_loss": error,
            "eval_acc": float(error < 1),
            "num-examples": len(targets),
        }
        content = {"metrics": MetricRecord(metrics)}
        return Message(content=RecordDict(content), reply_to=message)


def run(strategy: Strategy | SRPFL, template: Template, rounds: int = 2):
    grid = InlineGrid(template.app, N)
    # As on real nodes, where SRPFL needs no speed model
    grid.in_process = False
    return strategy.start(
        grid, start_at(3.0), num_rounds=rounds, train_config=ConfigRecord({"lr": RATE})
    )


def test_fedrep_trains_clients_of_a_template():
    strategy, template = FedRep(), Template()
    result = run(strategy, template)
    # Half of four clients train in each round.
    assert len(template.trained) == 4
    first, second = template.trained[:2], template.trained[2:]
    w, errors = 3.0, []
    for server_round, trained in enumerate((first, second), 1):
        losses = {node: (w - (node - 1)) ** 2 / 2 for node, _ in trained}
        # Each client moves a quarter of the way to its number, and w becomes the mean.
        w = np.mean([w + RATE * (node - 1 - w) for node, _ in trained])
        reported = result.train_metrics_clientapp[server_round]
        weighted = sum(losses[node] * n for node, n in trained)
        assert reported["train-loss"] == pytest.approx(
            weighted / sum(n for _, n in trained)
        )
        assert (reported["clients"], reported["rejected"]) == (2, 0)
        errors = [abs(w - i) for i in range(N)]
        tested = result.evaluate_metrics_clientapp[server_round]
        assert tested["eval_loss"] == pytest.approx(np.mean(errors))
        assert tested["eval_acc"] == np.mean(np.less(errors, 1))
        assert tested["evaluated"] == N
    assert result.arrays["fc.weight"].numpy() == pytest.approx(w)
    # Integers in a state dict are averaged as well.
    seen = result.arrays["seen"].numpy()
    assert seen.dtype == np.int64
    means = [np.rint(np.mean([n for _, n in trained])) for trained in (first, second)]
    assert seen == sum(means)


def test_client_without_query_handler_is_named_by_its_node(caplog):
    strategy, template = FedRep(fraction_train=1.0), Template()
    run(strategy, template, 1)
    # This is not reported as a problem.
    (warning,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "those of another app" in warning.getMessage()
    connected = strategy._run.clients.known
    assert {node: connected[node].name for node in connected} == {
        node: str(node) for node in range(1, N + 1)
    }
    assert strategy._run.clients.acknowledged == {str(n): 1 for n in range(1, N + 1)}
    assert not any(client.refusal for client in connected.values())
    assert strategy._run.evaluation.metrics["4"]["num-examples"] == 4


@pytest.mark.parametrize("name", ["train-loss", "train_loss", "loss", "nll", None])
def test_training_loss_may_have_other_names_or_be_missing(name):
    result = run(FedPer(fraction_train=1.0), Template(loss=name), 1)
    reported = result.train_metrics_clientapp[1]
    assert reported["clients"] == N
    # (3 - i)^2 / 2, weighted by i + 1 examples: (4.5 + 2 * 2 + 3 * 0.5 + 0) / 10.
    if name in ("train-loss", "train_loss", "loss"):
        assert reported["train-loss"] == pytest.approx(1.0)
    else:
        assert "train-loss" not in reported


def test_flute_needs_the_classes_of_clients():
    line = "in no round did a client's reply count: client 4: its classes are ''; they"
    with pytest.raises(SettingsError, match=f"^{line}") as caught:
        run(FLUTE(), Template())
    assert "\n" not in str(caught.value)


def test_flute_trains_clients_that_report_classes_and_return_heads():
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        properties = ConfigRecord({"classes": "11"})
        return Message(RecordDict({"properties": properties}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        assert message.content["head"].keys() == {"head.weight"}
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({**message.content.array_records, "metrics": metrics})
        return Message(content, reply_to=message)

    strategy = FLUTE(fraction_train=1.0)
    start = {"representation.w": np.ones(3), "head.weight": np.eye(2)}
    arrays = ArrayRecord({n: Array(a.astype(np.float32)) for n, a in start.items()})
    result = strategy.start(InlineGrid(app, N), arrays, num_rounds=1)
    assert result.train_metrics_clientapp[1]["clients"] == N
    assert len(strategy.heads) == N


def test_scaffold_accepts_changes_that_are_marked_as_such():
    template = Template()

    def changes(message: Message, context: Context) -> Message:
        reply = template.app(message, context)
        if message.metadata.message_type == MessageType.TRAIN:
            before = message.content["arrays"]
            after = reply.content["arrays"]
            moved = {n: a.numpy() - before[n].numpy() for n, a in after.items()}
            # NumPy turns a zero-dimensional difference into a scalar.
            record = {n: Array(np.asarray(value)) for n, value in moved.items()}
            reply.content["arrays"] = ArrayRecord(record)
            reply.content["metrics"]["is-change"] = 1
        return reply

    result = SCAFFOLD(fraction_train=1.0).start(
        InlineGrid(changes, N),
        start_at(3.0),
        num_rounds=1,
        train_config=ConfigRecord({"lr": RATE}),
    )
    # Equal to the mean of the models: 3 + (0 + 1 + 2 + 3 - 12)/16
    assert result.arrays["fc.weight"].numpy() == pytest.approx(3 - 6 / 16)


@pytest.mark.parametrize("strategy", [DPSGD, ChocoSGD])
def test_gossip_needs_gossip_clients(strategy):
    line = "needs clients that do the same as"
    with pytest.raises(SettingsError, match=line):
        run(strategy(), Template())
