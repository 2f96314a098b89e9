"""FedSA-LoRA, FFA-LoRA, FedDPA, and LoRA in other algorithms, compared with PyTorch."""

import numpy as np
import pytest
from algorithm_runs import run_tiny
from lora_tasks import ADAPTERS, HEAD, SCALE, A, B, Reference, average
from paper_rounds import run_variant
from refusals import code_of
from softmax_runs import STEPS, N, weights

from flwr_frl.clients.feddpa import FedDPAClient
from flwr_frl.clients.fedsa_lora import FedSALoRAClient
from flwr_frl.clients.ffa_lora import FFALoRAClient
from flwr_frl.common.settings import resolve
from flwr_frl.task.tasks import build_task

WEIGHTINGS = pytest.mark.parametrize("weighting", ["uniform", "examples"])
ALL = (A, B, *HEAD)


def assert_arrays(found, expected, names):
    """Check that exactly these arrays are present and close to the expected ones."""
    assert sorted(found) == sorted(names)
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-5)


def assert_losses(found, now, losses):
    for metrics, loss in zip(found.metrics[now], losses, strict=True):
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)


@WEIGHTINGS
@pytest.mark.parametrize(
    ("algorithm", "shared", "trained"),
    [
        ("fedsa-lora", (A,), ALL),
        ("ffa-lora", (B, *HEAD), (B, *HEAD)),
        ("fedavg", ALL, ALL),
        ("fedper", (A, B), ALL),
        ("lg-fedavg", HEAD, ALL),
        ("local", (), ALL),
    ],
)
def test_every_round_matches_the_reference(algorithm, shared, trained, weighting):
    task = {**ADAPTERS, "weighting": weighting}
    result = run_variant(algorithm, 4, evaluate=True, head_layers=1, **task)
    reference = Reference(result)
    w, models_of = dict(reference.initial), [dict(reference.initial)] * N
    kept = [name for name in trained if name not in shared]
    for now, clients in enumerate(result.trained):
        models = {
            i: reference.descend(
                {**models_of[i], **{n: w[n] for n in shared}}, i, STEPS, trained
            )
            for i in clients
        }
        models_of = [models.get(i, models_of[i]) for i in range(N)]
        shares = weights(clients, weighting)
        w |= average(list(models.values()), shared, shares)
        assert_arrays(result.arrays[now], w, shared)
        for i in range(N):
            if state := result.kept[now][i]:
                assert_arrays(state, models_of[i], kept)
        deployed = [{**models_of[i], **{n: w[n] for n in shared}} for i in range(N)]
        losses = [reference.loss(deployed[i], i, test=True) for i in range(N)]
        assert_losses(result, now, losses)


@WEIGHTINGS
def test_feddpa_trains_a_personal_adapter_next_to_the_global_one(weighting):
    alpha, epochs = 0.3, 2
    options = {"feddpa_alpha": alpha, "personal_epochs": epochs, "weighting": weighting}
    result = run_variant("feddpa", 4, evaluate=True, **ADAPTERS, **options)
    reference = Reference(result)
    w, personal = dict(reference.initial), [dict(reference.initial)] * N

    def loss_beside(g, test=False):
        def loss(state, i):
            # h = W x + (1 - alpha) s B_g A_g x + alpha s B_p A_p x
            delta = (1 - alpha) * SCALE * g[B] @ g[A]
            return reference.loss({**state, B: alpha * state[B]}, i, delta, test)

        return loss

    for now, clients in enumerate(result.trained):
        for i in clients:
            beside = loss_beside(w)
            v = reference.descend(personal[i], i, epochs, ALL, beside)
            personal = [*personal[:i], v, *personal[i + 1 :]]
        models = [reference.descend(w, i, STEPS, ALL) for i in clients]
        w = average(models, ALL, weights(clients, weighting))
        assert_arrays(result.arrays[now], w, ALL)
        for i in range(N):
            if state := result.kept[now][i]:
                named = {n.removeprefix("model."): v for n, v in state.items()}
                assert_arrays(named, personal[i], ALL)
        losses = [loss_beside(w, test=True)(personal[i], i) for i in range(N)]
        assert_losses(result, now, losses)


@pytest.mark.parametrize(
    "algorithm",
    [
        *("fedavg-ft", "scaffold", "pfedme", "fedala", "feddyn", "fedrod", "moon"),
        *("fedpac", "ifca", "pfedhn", "srpfl", "fedbuff", "dpsgd", "choco-sgd"),
    ],
)
def test_other_algorithms_train_adapters(algorithm):
    result = run_tiny(algorithm, adapters="lora", task="cohort_tasks:dense")
    assert [row["rejected"] for row in result.rows] == [0] * len(result.rows)
    assert not [name for name in result.arrays if "base_layer" in name]


@pytest.mark.parametrize("noise", ["dp", "server_dp"])
@pytest.mark.parametrize("algorithm", ["fedsa-lora", "ffa-lora", "feddpa"])
def test_privacy_noise_is_accounted_for(algorithm, noise):
    more = {f"{noise}_noise": 1.0, f"{noise}_clip": 1.0, f"{noise}_delta": 1e-3}
    result = run_tiny(algorithm, adapters="lora", task="cohort_tasks:dense", **more)
    assert [row["rejected"] for row in result.rows] == [0] * len(result.rows)
    text = str(result.rows[-1]) + str(result.values["clients"])
    assert "epsilon" in text


@pytest.mark.parametrize("kind", [FedSALoRAClient, FFALoRAClient, FedDPAClient])
def test_lora_algorithms_need_adapters(kind):
    task = build_task(resolve({"task": "lora_tasks:plain"}), N)
    assert code_of(lambda: kind(task, 0, None, None)) == "adapters"


def test_fedsa_lora_needs_matrices_to_share():
    named = {name.replace("_", "-"): value for name, value in ADAPTERS.items()}
    task = build_task(resolve({**named, "lora-share": "b"}), N)
    assert code_of(lambda: FedSALoRAClient(task, 0, None, None)) == "lora-share"
