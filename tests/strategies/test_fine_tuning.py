"""Fine-tuned variants of global methods: the method followed by extra local epochs."""

import pytest
from paper_rounds import assert_same_arrays
from softmax_runs import RATE, N, assert_same, gradient, loss_of, matrix, run

from flwr_frl.clients.algorithms import client_class
from flwr_frl.clients.fine_tuning import FineTuned
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import build_strategy

EPOCHS = 4
USUAL = {"weight_decay": 0.05, "proximal_mu": 1.5}


@pytest.mark.parametrize(
    ("base", "srpfl"), [("fedavg", False), ("fedprox", True), ("scaffold", False)]
)
def test_variant_trains_like_its_base_and_tests_a_fine_tuned_head(base, srpfl):
    more = {"evaluate": True, "srpfl": srpfl, **USUAL}
    result = run(f"{base}-ft", 3, finetune_epochs=EPOCHS, **more)
    plain = run(base, 3, **more)
    assert_same_arrays(result, plain)
    for kept, others in zip(result.kept[-1], plain.kept[-1], strict=True):
        assert_same(kept, others)
    for i in range(N):
        # The head is the whole model here. Neither μ nor c affects fine-tuning.
        tuned = matrix(result.arrays[-1])
        for _ in range(EPOCHS):
            tuned = tuned - RATE * gradient(tuned, i, USUAL["weight_decay"])
        metrics, others = result.metrics[-1][i], plain.metrics[-1][i]
        assert metrics["loss"] == pytest.approx(loss_of(tuned, i), abs=1e-5)
        assert metrics["accuracy-global"] == others["accuracy"]
    accuracies = [metrics["accuracy"] for metrics in result.metrics[-1]]
    assert accuracies != [metrics["accuracy-global"] for metrics in result.metrics[-1]]


def test_without_epochs_the_variant_equals_its_base():
    result = run("scaffold-ft", 2, evaluate=True, finetune_epochs=0)
    plain = run("scaffold", 2, evaluate=True)
    for metrics, others in zip(result.metrics[-1], plain.metrics[-1], strict=True):
        assert metrics["loss"] == others["loss"]
        assert metrics["accuracy"] == metrics["accuracy-global"] == others["accuracy"]


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "flanp"])
def test_a_variant_is_tested_in_the_last_round_with_the_traits_of_its_base(name):
    variant = resolve({"algorithm": f"{name}-ft"})
    assert build_strategy(variant)._traits.evaluate_last_round_only
    kind, base = client_class(variant), client_class(resolve({"algorithm": name}))
    assert issubclass(kind, FineTuned)
    assert issubclass(kind, base)
    assert kind._traits == base._traits
