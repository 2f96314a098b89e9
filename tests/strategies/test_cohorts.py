"""Cohorts give the same results as clients that train one by one."""

import logging
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cohort_tasks import N, dense
from outcomes import assert_same, outcome

from benchmarks.runs import Rounds
from flwr_frl import Client, FedNova, Strategy
from flwr_frl.clients import app as client_app
from flwr_frl.clients.device import rows
from flwr_frl.clients.device.codec import matrix_of
from flwr_frl.common.run_cache import begin_run
from flwr_frl.common.settings import resolve
from flwr_frl.task.models import SplitModel, split_model
from flwr_frl.task.training import cohort
from flwr_frl.task.training import local_training as calls
from flwr_frl.task.training.cohort import scratch_model
from flwr_frl.task.training.local_training import gradient, train
from flwr_frl.task.training.sgd import SGD, Proximal
from flwr_frl.task.training.stacked import Objective

CE = torch.nn.functional.cross_entropy


def together(works, size, **how):
    return list(cohort.each_together(works, size, **how))


@pytest.mark.parametrize(
    ("algorithm", "kind", "size"),
    [
        ("fedrep", "TrainCall", 3),
        ("scaffold", "TrainCall", 3),
        ("per-fedavg", "GradientCall", 3),
        ("l2gd", "GradientCall", 3),
        # These algorithms have custom training steps, so their clients train alone.
        ("apfl", "TrainCall", 0),
        ("fedcp", "TrainCall", 0),
        ("feddbe", "TrainCall", 0),
    ],
)
def test_calls_of_the_same_shape_are_batched(algorithm, kind, size, batched_calls):
    # `test_contract.py` compares the results of all algorithms.
    outcome(algorithm, 3)
    assert max(batched_calls[kind], default=0) == size


@pytest.mark.parametrize("part", ["fedrep", "dpsgd"])
def test_batch_norms_keep_statistics_per_client(part, batched_calls):
    options = {"task": "cohort_tasks:normalised", "batch-size": 3}
    together = outcome(part, N, **options)
    assert any(batched_calls.values())
    assert_same(together, outcome(part, "off", **options), 2e-5)


@dataclass(frozen=True)
class NearAndSmall(Proximal):
    """A proximal term that also penalizes the features."""

    def __call__(self, features, targets, model):
        return super().__call__(features, targets, model) + features.square().mean()


def test_custom_proximal_term_does_not_see_padding():
    def work(i: int) -> float:
        torch.manual_seed(i)
        model = dense().initial_model()
        anchor = {n: p.detach() + 0.1 for n, p in model.named_parameters()}
        loss, sgd = torch.nn.functional.cross_entropy, SGD(0.1, batch_size=10)
        train(model, "all", dense().train[i], loss, 2, sgd, NearAndSmall(0.5, anchor))
        return model.representation[0].weight.detach().norm().item()

    # The clients have 9, 9 and 4 examples.
    losses = together([lambda i=i: work(i) for i in range(3)], 3)
    assert losses == pytest.approx([work(i) for i in range(3)], rel=1e-5)


FACTOR = {"now": 1.0}


def growing(outputs, targets):
    return FACTOR["now"] * torch.nn.functional.cross_entropy(outputs, targets)


class Growing(torch.nn.Module):
    def forward(self, x):
        return FACTOR["now"] * x


def by_hand(model):
    """Replace the forward of a torch module, as some users do."""
    model.head.forward = lambda x: FACTOR["now"] * x[:, :3]
    return model


