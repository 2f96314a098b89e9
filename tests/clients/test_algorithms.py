"""FedRep, FedPer, FedAvg, local training and fine-tuning match a NumPy implementation.

The task is linear with two bias-free layers. Each batch contains all examples, so
shuffling has no effect and an epoch is one step.
"""

import numpy as np
import pytest
import torch
from client_messages import new_context
from flwr.app import Context
from torch import nn

from flwr_frl.clients import (
    APFLClient,
    FedAvgFTClient,
    FedCPClient,
    FedDBEClient,
    FedRoDClient,
)
from flwr_frl.clients.base import Client
from flwr_frl.clients.device.parameter_groups import array_names
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.fedavg import FedAvgClient
from flwr_frl.clients.fedper import FedPerClient
from flwr_frl.clients.fedrep import FedRepClient
from flwr_frl.clients.fine_tuning import FineTuned
from flwr_frl.clients.local import LocalClient
from flwr_frl.common.settings import build, resolve
from flwr_frl.task.base import ExampleTask
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.tasks import build_task
from flwr_frl.task.tasks.linear import LinearTask

HEAD_EPOCHS, REPRESENTATION_EPOCHS = 4, 3
RATE, MOMENTUM, DECAY = 0.05, 0.6, 0.03
SETTINGS = resolve(
    {
        "task": "linear",
        "head-epochs": HEAD_EPOCHS,
        "representation-epochs": REPRESENTATION_EPOCHS,
        "finetune-epochs": 5,
        "batch-size": 100,
        "learning-rate": RATE,
        "momentum": MOMENTUM,
        "weight-decay": DECAY,
    }
)
TASK = LinearTask(dimension=4, rank=2, samples=9, num_clients=3)


def client_of(
    kind: type[Client],
    context: Context,
    index: int = 1,
    acknowledged: int | None = None,
) -> Client:
    state = PersonalState(context, None, acknowledged)
    return kind(TASK, index, state, build(kind.settings_type, SETTINGS))


def initial() -> tuple[np.ndarray, np.ndarray]:
    state = TASK.initial_state
    return (
        state["representation.weight"].double().numpy(),
        state["head.weight"].double().numpy(),
    )


def numpy_train(
    b: np.ndarray, w: np.ndarray, index: int, epochs: int, parts: str, mu: float = 0.0
) -> tuple[np.ndarray, np.ndarray, float]:
    """Minimise mean (y - w b x)² by momentum SGD, starting with zero velocities.

    If ``mu`` > 0, the proximal term mu/2 ‖· − start‖² is added to the objective, but
    not to the returned loss.
    """
    start_b, start_w = b, w
    x, y = TASK.draw(index)
    y = y[:, None]
    velocity_b, velocity_w, loss = np.zeros_like(b), np.zeros_like(w), 0.0
    for _ in range(epochs):
        residual = x @ b.T @ w.T - y
        loss = float(np.mean(residual**2))
        slope = 2 * residual / len(y)
        gradient_w = slope.T @ (x @ b.T) + DECAY * w + mu * (w - start_w)
        gradient_b = (slope @ w).T @ x + DECAY * b + mu * (b - start_b)
        if "w" in parts:
            velocity_w = MOMENTUM * velocity_w + gradient_w
            w = w - RATE * velocity_w
        if "b" in parts:
            velocity_b = MOMENTUM * velocity_b + gradient_b
            b = b - RATE * velocity_b
    return b, w, loss


