"""Fine-tuned variants of global methods: the method followed by extra local epochs."""

import pytest
from paper_rounds import assert_same_arrays
from softmax_runs import RATE, N, assert_same, gradient, loss_of, matrix, run

from flwr_frl.clients import FedAvgClient, FedBNClient
from flwr_frl.clients.algorithms import client_class
from flwr_frl.clients.base import deployed_groups
from flwr_frl.clients.fine_tuning import FineTuned, fine_tuned
from flwr_frl.common.settings import SettingsError, resolve
from flwr_frl.strategies import FedAvg, FedAvgFT, build_strategy
from flwr_frl.strategies.algorithms import strategy_class

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


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("fedprox-ft", "flwr_frl.strategies.averaging:FedProx-ft"),
        ("flute-ft", "flwr_frl.strategies.flute:FLUTE-ft"),
        ("flanp-ft", "flwr_frl.strategies.srpfl:FLANP-ft"),
        ("outsiders:Hooked-ft", "outsiders:Hooked-ft"),
    ],
)
def test_any_global_method_has_a_fine_tuned_variant(name, path):
    settings = resolve({"algorithm": name})
    strategy, client = strategy_class(settings), client_class(settings)
    assert strategy is strategy_class({**settings, "algorithm": path})
    assert f"{strategy.__module__}:{strategy.__qualname__}" == path
    assert build_strategy(settings)._traits.evaluate_last_round_only
    plain = {**settings, "algorithm": name.removesuffix("-ft")}
    assert issubclass(strategy, strategy_class(plain))
    assert issubclass(client, FineTuned)
    assert issubclass(client, client_class(plain))


def test_fine_tuning_commutes_with_srpfl():
    wrapped = resolve({"algorithm": "srpfl", "srpfl-base": "fedprox-ft"})
    around = resolve({"algorithm": "srpfl-ft", "srpfl-base": "fedprox"})
    assert client_class(wrapped) is client_class(around)
    for settings in (wrapped, around):
        assert build_strategy(settings)._traits.evaluate_last_round_only


def test_variant_is_a_single_class():
    assert strategy_class(resolve({"algorithm": "fedavg-ft"})) is FedAvgFT
    client = client_class(resolve({"algorithm": "fedavg"}))
    tuned = client_class(resolve({"algorithm": "fedavg-ft"}))
    assert tuned is fine_tuned(client)
    assert FedAvgFT(fraction_train=0.25).settings.fraction_train == 0.25
    assert issubclass(FedAvgFT, FedAvg)


@pytest.mark.parametrize("name", ["fedrep", "ditto", "local", "dpsgd", "lg-srpfl"])
def test_methods_with_personal_models_cannot_be_fine_tuned(name):
    with pytest.raises(SettingsError) as caught:
        client_class(resolve({"algorithm": f"{name}-ft"}))
    line = "Client cannot be fine-tuned with '-ft'; it must use the whole shared model"
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_methods_whose_groups_depend_on_the_client_cannot_be_fine_tuned():
    class Mine(FedAvgClient):
        @property
        def shared(self):
            return ("representation.",)

    with pytest.raises(SettingsError, match="must use the whole shared model"):
        fine_tuned(Mine)


def test_personal_arrays_beside_the_model_do_not_prevent_fine_tuning():
    class Mine(FedAvgClient):
        personal = ("memory.",)

    assert issubclass(fine_tuned(Mine), FineTuned)
    assert deployed_groups(fine_tuned(Mine)) == ()
    with pytest.raises(SettingsError, match="must use the whole shared model"):
        fine_tuned(FedBNClient)


@pytest.mark.parametrize("name", ["nothing-ft", "fedavg-ft-ft", "-ft"])
def test_unknown_variant_is_rejected(name):
    with pytest.raises(SettingsError):
        build_strategy(resolve({"algorithm": name}))
