"""FedRoD compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
import torch
from paper_rounds import VARIANTS, assert_losses, run_variant
from softmax_runs import (
    CLASSES,
    DIMENSION,
    RATE,
    STEPS,
    N,
    assert_near,
    draw,
    matrix,
    run,
    scores_of,
    slope,
    start,
)
from torch import nn

from flwr_frl.clients.fedrod import BothLosses, TwoHeads
from flwr_frl.task.tasks.text import PositionwiseLinear


def numpy_fedrod(found):
    """Return (g, all p) by round, computed with the clients that trained."""
    g, rounds, personal = start(), [], [np.zeros_like(start())] * N
    momentum, decay = found["momentum"], found["weight_decay"]
    only_weights = np.array([1.0] * DIMENSION + [0.0])
    for clients in found.trained:
        models, personal = [], list(personal)
        for i in clients:
            counts = np.bincount(draw(i)[1], minlength=CLASSES)
            generic, p, velocity_g, velocity_p = g, personal[i], 0.0, 0.0
            for _ in range(STEPS):
                # The balanced loss is the softmax of g_c + log N_c.
                balanced = slope(scores_of(generic, i) + np.log(counts), i)
                summed = slope(scores_of(generic + p, i), i)
                velocity_g = momentum * velocity_g + balanced
                velocity_g = velocity_g + decay * generic * only_weights
                velocity_p = momentum * velocity_p + summed + decay * p * only_weights
                generic, p = generic - RATE * velocity_g, p - RATE * velocity_p
            models.append(generic)
            personal[i] = p
        g = found.mean(models, clients)
        rounds.append((g, personal))
    return rounds


@pytest.mark.parametrize("variant", ["plain", "momentum", "examples"])
def test_every_round_matches_the_paper(variant):
    more = VARIANTS[variant]
    result = run_variant("fedrod", 3, evaluate={3}, **more)
    expected = numpy_fedrod(result)
    for arrays, kept, (g, personal) in zip(
        result.arrays, result.kept, expected, strict=True
    ):
        assert_near(matrix(arrays), g)
        for state, p in zip(kept, personal, strict=True):
            named = {name.replace("personal-", ""): a for name, a in state.items()}
            assert_near(matrix(named) if state else 0 * p, p)
    # Clients use the sum of both heads, or the generic one if they never trained.
    g, personal = expected[-1]
    assert_losses(result, [g + p for p in personal])
    # The class counts have an effect.
    plain = run("fedavg", 3, **more)
    assert np.abs(g - matrix(plain.arrays[-1])).max() > 1e-2


def test_generic_head_is_unchanged_for_absent_classes():
    torch.manual_seed(0)
    heads = TwoHeads(nn.Linear(4, 3), nn.Linear(4, 3), torch.tensor([3.0, 0, 5]).log())
    loss = BothLosses(nn.functional.cross_entropy)
    value = loss(heads(torch.randn(8, 4)), torch.tensor([0, 2] * 4))
    value.backward()
    assert value.isfinite()
    for parameter in heads.generic.parameters():
        assert (parameter.grad[1] == 0).all()
        assert (parameter.grad[[0, 2]] != 0).all()
    for parameter in heads.personal.parameters():
        assert (parameter.grad != 0).all()


def test_counts_are_added_per_class_in_sequences():
    # With as many positions as classes, a sum over the wrong axis would also fit.
    heads = TwoHeads(
        PositionwiseLinear(4, 3),
        PositionwiseLinear(4, 3),
        torch.tensor([0.0, 1.0, 2.0]),
    )
    features = torch.randn(2, 3, 4)
    balanced, personal = heads(features).unbind(1)
    generic = heads.generic(features)
    for label in range(3):
        torch.testing.assert_close(balanced[:, label], generic[:, label] + label)
    torch.testing.assert_close(personal, generic + heads.personal(features))