def assert_near(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_fedrep_trains_its_own_head_and_then_the_representation():
    context = new_context()
    b, w = initial()
    sent = b
    for server_round in (1, 2, 3):
        reply = client_of(FedRepClient, context, acknowledged=server_round - 1).fit(
            [sent.astype(np.float32)], {"server-round": server_round}
        )
        _, w, _ = numpy_train(sent, w, 1, HEAD_EPOCHS, "w")
        b, _, loss = numpy_train(sent, w, 1, REPRESENTATION_EPOCHS, "b")
        arrays, num_examples, metrics = reply
        # Only the representation is sent; the head is saved for the next round.
        assert len(arrays) == 1
        assert_near(arrays[0], b)
        assert num_examples == 9
        assert metrics == {"train-loss": pytest.approx(loss, rel=1e-5)}
        kept = PersonalState(context).load()
        assert list(kept) == ["head.weight"]
        assert_near(kept["head.weight"], w)
        # The server sends a different representation in the next round.
        sent = b + 0.1


@pytest.mark.parametrize(
    ("kind", "shared", "personal"),
    [(FedPerClient, 1, ["head"]), (LocalClient, 0, ["representation", "head"])],
)
def test_fedper_and_local_train_both_parts_and_save_personal_ones(
    kind, shared, personal
):
    context = new_context()
    b, w = initial()
    for server_round in (1, 2, 5):
        arrays, num_examples, metrics = client_of(kind, context).fit(
            [b.astype(np.float32)][:shared], {"server-round": server_round}
        )
        b, w, loss = numpy_train(b, w, 1, REPRESENTATION_EPOCHS, "bw")
        assert (len(arrays), num_examples) == (shared, 9)
        for array in arrays:
            assert_near(array, b)
        assert metrics["train-loss"] == pytest.approx(loss, rel=1e-5)
        saved = PersonalState(context).load()
        assert list(saved) == [f"{name}.weight" for name in personal]
        assert_near(saved["head.weight"], w)
        if len(personal) > 1:
            assert_near(saved["representation.weight"], b)


def test_fedavg_trains_and_sends_everything():
    context = new_context()
    b, w = initial()
    b, w = b + 0.2, w - 0.1
    arrays, num_examples, metrics = client_of(FedAvgClient, context).fit(
        [b.astype(np.float32), w.astype(np.float32)], {"server-round": 1}
    )
    b, w, loss = numpy_train(b, w, 1, REPRESENTATION_EPOCHS, "bw")
    assert len(arrays) == 2
    assert_near(arrays[0], b)
    assert_near(arrays[1], w)
    assert num_examples == 9
    assert metrics["train-loss"] == pytest.approx(loss, rel=1e-5)
    assert len(context.state) == 0


@pytest.mark.parametrize("mu", [0.8, 0.0])
def test_fedavg_clients_add_the_proximal_term_that_a_server_sends(mu):
    b, w = initial()
    b, w = b + 0.2, w - 0.1
    client = client_of(FedAvgClient, new_context())
    sent = [b.astype(np.float32), w.astype(np.float32)]
    arrays, _, metrics = client.fit(sent, {"server-round": 1, "proximal-mu": mu})
    near_b, near_w, loss = numpy_train(b, w, 1, REPRESENTATION_EPOCHS, "bw", mu)
    assert_near(arrays[0], near_b)
    assert_near(arrays[1], near_w)
    assert metrics["train-loss"] == pytest.approx(loss, rel=1e-5)
    # The term has a visible effect, and only for this message.
    free_b, _, _ = numpy_train(b, w, 1, REPRESENTATION_EPOCHS, "bw")
    assert (np.abs(free_b - near_b).max() > 1e-3) == (mu > 0)
    (again, _), _, _ = client.fit(sent, {"server-round": 2})
    assert_near(again, free_b)


def test_the_proximal_term_does_not_affect_personal_groups():
    # The server sends FedRep's representation but not its head.
    b, w = initial()
    context = new_context()
    config = {"server-round": 1, "proximal-mu": 0.8}
    arrays, _, _ = client_of(FedRepClient, context).fit([b.astype(np.float32)], config)
    _, w, _ = numpy_train(b, w, 1, HEAD_EPOCHS, "w")
    near, _, _ = numpy_train(b, w, 1, REPRESENTATION_EPOCHS, "b", 0.8)
    assert_near(PersonalState(context).load()["head.weight"], w)
    assert_near(arrays[0], near)


def test_proximal_equals_half_mu_times_the_squared_distance():
    # μ/2 ‖w − w_received‖², where all 8 + 2 parameters differ by 0.3
    b, w = initial()
    client = client_of(FedAvgClient, new_context())
    sent = [b.astype(np.float32), w.astype(np.float32)]
    for mu in (0.8, 0.0):
        client.receive(sent, {"server-round": 1, "proximal-mu": mu})
        with torch.no_grad():
            for parameter in client.model.parameters():
                parameter.add_(0.3)
        count = sum(p.numel() for p in client.model.parameters())
        term = client.proximal(torch.zeros(1), client.model)
        assert torch.as_tensor(term).item() == pytest.approx(
            mu / 2 * count * 0.09, rel=1e-5
        )


@pytest.mark.parametrize("kind", [APFLClient, FedCPClient, FedDBEClient, FedRoDClient])
def test_custom_training_steps_include_the_proximal_term(kind):
    moved = {}
    for mu in (0.0, 5.0):
        sets = [ExampleSet(torch.eye(4, 3), torch.tensor([0, 1, 1, 0]))]
        task = ExampleTask(
            lambda: SplitModel(nn.Linear(3, 4), nn.Linear(4, 2)),
            *(sets, sets),
            classes=("a", "b"),
        )
        state = PersonalState(new_context())
        client = kind(
            task,
            0,
            state,
            kind.settings_type(learning_rate=0.1, representation_epochs=5),
        )
        sent = client.get_parameters({})
        replied, *_ = client.fit(sent, {"server-round": 1, "proximal-mu": mu})
        pairs = zip(array_names(client, client.sent), replied, strict=True)
        received = dict(zip(array_names(client, client.shared), sent, strict=True))
        changes = {n: a - received[n] for n, a in pairs if n.startswith("repr")}
        moved[mu] = sum(np.square(change).sum() for change in changes.values())
    assert 0 < moved[5.0] < 0.9 * moved[0.0]


def test_the_proximal_term_adds_to_a_client_s_regularizer():
    # A regularizer as in FLUTE: here 0.3 Σ b, whose gradient is 0.3 everywhere
    b, w = initial()
    client = client_of(FedAvgClient, new_context())
    config = {"server-round": 1, "proximal-mu": 0.8}
    client.receive([b.astype(np.float32), w.astype(np.float32)], config)
    term = 0.3 * torch.ones(2, 4)
    client.train("all", 2, lambda _, __, m: (term * m.representation.weight).sum())
    regularized = client.model.representation.weight.detach().clone()
    client.receive([b.astype(np.float32), w.astype(np.float32)], config)
    client.train("all", 2, correction={"representation.weight": term})
    # A correction is equivalent to a regularizer with that gradient.
    assert_near(
        client.model.representation.weight.detach().numpy(), regularized.numpy()
    )
    without, _, _ = numpy_train(b, w, 1, 2, "bw", 0.8)
    # Two steps shift b by about -0.05 (0.3 + (0.6 + 1) 0.3) = -0.039.
    assert (regularized.numpy() - without).mean() == pytest.approx(-0.039, rel=0.05)


def expected_loss(b: np.ndarray, w: np.ndarray, index: int) -> float:
    x, y = TASK.draw(index, 2**31, 200)
    return float(np.mean((x @ b.T @ w.T - y[:, None]) ** 2))


def test_evaluation_uses_the_received_representation_and_the_personal_head():
    context = new_context()
    b, w = initial()
    client_of(FedRepClient, context).fit([b.astype(np.float32)], {"server-round": 1})
    _, w, _ = numpy_train(b, w, 1, HEAD_EPOCHS, "w")
    other = np.full_like(b, 0.3)
    loss, num_examples, metrics = client_of(FedRepClient, context).evaluate(
        [other.astype(np.float32)], {"server-round": 1}
    )
    assert num_examples == 200
    assert loss == pytest.approx(expected_loss(other, w, 1), rel=1e-4)
    # The targets are not classes, so there is no accuracy.
    assert metrics == {}
    # A client that has never trained is tested with the initial head and saves nothing.
    context, (_, w) = new_context(), initial()
    loss, _, _ = client_of(FedRepClient, context, index=2).evaluate(
        [other.astype(np.float32)], {"server-round": 7}
    )
    assert loss == pytest.approx(expected_loss(other, w, 2), rel=1e-4)
    assert len(context.state) == 0


def test_fine_tuning_trains_the_head_only_for_the_test():
    context = new_context()
    b, w = initial()
    sent = [b.astype(np.float32), w.astype(np.float32)]
    _, tuned, _ = numpy_train(b, w, 1, 5, "w")
    for _ in range(2):
        loss, _, metrics = client_of(FedAvgFTClient, context).evaluate(
            sent, {"server-round": 3}
        )
        # Both evaluations agree: nothing is saved, and sent arrays are unchanged.
        assert loss == pytest.approx(expected_loss(b, tuned, 1), rel=1e-4)
        assert metrics == {}
    assert len(context.state) == 0
    assert_near(sent[1], w)


def test_fine_tuning_reports_the_global_model_s_accuracy_too():
    task = build_task(resolve({"head-layers": 1}), 20)
    settings = FineTuned.settings_type(learning_rate=0.05, finetune_epochs=20)
    client = FedAvgFTClient(task, 0, PersonalState(new_context()), settings)
    parameters = client.get_parameters({})
    torch.manual_seed(0)
    _, _, metrics = client.evaluate(parameters, {"server-round": 1})
    plain = FedAvgClient(task, 0, PersonalState(new_context()), settings)
    _, _, before = plain.evaluate(parameters, {"server-round": 1})
    assert metrics["accuracy-global"] == before["accuracy"]
    assert metrics["accuracy"] > before["accuracy"]


def test_zero_epochs_return_the_received_arrays():
    settings = FedRepClient.settings_type(head_epochs=0, representation_epochs=0)
    client = FedRepClient(TASK, 0, PersonalState(new_context()), settings)
    sent = np.arange(8, dtype=np.float32).reshape(2, 4)
    arrays, _, metrics = client.fit([sent], {"server-round": 1})
    np.testing.assert_array_equal(arrays[0], sent)
    assert metrics == {"train-loss": 0.0}


def test_augment_head_controls_augmentation_in_head_epochs(monkeypatch):
    seen = []
    colour = ExampleSet(torch.zeros(3, 2, 2, 3), torch.zeros(3, 1), augment=True)
    monkeypatch.setattr(
        "flwr_frl.clients.base.train",
        lambda model, part, examples, *_: seen.append(examples),
    )
    for augment_head in (True, False):
        settings = FedRepClient.settings_type(augment_head=augment_head)
        task = ExampleTask(TASK.initial_model, [colour], [colour])
        client = FedRepClient(task, 0, PersonalState(new_context()), settings)
        client.train("head", 1)
        client.train("representation", 1)
    assert [examples.augment for examples in seen] == [True, True, False, True]
