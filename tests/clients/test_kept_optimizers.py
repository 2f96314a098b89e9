"""With ``optimizer-state="kept"`` the optimizer continues from round to round."""

import pytest
import torch
from client_messages import FAST, app_of, context_of, initial_arrays, message_of
from flwr.app import ArrayRecord, Context
from torch import nn

from flwr_frl.clients.algorithms import client_setup
from flwr_frl.clients.base import Client
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.optimizers import OptimizerStates
from flwr_frl.clients.device.setup import build_client
from flwr_frl.common.settings import SettingsError, resolve
from flwr_frl.task.models.frozen import new_model
from flwr_frl.task.tasks import build_task

# All examples are one batch, so their order does not matter.
SETTINGS = {"batch_size": 10_000, "weight_decay": 0.0, "learning_rate": 0.01}
ROUNDS = 4


def rounds(
    optimizer: str, directory: str, attempts: int = 1, **more
) -> dict[str, torch.Tensor]:
    """Return the model after `ROUNDS` rounds; the process restarts before each."""
    app = app_of(algorithm="fedavg", optimizer=optimizer, **SETTINGS, **more)
    context = context_of(state_dir=directory)
    arrays = initial_arrays(app, context)
    for server_round in range(1, ROUNDS + 1):
        for _ in range(attempts):
            # The server has not acknowledged the earlier attempts.
            config = {"server_round": server_round, "run": "r"}
            config["acknowledged_round"] = server_round - 1
            restarted = context_of(state_dir=directory)
            reply = app(message_of("train", arrays, **config), restarted)
        arrays = reply.content.array_records["arrays"]
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
    expected = dict(uninterrupted(torch.optim.AdamW, weight_decay=0.0))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(renewed, expected)
    assert not list(tmp_path.rglob("*.safetensors"))


def saved(context: Context) -> dict[str, tuple[int, ...]]:
    [record] = [r for r in context.state.values() if isinstance(r, ArrayRecord)]
    return {name: tuple(array.shape) for name, array in record.items()}


def one_round(algorithm: str, **more) -> tuple[Context, ArrayRecord]:
    app = app_of(algorithm=algorithm, optimizer_state="kept", **more)
    context = context_of()
    message = message_of("train", initial_arrays(app, context), server_round=1)
    reply = app(message, context)
    return context, reply.content.array_records["arrays"]


def test_the_optimizer_state_is_saved_with_the_head_and_never_sent():
    context, sent = one_round("fedrep", momentum=0.5)
    names = saved(context).keys()
    states = {name for name in names if name.startswith("optimizer.")}
    assert {name for name in names - states if not name.startswith("head.")} == set()
    # The head trains first, then the representation.
    assert {name.split(".")[1] for name in states} == {"0", "1"}
    assert all(".head." in name for name in states if ".0.sgd." in name)
    assert all(".representation." in name for name in states if ".1.sgd." in name)
    assert all(name.startswith("representation.") for name in sent)


