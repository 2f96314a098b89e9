"""FlexLoRA, HetLoRA, FLoRA and FedEx-LoRA, compared with PyTorch and NumPy."""

from functools import partial

import numpy as np
import pytest
import torch
from algorithm_runs import DisturbedGrid, run_tiny
from flwr.app import Array, Context, MessageType, RecordDict
from lora_tasks import ADAPTERS, HEAD, SCALE, A, B, Reference, average, layers
from paper_rounds import run_variant
from refusals import code_of
from softmax_runs import STEPS, N, assert_near, task_of, weights
from torch import nn
from transformers.pytorch_utils import Conv1D

from flwr_frl.clients.algorithms import client_setup
from flwr_frl.clients.device.ranks import merged, needs_products
from flwr_frl.clients.device.setup import build_client
from flwr_frl.common.low_rank import adapters_in
from flwr_frl.common.messages import MERGED
from flwr_frl.common.settings import resolve
from flwr_frl.task import SplitModel
from flwr_frl.task.models.adapters import AdapterSettings, add_lora, with_adapters
from flwr_frl.task.models.frozen import set_apart

RANKS = [2, 1, 1]
UNEQUAL = {**ADAPTERS, "client_ranks": "2 1 1"}
R = f"{MERGED}representation.0"
ALL = (A, B, *HEAD)
WEIGHTINGS = pytest.mark.parametrize("weighting", ["uniform", "examples"])


def part(state, rank):
    """Return a state with matrices of a rank."""
    return {**state, A: state[A][:rank], B: state[B][:, :rank]}


def tensors(arrays):
    return {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}


def products_of(replies):
    """Return the products of the matrices in replies."""
    arrays = [reply.content["arrays"] for reply in replies]
    return [a[B].numpy().astype(float) @ a[A].numpy() for a in arrays]


def replies_of(result, number):
    pairs = result.between(MessageType.TRAIN)
    return [r for m, r in pairs if m.content["config"]["server-round"] == number]


def assert_losses(result, now, states, delta=0.0):
    """Assert that each client was tested with its state."""
    for i, (metrics, state) in enumerate(zip(result.metrics[now], states, strict=True)):
        loss = Reference(result).loss(state, i, delta, test=True)
        assert metrics["loss"] == pytest.approx(float(loss), abs=1e-5)


@WEIGHTINGS
def test_flexlora_decomposes_the_mean_product(weighting):
    result = run_variant("flexlora", 5, evaluate=True, weighting=weighting, **UNEQUAL)
    reference = Reference(result)
    w, rank = dict(reference.initial), [RANKS[i % 3] for i in range(N)]
    for now, clients in enumerate(result.trained):
        models = [reference.descend(part(w, rank[i]), i, STEPS, ALL) for i in clients]
        shares = weights(clients, weighting)
        mean = sum(s * m[B] @ m[A] for s, m in zip(shares, models, strict=True))
        u, sigma, v = np.linalg.svd(mean.numpy().astype(float))
        w = average(models, HEAD, shares)
        w |= tensors({B: (u[:, :2] * sigma[:2]).astype("f4"), A: v[:2].astype("f4")})
        found = result.arrays[now]
        for name in HEAD:
            assert_near(found[name], w[name])
        for r in (1, 2):
            product = w[B][:, :r] @ w[A][:r]
            assert_near(found[B][:, :r] @ found[A][:r], product)
        assert_losses(result, now, [part(w, r) for r in rank])
    for message, reply in result.between(MessageType.TRAIN):
        of_rank = (rank[message.metadata.dst_node_id - 1], 4)
        for content in (message.content, reply.content):
            assert content["arrays"][A].numpy().shape == of_rank


def test_flexlora_with_full_rank_is_exact():
    result = run_variant("flexlora", 3, **{**ADAPTERS, "lora_rank": 4})
    for now, arrays in enumerate(result.arrays):
        mean = np.mean(products_of(replies_of(result, now + 1)), axis=0)
        assert_near(arrays[B] @ arrays[A], mean, 1e-6)


