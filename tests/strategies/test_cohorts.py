"""Cohorts give the same results as clients that train one by one."""

import logging
from dataclasses import dataclass

import pytest
import torch
from cohort_tasks import N, dense, normed
from outcomes import assert_same, outcome

from flwr_frl.common.run_cache import begin_run
from flwr_frl.common.settings import SettingsError
from flwr_frl.task import ExampleSet
from flwr_frl.task.models import SplitModel, split_model
from flwr_frl.task.training import (
    SGD,
    Proximal,
    calls,
    cohort,
    evaluate,
    gradient,
    scratch_model,
    train,
)

CE = torch.nn.functional.cross_entropy


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
    losses = list(cohort.each_together([lambda i=i: work(i) for i in range(3)], 3))
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
        losses = list(cohort.each_together([work] * 3, 3))
        assert losses == pytest.approx([work()] * 3, rel=1e-5)


@pytest.mark.parametrize("algorithm", ["fedrep", "dpsgd"])
@pytest.mark.parametrize("name", ["padded", "centred", "unhashable"])
def test_models_of_all_kinds_match_sequential_training(algorithm, name):
    options = {"task": f"cohort_tasks:{name}"}
    assert_same(outcome(algorithm, N, **options), outcome(algorithm, "off", **options))


def test_ignored_targets_in_padded_batches():
    # The mean excludes ignored targets, so each batch must have a target that counts.
    options = {"task": "cohort_tasks:ignoring", "batch-size": 100}
    assert_same(outcome("fedavg", N, **options), outcome("fedavg", "off", **options))


@pytest.mark.parametrize("algorithm", ["l2gd", "dpsgd", "choco-sgd", "squarm-sgd"])
def test_batch_of_ignored_targets_does_not_reject_the_round(algorithm, caplog):
    # Every fourth target is ignored, and each batch has one target.
    options = {"task": "cohort_tasks:ignoring", "batch-size": 1, "rounds": 8}
    assert_same(outcome(algorithm, N, **options), outcome(algorithm, "off", **options))
    assert "rejected" not in caplog.text


def test_batch_of_ignored_targets_is_skipped():
    def ignoring() -> list:
        # Of their two targets, the three clients ignore none, one or both.
        sets = [ExampleSet(torch.eye(6)[:2], torch.tensor([0, 1])) for _ in range(3)]
        sets[1].targets[1] = sets[2].targets[:] = -100
        return sets

    def work(i: int) -> tuple[float, torch.Tensor]:
        torch.manual_seed(i)
        model = dense().initial_model()
        sgd = SGD(0.5, 0.9, 0.1, batch_size=1)
        loss = train(model, "all", ignoring()[i], CE, 2, sgd)
        return loss, model.head.weight.detach().clone()

    alone = [work(i) for i in range(3)]
    batched = list(cohort.each_together([lambda i=i: work(i) for i in range(3)], 3))
    for single, result in zip(alone, batched, strict=True):
        assert single[0] == pytest.approx(result[0], rel=1e-5)
        torch.testing.assert_close(single[1], result[1])
    # A client without targets keeps its model; one with a single target learns from it.
    torch.manual_seed(2)
    assert alone[2][0] == 0
    assert torch.equal(alone[2][1], dense().initial_model().head.weight)
    torch.manual_seed(1)
    model, one = dense().initial_model(), ignoring()[1]
    one = ExampleSet(one.inputs[:1], one.targets[:1])
    loss = train(model, "all", one, CE, 2, SGD(0.5, 0.9, 0.1, batch_size=1))
    assert loss == pytest.approx(alone[1][0], rel=1e-5)
    torch.testing.assert_close(model.head.weight.detach(), alone[1][1])


def test_models_with_hooks_are_not_batched(batched_calls):
    outcome("fedavg", N, task="cohort_tasks:hooked")
    assert not any(batched_calls.values())


def test_no_grad_mode_does_not_reach_the_next_client():
    def work(silent: bool) -> tuple[bool, float]:
        model = dense().initial_model()
        examples, loss = dense().test[0], torch.nn.functional.cross_entropy
        if silent:
            with torch.no_grad():
                evaluate(model, examples, loss)
        torch.manual_seed(0)
        return torch.is_grad_enabled(), train(model, "all", examples, loss, 2, SGD())

    silent = [True, False, False]
    results = list(cohort.each_together([lambda s=s: work(s) for s in silent], 3))
    assert [enabled for enabled, _ in results] == [True] * 3
    assert [loss for _, loss in results] == pytest.approx([work(False)[1]] * 3)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("begins", [None, 2.0])
