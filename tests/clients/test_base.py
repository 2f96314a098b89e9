"""Base of all clients: parameter groups, receiving, saving, sending and deploying."""

import numpy as np
import pytest
import torch
from client_messages import new_context
from torch import nn

from flwr_frl.clients import FedAvgClient, FedRepClient
from flwr_frl.clients.base import Client
from flwr_frl.clients.device.groups import HEAD, REPRESENTATION
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.task.base import ExampleTask
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel

MEMORY, CONTROL, CHANGE = "memory.", "control.", "change."


def task_of(features: int = 4, classes: tuple[str, ...] = ()) -> ExampleTask:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(10, 3, generator=generator)
    sets = [ExampleSet(inputs, torch.arange(10) % 2)] * 2
    return ExampleTask(
        lambda: SplitModel(nn.Linear(3, features), nn.Linear(features, 2)),
        *(sets, sets),
        classes=classes,
    )


class Remembering(Client):
    """A client with shared, sent and personal groups in addition to the model's."""

    shared = (CONTROL, REPRESENTATION)
    sent = (CHANGE, REPRESENTATION)
    personal = (MEMORY, HEAD)

    def initial_group(self, slot):
        if slot == MEMORY:
            return {"rounds": torch.zeros(1), "sum": torch.full((2, 3), 5.0)}
        if slot == CONTROL:
            return {"weight": torch.full((2,), 7.0)}
        if slot == CHANGE:
            return {"weight": torch.zeros(2)}
        return super().initial_group(slot)

    def update(self):
        loss = self.train("all", 1)
        self.saved[MEMORY + "rounds"] += 1
        self.saved[MEMORY + "sum"] += 0.5
        change = {CHANGE + "weight": self.received[CONTROL + "weight"] * 2}
        return loss, {**self.model.state_dict(), **change}


def client_of(kind, task=None, context=None, index=0) -> Client:
    state = PersonalState(context or new_context())
    return kind(task or task_of(), index, state, kind._settings_type())


def test_the_structure_depends_only_on_shared_arrays():
    def structure(kind, **task) -> str:
        return client_of(kind, task_of(**task)).get_properties({})["structure"]

    class Wider(Remembering):
        def initial_group(self, slot):
            slots = super().initial_group(slot)
            return {"weight": torch.zeros(3)} if slot == CONTROL else slots

    class Elsewhere(Remembering):
        personal = (HEAD,)

    assert structure(Remembering) == structure(Elsewhere)
    assert structure(Remembering) != structure(Wider)
    assert structure(Remembering) != structure(Remembering, features=5)
    # Clients with a shared head must have the same classes.
    assert structure(FedRepClient) == structure(FedRepClient, classes=("a", "b"))
    assert structure(FedAvgClient) != structure(FedAvgClient, classes=("a", "b"))


# Receiving, saving and sending


def test_clients_do_not_modify_the_common_initial_values():
    # `fit` modifies saved arrays in place, and all clients share one task.
    class Collecting(Remembering):
        personal = ("model.",)

        def update(self):
            for tensor in self.saved.values():
                tensor += 1
            return 0.0, self._initial_arrays(self.sent)

    task = task_of()
    before = {name: value.clone() for name, value in task.initial_state.items()}
    for index in (0, 1):
        context = new_context()
        client = client_of(Collecting, task, context, index)
        client.fit(client.get_parameters({}), {"server-round": 1})
        head = PersonalState(context).load()["model.head.weight"]
        np.testing.assert_allclose(head, before["head.weight"].numpy() + 1)
    assert all(torch.equal(task.initial_state[n], before[n]) for n in before)


def test_sent_arrays_are_copies_in_c_order():
    client = client_of(Remembering)
    sent = client.get_parameters({})
    arrays, num_examples, metrics = client.fit(sent, {"server-round": 1})
    assert (num_examples, list(metrics)) == (10, ["train-loss"])
    names = dict(zip(client._array_names(client.sent), arrays, strict=True))
    assert names["change.weight"].tolist() == [14.0, 14.0]
    before = [array.copy() for array in arrays]
    # The next client trains in the same model, and this client may continue to train.
    with torch.no_grad():
        for tensor in (*client.model.parameters(), *client.received.values()):
            tensor += 1
    for array, value in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, value)
    # Changes by the server do not affect the client, either.
    weight = client.model.representation.weight.clone()
    for array in arrays:
        array += 100
    assert torch.equal(client.model.representation.weight, weight)
    transposed = torch.arange(12.0).reshape(3, 4).T
    upload = {**client.model.tensors, "change.weight": torch.zeros(2)}
    upload["representation.weight"] = transposed
    (array, *_), _, _ = client._reply(0.0, upload)
    assert array.flags.c_contiguous
    np.testing.assert_array_equal(array, transposed.numpy())


# The deployed model


def test_evaluate_tests_the_deployed_model():
    class Certain(FedAvgClient):
        """Deploys a model that always predicts class 1, whatever it has received."""

        def deployed_model(self):
            model = self.task.initial_model()
            with torch.no_grad():
                model.head.weight.zero_()
                model.head.bias.copy_(torch.tensor([0.0, 3.0]))
            return model

    plain, certain = client_of(FedAvgClient), client_of(Certain)
    parameters = plain.get_parameters({})
    loss, n, metrics = certain.evaluate(parameters, {})
    assert n == 10
    # Five of ten examples are of class 1; the cross-entropies are log(1 + e^∓3).
    assert metrics["accuracy"] == 0.5
    assert loss == pytest.approx(np.mean(np.log1p(np.exp([-3.0, 3.0]))), rel=1e-5)
    plain._receive(parameters, {})
    assert plain.deployed_model() is plain.model
    # The accuracy of the received model, which is another one, is reported, too.
    received = plain.evaluate(parameters, {})[2]
    assert metrics["accuracy-global"] == received["accuracy"]
    assert "accuracy-global" not in received