@WEIGHTINGS
def test_hetlora_weights_matrices_by_norms_and_prunes_ranks(weighting):
    gamma, penalty = 0.6, 0.5
    more = {"hetlora_gamma": gamma, "hetlora_lambda": penalty, "weighting": weighting}
    result = run_variant("hetlora", 6, evaluate=True, **UNEQUAL, **more)
    reference = Reference(result)
    w, rank = dict(reference.initial), [RANKS[i % 3] for i in range(N)]

    def last(state, start):
        return state[B][:, start:].norm() * state[A][start:].norm()

    pruned = 0
    for now, clients in enumerate(result.trained):
        models, new_rank = [], list(rank)
        for i in clients:
            start = max(1, int(gamma * rank[i]))

            def loss(state, i, start=start):
                return reference.loss(state, i) + penalty * last(state, start)

            before = part(w, rank[i])
            model = reference.descend(before, i, STEPS, ALL, loss)
            if last(model, start) < last(before, start):
                new_rank[i], model = start, part(model, start)
                pruned += 1
            missing = 2 - len(model[A])
            model[A] = nn.functional.pad(model[A], (0, 0, 0, missing))
            model[B] = nn.functional.pad(model[B], (0, missing))
            models.append(model)
        norms = np.array([float((m[B] @ m[A]).norm()) for m in models])
        most, old = max(rank[i] for i in clients), dict(w)
        w |= average(models, HEAD, weights(clients, weighting))
        w |= average(models, (A, B), norms / norms.sum())
        w[A] = torch.cat([w[A][:most], old[A][most:]])
        w[B] = torch.cat([w[B][:, :most], old[B][:, most:]], 1)
        rank = new_rank
        for name in ALL:
            assert_near(result.arrays[now][name], w[name])
        assert_losses(result, now, [part(w, r) for r in rank])
    assert pruned
    ranks = result.strategy.state["ranks"]
    assert ranks == {n: rank[int(n)] for n in ranks}


@WEIGHTINGS
def test_fedex_lora_adds_the_residual_to_the_weights(weighting):
    more = {**ADAPTERS, "weighting": weighting}
    result = run_variant("fedex-lora", 4, evaluate=True, **more)
    reference = Reference(result)
    w, residual = dict(reference.initial), torch.zeros(5, 4)
    for now, clients in enumerate(result.trained):
        loss = partial(reference.loss, delta=SCALE * residual)
        models = [reference.descend(w, i, STEPS, ALL, loss) for i in clients]
        shares = weights(clients, weighting)
        pairs = zip(shares, models, strict=True)
        exact = residual + sum(float(s) * m[B] @ m[A] for s, m in pairs)
        w = average(models, ALL, shares)
        residual = exact - w[B] @ w[A]
        found = result.arrays[now]
        assert found.keys() == {*ALL, R}
        for name in ALL:
            assert_near(found[name], w[name])
        # To rounding, the weights move by the mean of the products.
        assert_near(found[R] + found[B] @ found[A], exact)
        assert_losses(result, now, [w] * N, SCALE * residual)


@WEIGHTINGS
def test_flora_adds_the_mean_product_and_begins_anew(weighting):
    # In one step from B = 0, A keeps its initial values.
    more = {**UNEQUAL, "weighting": weighting, "representation_epochs": 1}
    result = run_variant("flora", 4, evaluate=True, **more)
    reference = Reference(result)
    total, head, begun = torch.zeros(5, 4), reference.initial, []
    for now, clients in enumerate(result.trained):
        loss, models = partial(reference.loss, delta=SCALE * total), []
        replies = replies_of(result, now + 1)
        for i, reply in zip(clients, replies, strict=True):
            sent = tensors({n: a.numpy() for n, a in reply.content["arrays"].items()})
            assert sent[A].shape == (RANKS[i % 3], 4)
            begun.append(sent[A][0])
            first = {**head, A: sent[A], B: torch.zeros_like(sent[B])}
            models.append(reference.descend(first, i, 1, ALL, loss))
            for name in ALL:
                assert_near(sent[name], models[-1][name])
        shares = weights(clients, weighting)
        pairs = zip(shares, models, strict=True)
        total = total + sum(float(s) * m[B] @ m[A] for s, m in pairs)
        head = average(models, HEAD, shares)
        assert_near(result.arrays[now][R], total)
        none = {**head, A: torch.zeros(1, 4), B: torch.zeros(5, 1)}
        assert_losses(result, now, [none] * N, SCALE * total)
    # Each client draws other values in each round.
    assert len({tuple(row.tolist()) for row in begun}) == len(begun)