def test_gradients_are_added_to_existing_ones(begins):
    def work(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        model, batch = dense().initial_model(), torch.randn(4, 6)
        model.representation.requires_grad_(False)
        weight = model.head.weight
        weight.grad = None if begins is None else torch.full_like(weight, begins)
        targets = torch.zeros(4, dtype=torch.int64)
        gradient(model, batch, targets, torch.nn.functional.cross_entropy, SGD())
        assert model.representation[0].weight.grad is None
        return weight.grad

    gradients = list(cohort.each_together([lambda s=s: work(s) for s in range(3)], 3))
    for seed, value in enumerate(gradients):
        torch.testing.assert_close(value, work(seed))


def test_an_optimizer_can_use_the_gradients():
    def work(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        model, loss = dense().initial_model(), torch.nn.functional.cross_entropy
        optimizer = SGD(learning_rate=0.5).optimizer(model)
        gradient(model, torch.randn(4, 6), torch.arange(4) % 3, loss, SGD())
        optimizer.step()
        return dict(model.state_dict())

    states = list(cohort.each_together([lambda s=s: work(s) for s in range(3)], 3))
    for seed, state in enumerate(states):
        torch.testing.assert_close(state, work(seed))


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
    results = list(cohort.each_together([lambda c=c: tried(c) for c in made_calls], 4))
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


def test_each_client_has_its_own_random_numbers():
    def work(seed: int) -> list[float]:
        torch.manual_seed(seed)
        first = torch.rand(1).item()
        model = dense().initial_model()
        batch = torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64)
        gradient(model, *batch, torch.nn.functional.cross_entropy, SGD())
        return [first, torch.rand(1).item(), torch.initial_seed()]

    works = [lambda seed=seed: work(seed) for seed in range(3)]
    assert list(cohort.each_together(works, 3)) == [work() for work in works]


def test_clients_train_alone_if_a_cohort_is_not_faster(batched_calls, monkeypatch):
    monkeypatch.setattr(split_model, "LARGE", 10)
    assert_same(outcome("fedrep", "auto"), outcome("fedrep", "off"), 0)
    assert not any(batched_calls.values())


@pytest.mark.parametrize("task", ["dense", "normed"])
def test_small_heads_of_large_models_train_together(task, batched_calls, monkeypatch):
    # The heads have 18 values, the models 53 and more.
    monkeypatch.setattr(split_model, "LARGE", 20)
    monkeypatch.setattr(calls, "FEWEST", 3)
    options = {"task": f"cohort_tasks:{task}", "rounds": 2}
    together = outcome("fedrep", "auto", **options)
    # The heads of a round's four clients; the representations train one by one.
    assert batched_calls == {"TrainCall": [4, 4], "GradientCall": []}
    assert_same(together, outcome("fedrep", "off", **options), 1e-6)


def test_clients_that_never_wait_use_the_same_model(monkeypatch):
    monkeypatch.setattr(split_model, "LARGE", 10)
    tasks, used = dense(), []

    def work(i: int) -> None:
        torch.manual_seed(i)
        used.append(scratch_model(tasks))
        train(used[-1], "all", tasks.train[i], CE, 1, SGD(batch_size=4))

    works = [lambda i=i: work(i) for i in range(N)]
    list(cohort.each_together(works, N, only_if_faster=True))
    assert len({id(model) for model in used}) == 1


def test_clients_form_smaller_cohorts_if_their_models_are_not_small(monkeypatch):
    monkeypatch.setattr(cohort, "MOST_NOT_SMALL", 3)
    held, most = set(), []

    def work(i: int) -> None:
        torch.manual_seed(i)
        model = scratch_model(tasks)
        held.add(i)
        train(model, "all", tasks.train[i], CE, 1, SGD(batch_size=4))
        most.append(len(held))
        held.remove(i)

    tasks = dense()
    works = [lambda i=i % N: work(i) for i in range(N)]
    list(cohort.each_together(works, N, only_if_faster=True))
    assert max(most) == N
    most.clear()
    monkeypatch.setattr(cohort, "SMALL", 10)
    list(cohort.each_together(works, N, only_if_faster=True))
    assert max(most) == 3


@pytest.mark.parametrize("size", ["0", "-1", "many", "1.5"])
def test_invalid_cohort_is_rejected(size):
    with pytest.raises(SettingsError) as caught:
        outcome("fedrep", size)
    assert caught.value.code == "cohort"


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
    assert list(cohort.each_together(works, 8, only_if_faster=True)) == list(range(8))
    assert not any(batched_calls.values())


def test_large_model_stays_shared_if_a_small_one_is_used_as_well(monkeypatch):
    large, small = normed(), dense()
    sizes = [task.scratch_model.structure.num_values for task in (large, small)]
    assert sizes[0] > sizes[1]
    monkeypatch.setattr(cohort, "MOST_HELD", sizes[1])

    def work(number: int) -> float:
        torch.manual_seed(number)
        model, other = map(scratch_model, (large, small))
        with torch.no_grad():
            model.head.bias.fill_(number)
        batch = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)
        gradient(other, *batch, torch.nn.functional.cross_entropy, SGD())
        return model.head.bias[0].item()

    works = [lambda n=n: work(n) for n in range(8)]
    assert list(cohort.each_together(works, 8, only_if_faster=True)) == list(range(8))
