"""With ``optimizer-state="kept"`` the optimizer continues from round to round."""

import re

import pytest
import torch
from client_messages import (
    FAST,
    app_of,
    context_of,
    initial_arrays,
    message_of,
    metrics_of,
    trained,
)
from flwr.app import ArrayRecord, Context
from refusals import code_of
from torch import nn

from flwr_frl.clients.algorithms import client_setup
from flwr_frl.clients.base import Client
from flwr_frl.clients.device.optimizers import OptimizerStates
from flwr_frl.clients.device.setup import build_client
from flwr_frl.common.settings import resolve
from flwr_frl.task.models.frozen import new_model
from flwr_frl.task.tasks import build_task

# All examples are one batch, so their order does not matter.
SETTINGS = {"batch_size": 10_000, "weight_decay": 0.0, "learning_rate": 0.01}
ROUNDS = 4


def rounds(optimizer: str, directory: str, attempts: int = 1, **more) -> dict:
    """Return the model after `ROUNDS` rounds; the process restarts before each."""
    app = app_of(algorithm="fedavg", optimizer=optimizer, **SETTINGS, **more)
    arrays = initial_arrays(app, context_of(state_dir=directory))
    for server_round in range(1, ROUNDS + 1):
        sent, config = arrays, {"server_round": server_round, "run": "r"}
        for _ in range(attempts):
            # The server has not acknowledged the earlier attempts.
            config["acknowledged_round"] = server_round - 1
            arrays = trained(app, sent, context_of(state_dir=directory), **config)
    return {name: torch.from_numpy(a.numpy()) for name, a in arrays.items()}


def uninterrupted(kind: type[torch.optim.Optimizer], **arguments):
    """Return the model's state after `ROUNDS` epochs with a single torch optimizer."""
    task = build_task(resolve({**FAST, "algorithm": "fedavg"}), 20)
    model, examples = new_model(task), task.train_examples(0)
    [(inputs, targets)] = examples.batches(len(examples))
    model.load_state_dict(task.initial_state)
    optimizer = kind(model.parameters(), lr=0.01, **arguments)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize(
    ("name", "kind", "arguments"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.5}),
        ("adamw", torch.optim.AdamW, {"weight_decay": 0.0}),
    ],
)
def test_rounds_equal_an_uninterrupted_torch_optimizer_across_restarts(
    name, kind, arguments, attempts, tmp_path
):
    kept = rounds(name, str(tmp_path), attempts, optimizer_state="kept")
    torch.testing.assert_close(kept, dict(uninterrupted(kind, **arguments)))


def test_a_new_optimizer_in_every_round_gives_another_model(tmp_path):
    renewed = rounds("adamw", str(tmp_path))
    expected = uninterrupted(torch.optim.AdamW, weight_decay=0.0)
    assert not any(torch.allclose(renewed[name], expected[name]) for name in renewed)
    assert not list(tmp_path.rglob("*.safetensors"))


def saved(context: Context) -> dict[str, tuple[int, ...]]:
    [record] = [r for r in context.state.values() if isinstance(r, ArrayRecord)]
    return {name: tuple(array.shape) for name, array in record.items()}


def one_round(algorithm: str, **more) -> tuple[Context, ArrayRecord]:
    app = app_of(algorithm=algorithm, optimizer_state="kept", **more)
    context = context_of()
    arrays = initial_arrays(app, context)
    return context, trained(app, arrays, context, server_round=1)


def test_the_optimizer_state_is_saved_with_the_head_and_never_sent():
    context, sent = one_round("fedrep", momentum=0.5)
    parts = {re.match(r".*(head|representation)\.", name)[0] for name in saved(context)}
    # The head trains first, then the representation.
    state = "optimizer.{}.sgd.momentum_buffer."
    states = {state.format(0) + "head.", state.format(1) + "representation."}
    assert parts == {"head.", *states}
    assert all(name.startswith("representation.") for name in sent)