KINDS = nn.Linear(6, 5), nn.Embedding(6, 5), nn.Conv2d(3, 5, (3, 2)), Conv1D(5, 6)


@pytest.mark.parametrize("layer", KINDS, ids=lambda layer: type(layer).__name__)
def test_merged_products_equal_the_adapters_of_peft(layer):
    model = SplitModel(nn.Sequential(layer), nn.Linear(5, 2))
    add_lora(model, AdapterSettings("lora", lora_rank=2, lora_targets="0"))
    set_apart(model)
    (adapter,), state = adapters_in(model.state_dict()), model.state_dict()
    for name in (adapter.a, adapter.b):
        state[name].normal_()
    product = state[adapter.b].reshape(5, 2) @ state[adapter.a].reshape(2, -1)
    found = merged(model, {f"{MERGED}{adapter.layer}": product})
    of_peft = model.representation[0]
    before, delta = of_peft.base_layer.weight, of_peft.get_delta_weight("default")
    torch.testing.assert_close(
        found.representation[0].base_layer.weight, before + delta
    )


# Devices and invalid values


def wider(reply):
    """Double the rank of the matrices in a reply."""
    record = reply.content["arrays"]
    for name, axis in ((A, 0), (B, 1)):
        record[name] = Array(np.concatenate([record[name].numpy()] * 2, axis))


def with_rank(rank, reply):
    reply.content["metrics"]["lora-rank"] = rank


@pytest.mark.parametrize("algorithm", ["flexlora", "hetlora", "flora"])
def test_matrices_of_another_rank_are_rejected(algorithm):
    grid = partial(DisturbedGrid, changes={(1, 2): wider, (3, 2): wider})
    result = run_tiny(algorithm, grid=grid, fraction_train=1.0)
    assert result.rows[1]["rejected-clients"] == ["000001", "000003"]


@pytest.mark.parametrize(("rank", "rejected"), [(0.5, 1), (-1, 1), (10**9, 0), (0, 0)])
def test_hetlora_checks_the_rank_that_a_client_reports(rank, rejected):
    grid = partial(DisturbedGrid, changes={(0, 2): partial(with_rank, rank)})
    more = {"fraction_train": 1.0, "hetlora_gamma": 1.0}
    result = run_tiny("hetlora", grid=grid, **more)
    assert [row["rejected"] for row in result.rows] == [0, rejected, 0]


def test_a_device_sets_its_rank_in_the_node_config():
    named = {name.replace("_", "-"): value for name, value in ADAPTERS.items()}
    settings = resolve({**named, "algorithm": "flexlora", "num-clients": N})

    def client(rank):
        node = {"client-name": "ann", "lora-rank": rank}
        context = Context(0, 0, node, RecordDict(), {})
        return build_client(context, client_setup(context, settings), {})

    assert client(1).rank == client(1).get_properties({})["lora-rank"] == 1
    assert code_of(lambda: client(3).rank) == "client-ranks"


def grouped():
    layers = nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten()
    return SplitModel(nn.Sequential(*layers), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("model", "targets", "rank", "code"),
    [(layers, "", 5, "lora-rank"), (grouped, "1", 2, "lora-targets")],
)
def test_adapters_that_do_not_fit_are_refused(model, targets, rank, code):
    settings = AdapterSettings("lora", lora_rank=rank, lora_targets=targets)
    task = with_adapters(task_of(model), settings)
    assert code_of(lambda: needs_products(task)) == code