def test_evaluations_ignore_the_optimizer_state(tmp_path):
    app = app_of(algorithm="fedrep", optimizer_state="kept")
    renewed = app_of(algorithm="fedrep")
    context = context_of(state_dir=str(tmp_path))
    arrays = initial_arrays(app, context)
    config = {"server_round": 1, "run": "r", "acknowledged_round": 0}
    app(message_of("train", arrays, **config), context)
    losses = []
    for tester in app, renewed:
        fresh = context_of(state_dir=str(tmp_path))
        config = {"server_round": 1, "run": "r", "acknowledged_round": 1}
        reply = tester(message_of("evaluate", arrays, **config), fresh)
        losses.append(reply.content.metric_records["metrics"]["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("algorithm", ["moon", "scaffold", "apfl", "fedproto"])
def test_algorithms_with_custom_steps_refuse_kept_optimizers(algorithm):
    app = make_app(resolve({**FAST, "algorithm": algorithm, "optimizer-state": "kept"}))
    with pytest.raises(SettingsError) as caught:
        initial_arrays(app, context_of())
    assert caught.value.code == "optimizer-state"


def test_a_round_without_save_keeps_the_head_with_the_new_optimizers():
    class SavesOnce(Client, supports_example_dp=True):
        personal = ("head.",)
        shared = ("representation.",)

        def fit(self, parameters, config):
            self.receive(parameters, config)
            loss = self.train("all", 1)
            if config["server-round"] == 1:
                self.save()
            return self.send(loss)

    run = resolve({**FAST, "algorithm": "fedper", "optimizer-state": "kept"})
    context = context_of()
    setup = client_setup(context, run)._replace(kind=SavesOnce)
    heads = []
    for server_round in (1, 2, 3):
        config = {"run": "r", "acknowledged-round": server_round - 1}
        client = build_client(context, setup, config)
        client._optimizers = OptimizerStates("sgd")
        parameters = client.get_parameters({})
        client.receive(parameters, config)
        heads.append(client.model.head.weight.clone())
        config["server-round"] = server_round
        client.fit(parameters, config)
        client._save_optimizers(config)
    assert not torch.equal(heads[0], heads[1])
    assert torch.equal(heads[1], heads[2])


def test_training_after_a_save_does_not_change_what_was_saved():
    heads = []

    class SavesEarly(Client, supports_example_dp=True):
        personal = ("head.",)
        shared = ("representation.",)

        def fit(self, parameters, config):
            self.receive(parameters, config)
            self.train("head", 1)
            self.save()
            heads.append(self.model.head.weight.detach().clone())
            return self.send(self.train("all", 1))

    run = resolve({**FAST, "algorithm": "fedper", "optimizer-state": "kept"})
    context = context_of()
    setup = client_setup(context, run)._replace(kind=SavesEarly)
    client = build_client(context, setup, {})
    client._optimizers = OptimizerStates("sgd")
    client.fit(client.get_parameters({}), {"server-round": 1})
    client._save_optimizers({"server-round": 1})
    assert not torch.equal(client.model.head.weight, heads[0])
    config = {"run": "r", "acknowledged-round": 1}
    again = build_client(context, setup, config)
    again.receive(again.get_parameters({}), config)
    assert torch.equal(again.model.head.weight, heads[0])


def test_a_round_counts_as_saved_if_the_optimizer_has_no_state():
    # SGD without momentum
    run = {**FAST, "algorithm": "fedavg", "optimizer-state": "kept", "momentum": 0.0}
    context = context_of()
    client = build_client(context, client_setup(context, resolve(run)), {})
    client._optimizers = OptimizerStates("sgd")
    client.fit(client.get_parameters({}), {"server-round": 1})
    client._save_optimizers({"server-round": 1})
    next_message = build_client(context, client_setup(context, resolve(run)), {})
    assert next_message.state.kept()["kept-rounds"] == [1]


def test_optimizers_of_training_after_the_last_save_are_saved():
    class SavesFirst(Client, supports_example_dp=True):
        personal = ("head.",)
        shared = ("representation.",)

        def fit(self, parameters, config):
            self.receive(parameters, config)
            self.save()
            return self.send(self.train("representation", 1))

    run = resolve({**FAST, "algorithm": "fedper", "optimizer-state": "kept"})
    context = context_of()
    setup = client_setup(context, run)._replace(kind=SavesFirst)
    client = build_client(context, setup, {})
    client._optimizers = OptimizerStates("sgd")
    parameters = client.get_parameters({})
    client.fit(parameters, {"server-round": 1})
    assert not any(name.startswith("optimizer.") for name in saved(context))
    client._save_optimizers({"server-round": 1})
    names = saved(context).keys()
    assert any(name.startswith("optimizer.0.sgd.momentum_buffer.") for name in names)
    assert any(name.startswith("head.") for name in names)