def test_evaluations_ignore_the_optimizer_state(tmp_path):
    app = app_of(algorithm="fedrep", optimizer_state="kept")
    context = context_of(state_dir=str(tmp_path))
    arrays, config = initial_arrays(app, context), {"server_round": 1, "run": "r"}
    trained(app, arrays, context, **config, acknowledged_round=0)
    message = message_of("evaluate", arrays, **config, acknowledged_round=1)
    losses = set()
    for tester in app, app_of(algorithm="fedrep"):
        reply = tester(message, context_of(state_dir=str(tmp_path)))
        losses.add(metrics_of(reply)["loss"])
    assert len(losses) == 1


@pytest.mark.parametrize("algorithm", ["moon", "scaffold", "apfl", "fedproto"])
def test_algorithms_with_custom_steps_refuse_kept_optimizers(algorithm):
    app = app_of(algorithm=algorithm, optimizer_state="kept")
    assert code_of(initial_arrays, app, context_of()) == "optimizer-state"


# Clients with a custom `fit`, which need not save, or not last


class Saving(Client, supports_example_dp=True):
    personal = ("head.",)
    shared = ("representation.",)


class SavesOnce(Saving):
    def fit(self, parameters, config):
        self.receive(parameters, config)
        loss = self.train("all", 1)
        if config["server-round"] == 1:
            self.save()
        return self.send(loss)


class SavesEarly(Saving):
    def fit(self, parameters, config):
        self.receive(parameters, config)
        self.train("head", 1)
        self.save()
        self.early = self.model.head.weight.detach().clone()
        return self.send(self.train("all", 1))


class SavesFirst(Saving):
    def fit(self, parameters, config):
        self.receive(parameters, config)
        self.save()
        return self.send(self.train("representation", 1))


def built(kind: type[Client], context: Context, config: dict) -> Client:
    run = resolve({**FAST, "algorithm": "fedper", "optimizer-state": "kept"})
    setup = client_setup(context, run)._replace(kind=kind)
    return build_client(context, setup, config)


def round_of(kind: type[Client], context: Context, server_round: int = 1) -> Client:
    """Return a client after a round, with the head that it had received."""
    config = {"run": "r", "acknowledged-round": server_round - 1}
    client = built(kind, context, config)
    client._optimizers = OptimizerStates("sgd")
    config["server-round"] = server_round
    client.fit(client.get_parameters({}), config)
    client._save_optimizers(config)
    return client


def head_after(kind: type[Client], context: Context, server_round: int) -> torch.Tensor:
    """Return the head with which the next round begins."""
    config = {"run": "r", "acknowledged-round": server_round}
    client = built(kind, context, config)
    client.receive(client.get_parameters({}), config)
    return client.model.head.weight.clone()


def test_a_round_without_save_keeps_the_head_with_the_new_optimizers():
    context = context_of()
    heads = [head_after(SavesOnce, context, 0)]
    for server_round in (1, 2):
        round_of(SavesOnce, context, server_round)
        heads.append(head_after(SavesOnce, context, server_round))
    assert not torch.equal(heads[0], heads[1])
    assert torch.equal(heads[1], heads[2])


def test_training_after_a_save_does_not_change_what_was_saved():
    context = context_of()
    client = round_of(SavesEarly, context)
    assert not torch.equal(client.model.head.weight, client.early)
    assert torch.equal(head_after(SavesEarly, context, 1), client.early)


def test_optimizers_of_training_after_the_last_save_are_saved():
    round_of(SavesFirst, context := context_of())
    names = saved(context).keys()
    assert any(name.startswith("optimizer.0.sgd.momentum_buffer.") for name in names)
    assert any(name.startswith("head.") for name in names)


def test_a_round_counts_as_saved_if_the_optimizer_has_no_state():
    # SGD without momentum
    context, _ = one_round("fedavg", momentum=0.0)
    run = {**FAST, "algorithm": "fedavg", "optimizer-state": "kept", "momentum": 0.0}
    client = build_client(context, client_setup(context, resolve(run)), {})
    assert client.state.kept()["kept-rounds"] == [1]