@pytest.mark.parametrize("where", ["loss", "module", "forward"])
def test_a_user_s_code_runs_in_every_call(where, monkeypatch):
    # Models with a layer norm are not stacked layer by layer.
    def work() -> float:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(6, 4), torch.nn.LayerNorm(4)]
        layers += [Growing()] if where == "module" else []
        model = SplitModel(torch.nn.Sequential(*layers), torch.nn.Linear(4, 3))
        model = by_hand(model) if where == "forward" else model
        loss = growing if where == "loss" else torch.nn.functional.cross_entropy
        batch = torch.randn(4, 6), torch.arange(4) % 3
        return gradient(model, *batch, loss, SGD()).item()

    for factor in (1.0, 3.0):
        monkeypatch.setitem(FACTOR, "now", factor)
        losses = together([work] * 3, 3)
        assert losses == pytest.approx([work()] * 3, rel=1e-5)


@pytest.mark.parametrize("algorithm", ["fedrep", "dpsgd"])
@pytest.mark.parametrize("name", ["padded", "centred", "unhashable"])
def test_models_of_all_kinds_match_sequential_training(algorithm, name):
    options = {"task": f"cohort_tasks:{name}"}
    assert_same(outcome(algorithm, N, **options), outcome(algorithm, "off", **options))


@pytest.mark.parametrize("name", ["unusual", "dropping"])
def test_calls_that_cannot_be_batched_run_one_by_one(name, caplog):
    options = {"task": f"cohort_tasks:{name}"}
    begin_run()
    with caplog.at_level(logging.WARNING, "task"):
        together = outcome("fedrep", N, **options)
    lines = [r.getMessage() for r in caplog.records if "one by one" in r.getMessage()]
    # Dropout is detected in advance. Other failures are logged once per kind of call,
    # here for training the representation; heads train on features.
    assert len(lines) == (name == "unusual")
    assert_same(together, outcome("fedrep", "off", **options))


