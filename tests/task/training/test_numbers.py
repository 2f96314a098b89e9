"""Local training: numerical problems, hyper-parameters, and evaluation."""

import copy
import math

import pytest
import torch
from small_models import (
    CE,
    MSE,
    images,
    linear_model,
    regression,
    same_bits,
    state_of,
    with_batch_norm_and_dropout,
)
from torch import nn

from flwr_frl.common.errors import TrainingDivergedError
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel, build_model
from flwr_frl.task.training.local_training import evaluate, train
from flwr_frl.task.training.sgd import SGD

# Divergence, precision and hyper-parameters


@pytest.mark.parametrize("part", ["head", "representation", "all"])
def test_divergence_error_names_the_learning_rate(part):
    model, examples = linear_model(4, 3, 2), regression(20, 4, 2)
    sgd = SGD(learning_rate=1e20, batch_size=5)
    with pytest.raises(TrainingDivergedError, match=r"learning-rate 1e\+20"):
        train(model, part, examples, MSE, 30, sgd)


def test_bfloat16_is_near_float32():
    losses, states = [], []
    for bfloat16 in (False, True):
        torch.manual_seed(0)
        model = build_model("digits-cnn", (1, 8, 8), 10)
        sgd = SGD(learning_rate=0.05, bfloat16=bfloat16)
        torch.manual_seed(1)
        data = images(60, 10)
        train(model, "head", data, CE, 1, sgd)
        losses.append(train(model, "all", data, CE, 2, sgd))
        states.append(state_of(model))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]
    for name, value in states[1].items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, states[0][name], rtol=0.1, atol=0.02)


# Evaluation


def test_evaluation_changes_nothing_and_uses_no_randomness():
    model = with_batch_norm_and_dropout()
    before = state_of(model)
    examples = images(70, 3, augment=True)
    results = {evaluate(model, examples, CE) for _ in range(3)}
    assert len(results) == 1
    assert same_bits(state_of(model), before)
    plain = copy.deepcopy(model).eval()
    with torch.no_grad():
        ((x, y),) = examples.batches(70)
        right = (plain(x).argmax(1) == y).float().mean()
    assert results.pop()[1] == pytest.approx(right.item())


def test_measures_are_nan_if_they_are_undefined():
    model = SplitModel(nn.Identity(), nn.Identity())
    for targets in (torch.zeros(0).long(), torch.full((3,), -100)):
        examples = ExampleSet(torch.ones(len(targets), 2), targets)
        assert all(map(math.isnan, evaluate(model, examples, CE)))
    # The targets are counts, and with a single output there is no largest one.
    examples = ExampleSet(torch.ones(4, 2), torch.tensor([0, 3, 1, 2]))
    model = SplitModel(nn.Identity(), nn.Linear(2, 1))

    def poisson(outputs, targets):
        return nn.functional.poisson_nll_loss(outputs[:, 0], targets)

    loss, accuracy = evaluate(model, examples, poisson)
    assert math.isfinite(loss)
    assert math.isnan(accuracy)


def test_evaluation_excludes_ignored_targets(monkeypatch):
    # Sequences of two positions, one example per batch. Outputs equal inputs. Two
    # positions of the first count (right and wrong), one of the second (right), and
    # none of the third. Cross-entropy of two outputs that differ by d is log(1 + e^-d).
    inputs = torch.tensor(
        [[[2.0, 2.0], [0.0, 0.0]], [[0.0, 9.0], [1.0, 0.0]], [[5.0, 0.0], [0.0, 5.0]]]
    )
    examples = ExampleSet(inputs, torch.tensor([[0, 1], [1, -100], [-100, -100]]))
    monkeypatch.setattr("flwr_frl.task.training.local_training.EVALUATION_BATCH", 1)
    model = SplitModel(nn.Identity(), nn.Identity())
    loss, accuracy = evaluate(model, examples, CE)
    losses = [math.log(1 + math.exp(d)) for d in (-2, 2, -1)]
    assert loss == pytest.approx(sum(losses) / 3)
    assert accuracy == pytest.approx(2 / 3)
