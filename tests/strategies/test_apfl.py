"""APFL compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from paper_rounds import (
    SMALL_BATCHES,
    VARIANTS,
    assert_losses,
    assert_near_arrays,
    assert_rounds,
    run_variant,
)
from softmax_runs import RATE, STEPS, N, gradient, loss_of, run, start


def numpy_apfl(found):
    """Run Algorithm 1 with the clients that trained; return (w, all v_i, all α_i).

    v̄ = α v + (1 − α) w; ∇_v f(v̄) = α ∇f(v̄); ∂f(v̄)/∂α = ⟨v − w, ∇f(v̄)⟩.
    """
    w, rounds, momentum, decay = start(), [], found["momentum"], found["weight_decay"]
    personal, alphas = [w] * N, [found["apfl_alpha"]] * N
    for clients in found.trained:
        models, personal, alphas = [], list(personal), list(alphas)
        for i in clients:
            local, v, a = w, personal[i], alphas[i]
            velocity_w = velocity_v = 0.0
            for t in range(STEPS):
                slope = gradient(a * v + (1 - a) * local, i)
                decay_v = gradient(v, i, decay) - gradient(v, i)
                velocity_w = momentum * velocity_w + gradient(local, i, decay)
                velocity_v = momentum * velocity_v + a * slope + decay_v
                if found["apfl_adaptive"] and t == 0:
                    a = float(np.clip(a - RATE * np.sum((v - local) * slope), 0, 1))
                local, v = local - RATE * velocity_w, v - RATE * velocity_v
            models.append(local)
            personal[i], alphas[i] = v, a
        w = found.mean(models, clients)
        rounds.append((w, personal, alphas))
    return rounds


def alpha_of(state, initial):
    return float(state["alpha.value"][0]) if state else initial


@pytest.mark.parametrize(
    "more",
    [
        {"apfl_alpha": 0.5},
        {"apfl_alpha": 0.3, **VARIANTS["momentum"]},
        {"apfl_alpha": 0.8, **VARIANTS["examples"]},
        {"apfl_alpha": 0.4, "apfl_adaptive": False},
        {"apfl_alpha": 0.5, "srpfl": True},
    ],
    ids=["plain", "momentum", "examples", "fixed", "srpfl"],
)
def test_every_round_matches_the_paper(more):
    result, alpha = run_variant("apfl", 5, evaluate={5}, **more), more["apfl_alpha"]
    expected = numpy_apfl(result)
    assert_rounds(result, [(w, personal) for w, personal, _ in expected])
    for kept, (_, _, alphas) in zip(result.kept, expected, strict=True):
        values = [alpha_of(state, alpha) for state in kept]
        np.testing.assert_allclose(values, alphas, atol=1e-5)
    w, personal, alphas = expected[-1]
    moved = np.abs(np.array(alphas) - alpha).max()
    assert moved > 1e-2 if more.get("apfl_adaptive", True) else moved == 0
    # A client that never trained mixes the initial model with w.
    mixed = [a * v + (1 - a) * w for v, a in zip(personal, alphas, strict=True)]
    assert_losses(result, mixed)
    reported = [metrics["alpha"] for metrics in result.metrics[-1]]
    np.testing.assert_allclose(reported, alphas, atol=1e-5)
    assert result.rows[-1]["alpha"] == pytest.approx(np.mean(alphas), abs=1e-5)
    assert max(abs(loss_of(w, i) - loss_of(mixed[i], i)) for i in range(N)) > 1e-3


def test_global_model_equals_that_of_fedavg():
    plain = run("fedavg", 3, **SMALL_BATCHES)
    for alpha in (0.0, 0.7):
        assert_near_arrays(run("apfl", 3, apfl_alpha=alpha, **SMALL_BATCHES), plain)


def test_alpha_stays_within_0_and_1():
    result = run("apfl", 6, apfl_alpha=0.5, learning_rate=40.0)
    alphas = [alpha_of(state, 0.5) for kept in result.kept for state in kept if state]
    assert min(alphas) == 0
    assert max(alphas) == 1