@pytest.mark.parametrize("algorithm", ["fedrep", "l2gd", "dpsgd"])
def test_cohorts_that_exceed_the_memory_are_halved(
    algorithm, request, monkeypatch, caplog
):
    request.addfinalizer(begin_run)
    expected, gradients = outcome(algorithm, 2), Objective.gradients
    begin_run()

    def limited(self, state, names, batch, constants):
        if len(batch[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return gradients(self, state, names, batch, constants)

    monkeypatch.setattr(Objective, "gradients", limited)
    with caplog.at_level(logging.WARNING, "task"):
        assert_same(outcome(algorithm, N), expected)
    lines = [each.getMessage() for each in caplog.records if each.name == "task"]
    text = "device 'cpu' is out of memory with {} clients together; continuing with 2"
    assert lines == [text.format(5 if algorithm == "dpsgd" else 4)]


def test_a_client_that_diverges_fails_alone(batched_calls):
    # The examples of the third client are NaN.
    tasks = dense()
    tasks.train[2].inputs.fill_(float("nan"))
    made_calls = [
        calls.TrainCall(
            tasks.initial_model(),
            "all",
            tasks.train[i],
            tasks.loss,
            1,
            SGD(learning_rate=0.1, batch_size=4),
            None,
            None,
        )
        for i in range(4)
    ]
    results = together([lambda c=c: tried(c) for c in made_calls], 4)
    assert [type(r).__name__ for r in results] == [
        "float",
        "float",
        "TrainingDivergedError",
        "float",
    ]
    assert batched_calls["TrainCall"] == [4]


def tried(call):
    torch.manual_seed(0)
    try:
        return cohort.make(call)
    except ArithmeticError as error:
        return error


def test_clients_train_alone_if_a_cohort_is_not_faster(batched_calls, monkeypatch):
    for module in (calls, split_model):
        monkeypatch.setattr(module, "LARGE", 10)
    assert_same(outcome("fedrep", "auto"), outcome("fedrep", "off"), 0)
    assert not any(batched_calls.values())


def test_clients_of_a_large_model_share_it_and_run_in_sequence(
    batched_calls, monkeypatch
):
    tasks = dense()
    monkeypatch.setattr(cohort, "MOST_HELD", 10)

    def work(seed: int) -> float:
        torch.manual_seed(seed)
        model = scratch_model(tasks)
        assert model is tasks.scratch_model
        with torch.no_grad():
            model.head.bias.fill_(seed)
        # Batching this call would be faster if the model were not large.
        monkeypatch.setattr(calls.GradientCall, "fewest", 2)
        batch = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)
        gradient(model, *batch, torch.nn.functional.cross_entropy, SGD())
        return model.head.bias[0].item()

    works = [lambda seed=seed: work(seed) for seed in range(8)]
    assert together(works, 8, only_if_faster=True) == list(range(8))
    assert not any(batched_calls.values())


def test_models_with_hooks_are_not_batched(batched_calls):
    outcome("fedavg", N, task="cohort_tasks:hooked")
    assert not any(batched_calls.values())


class NormedClient(Client):
    """Divides what it has trained by the norm of its own head."""

    personal = "representation"
    shared = "head"

    def update(self):
        loss = self.train("all", 2)
        norm = self.norm(self.model.tensors["head.weight"])
        sent = {name: value / norm for name, value in self.model.state_dict().items()}
        return loss, sent

    def norm(self, weight):
        return weight.norm()


class Normed(Strategy, client=NormedClient):
    pass


class ReadingClient(NormedClient):
    """Reads a number of each client, so it cannot run for several at once."""

    def norm(self, weight):
        return weight.norm().item()


class Reading(Strategy, client=ReadingClient):
    pass


class FirstExampleClient(NormedClient):
    """Uses the examples of a client, of which several clients have none in common."""

    def norm(self, weight):
        return 1 + self.train_examples.inputs[0].norm()


class FirstExample(Strategy, client=FirstExampleClient):
    pass


@pytest.mark.parametrize(
    ("algorithm", "answered"),
    [(Normed, 4), (FedNova, 4), (Reading, 0), (FirstExample, 0)],
)
def test_update_runs_once_for_all_clients_if_it_means_the_same(
    algorithm, answered, monkeypatch
):
    counts, original = [0], rows.fit_rows

    def fit_rows(*arguments):
        replies = original(*arguments)
        counts.append(len(replies))
        return replies

    monkeypatch.setattr(client_app, "fit_rows", fit_rows)
    path = f"{algorithm.__module__}:{algorithm.__name__}"
    # All clients make one step an epoch.
    options = {"batch-size": 100}
    assert_same(outcome(path, N, **options), outcome(path, "off", **options))
    assert max(counts) == answered


@pytest.mark.parametrize("as_rows", [True, False])
def test_a_lost_state_is_reported_by_its_client_only(as_rows, monkeypatch):
    if not as_rows:
        monkeypatch.setattr(rows, "matrix_of", lambda *_: None)
    settings = {"algorithm": "fedper", "num-clients": 10, "fraction-train": 1.0}
    of_run = Rounds(resolve(settings | {"cohort": 10}))
    of_run.run(2)
    of_run.grid.contexts.data[1] = None
    of_run.run(1)
    round_ = of_run.strategy._run.round
    assert [*round_.unused] == ["000000"]
    assert not round_.rejections


# A client that sends nothing but arrays
PLAIN = SimpleNamespace(
    _upload=None, _state=SimpleNamespace(unused=""), _attachments={}
)


def test_stacked_arrays_of_a_small_model_become_rows():
    # The second one is a number of each client.
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.array([7.0, 8.0])}
    single = {name: a.astype(np.float32) for name, a in arrays.items()}
    matrix = matrix_of(single, {}, PLAIN)
    assert matrix.rows.tolist() == [[0, 1, 2, 7], [3, 4, 5, 8]]
    assert matrix.layout.places["b"] == (slice(3, 4), ())
    assert not matrix.rows.flags.writeable


@pytest.mark.parametrize(
    "other",
    [np.zeros((1, 2), np.int64), np.zeros((1, split_model.LARGE), np.float32)],
    ids=["counter", "large"],
)
def test_other_arrays_become_no_rows(other):
    arrays = {"a": np.zeros((1, 2), np.float32), "b": other}
    assert matrix_of(arrays, {}, PLAIN) is None
