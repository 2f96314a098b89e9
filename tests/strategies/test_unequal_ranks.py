"""FlexLoRA, HetLoRA, FLoRA and FedEx-LoRA, compared with PyTorch and NumPy."""

import numpy as np
import pytest
import torch
from flwr.app import MessageType
from lora_tasks import ADAPTERS, HEAD, SCALE, A, B, Reference, average
from paper_rounds import assert_same_arrays, run_variant
from softmax_runs import STEPS, N, assert_near, weights

from flwr_frl.common.messages import MERGED

UNEQUAL = {**ADAPTERS, "client_ranks": "2 1 1", "weighting": "examples"}
RANKS = [2, 1, 1, 2, 1, 1]
R = f"{MERGED}representation.0"


def part(state, rank):
    return {**state, A: state[A][:rank], B: state[B][:, :rank]}


def assert_losses(result, now, states, delta=0.0):
    for i, (metrics, state) in enumerate(zip(result.metrics[now], states, strict=True)):
        loss = Reference(result).loss(state, i, delta, test=True)
        assert metrics["loss"] == pytest.approx(float(loss), abs=1e-5)


def test_flexlora_decomposes_the_mean_product():
    result = run_variant("flexlora", 5, evaluate=True, **UNEQUAL)
    reference, names = Reference(result), (A, B, *HEAD)
    w = dict(reference.initial)
    for now, of in enumerate(result.trained):
        models = [reference.descend(part(w, RANKS[i]), i, STEPS, names) for i in of]
        shares = weights(of, "examples")
        mean = sum(s * m[B] @ m[A] for s, m in zip(shares, models, strict=True))
        u, sigma, v = torch.linalg.svd(mean.float())
        w = {**average(models, HEAD, shares), B: u[:, :2] * sigma[:2], A: v[:2]}
        found = result.arrays[now]
        for rank in (1, 2):
            product = w[B][:, :rank] @ w[A][:rank]
            assert_near(found[B][:, :rank] @ found[A][:rank], product)
        assert_losses(result, now, [part(w, rank) for rank in RANKS])


@pytest.mark.parametrize("algorithm", ["fedex-lora", "flora"])
def test_weights_move_by_the_mean_of_the_products(algorithm):
    more = {**UNEQUAL, "client_ranks": ""} if algorithm == "fedex-lora" else UNEQUAL
    result = run_variant(algorithm, 4, evaluate=True, **more)
    total, replies = np.zeros((5, 4)), result.between(MessageType.TRAIN)
    for now, of in enumerate(result.trained):
        sent = [r.content["arrays"] for _, r in replies[3 * now : 3 * now + 3]]
        products = [a[B].numpy().astype(float) @ a[A].numpy() for a in sent]
        total = total + np.tensordot(weights(of, "examples"), products, axes=1)
        w = result.arrays[now]
        assert_near(w[R] + w[B] @ w[A], total, 1e-6)
        state = {name: torch.from_numpy(w[name].copy()) for name in (A, B, *HEAD)}
        assert_losses(result, now, [state] * N, SCALE * torch.from_numpy(w[R].copy()))
        total = w[R].astype(float)


def test_hetlora_with_one_rank_and_equal_weights_is_fedavg():
    more = {"hetlora_sparsity_weights": False, "hetlora_gamma": 1.0, **ADAPTERS}
    assert_same_arrays(
        run_variant("hetlora", 3, **more), run_variant("fedavg", 3, **ADAPTERS)
    )
