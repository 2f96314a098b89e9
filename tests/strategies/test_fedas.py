"""FedAS compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType, MetricRecord, RecordDict
from layered import (
    WIDTH,
    class_means,
    descend,
    features,
    gradients,
    loss_of,
    parts,
    start,
)
from seen_replies import seen
from softmax_runs import CLASSES, N, assert_near, draw, mean, run

from flwr_frl.common.messages import PROTOTYPE_COUNTS as COUNTS
from flwr_frl.common.messages import PROTOTYPES as MEANS
from flwr_frl.strategies import FedAS
from flwr_frl.strategies.server.replies import InvalidReplyError

ALIGNMENT = {"fedas_learning_rate": 0.7, "fedas_epochs": 2}
TASK = {"task": "layered:layered"}


def aligned(a, i, means):
    """Minimize Σ_c mean (z − C_c)², over the examples of c and the entries, from a."""
    if means is None:
        return a
    x, y = draw(i)
    counts = np.bincount(y, minlength=CLASSES)
    with_ones = np.column_stack([x, np.ones(len(x))])
    for _ in range(ALIGNMENT["fedas_epochs"]):
        z = features(a, x)
        slope = 2 * (z - means[y]) / counts[y][:, None] / WIDTH
        a = a - ALIGNMENT["fedas_learning_rate"] * (slope * (1 - z**2)).T @ with_ones
    return a


def trace(a, w, i):
    """Return the squared norm of the gradient of a single batch."""
    of_a, of_w, _ = gradients(a, w, i)
    return np.square(of_a).sum() + np.square(of_w).sum()


def test_every_round_matches_the_paper():
    result = run("fedas", 5, evaluate=True, **ALIGNMENT, **TASK)
    assert [len(clients) for clients in result.trained] == [3] * 5
    a, w = start()
    heads, prototypes = [w] * N, [None] * N
    for now, clients in enumerate(result.trained):
        models = []
        for i in clients:
            body, heads[i] = descend(aligned(a, i, prototypes[i]), heads[i], i)
            prototypes[i] = class_means(body, i)[0]
            models.append((body, trace(body, heads[i], i)))
        shares = np.array([weight for _, weight in models])
        a = mean([body for body, _ in models], shares / shares.sum())
        for i in range(N):
            tested = aligned(a, i, prototypes[i])
            loss = result.metrics[now][i]["loss"]
            assert loss == pytest.approx(loss_of(tested, heads[i], i), abs=1e-5)
            if kept := result.kept[now][i]:
                both = {**kept, **result.arrays[now]}
                assert_near(parts(both)[0], a, 2e-6)
                assert_near(parts(both)[1], heads[i], 2e-6)
                means = kept["prototypes.means"]
                np.testing.assert_allclose(means, prototypes[i], atol=2e-6)
    assert shares.max() > 1.1 * shares.min()


def test_fisher_trace_does_not_use_cudnn():
    # In evaluation mode it has no gradients of recurrent layers.
    client = run("fedas", 0, **TASK).client(0, 0)
    client._receive(client.get_parameters({}), {})
    used = set()
    client.model.head.register_forward_hook(
        lambda *_: used.add(torch.backends.cudnn.enabled)
    )
    client.fisher_trace()
    assert used == {False}
    assert torch.backends.cudnn.enabled


def test_alignment_uses_plain_sgd_with_any_optimizer():
    more = {"optimizer": "adam", "max_gradient_norm": 1e-3, **ALIGNMENT, **TASK}
    client = run("fedas", 0, **more).client(0, 0)
    client._receive(client.get_parameters({}), {})
    a, _ = start()
    means = np.random.default_rng(0).normal(size=(CLASSES, WIDTH)).astype("f4")
    counts = torch.ones(CLASSES, dtype=torch.int64)
    client.saved |= {MEANS: torch.from_numpy(means), COUNTS: counts}
    client.align()
    layer = client.model.representation[0]
    found = np.column_stack([layer.weight.detach(), layer.bias.detach()])
    np.testing.assert_allclose(found, aligned(a, 0, means), atol=1e-5)


def test_a_representation_without_parameters_is_not_aligned():
    client = run("fedas", 0, **ALIGNMENT).client(0, 0)
    assert not list(client.model.representation.parameters())
    client._receive(client.get_parameters({}), {})
    client.saved[COUNTS] = torch.ones(CLASSES, dtype=torch.int64)
    before = client.model.head.weight.clone()
    client.align()
    assert torch.equal(client.model.head.weight, before)


def test_fisher_trace_sums_over_batches_in_order():
    client = run("fedas", 0, batch_size=4, **TASK).client(0, 0)
    client._receive(client.get_parameters({}), {})
    a, w = start()
    x, y = draw(0)
    expected = 0.0
    for rows in (slice(0, 4), slice(4, 6)):
        z, ones = features(a, x[rows]), np.ones((len(x[rows]), 1))
        z1, x1 = np.hstack([z, ones]), np.hstack([x[rows], ones])
        scores = np.exp(z1 @ w.T)
        slope = scores / scores.sum(1, keepdims=True) - np.eye(CLASSES)[y[rows]]
        slope = slope / len(z)
        through = slope @ w[:, :-1] * (1 - z**2)
        expected += np.square(through.T @ x1).sum() + np.square(slope.T @ z1).sum()
    assert client.fisher_trace() == pytest.approx(expected, rel=1e-5)


def reply_of(node: int, **metrics: float) -> Message:
    values = {name.replace("_", "-"): value for name, value in metrics.items()}
    content = RecordDict({"metrics": MetricRecord(values)})
    return Message(content, reply_to=Message(RecordDict(), node, MessageType.TRAIN))


def test_weights_are_traces():
    traces = [1.0, 2.0, 9.0]
    replies = [seen(reply_of(i + 1, fisher_trace=t)) for i, t in enumerate(traces)]
    assert FedAS().weights(replies) == traces
    none = [seen(reply_of(i, fisher_trace=0.0)) for i in (1, 2)]
    assert FedAS().weights(none) == [1.0, 1.0]


@pytest.mark.parametrize("metrics", [{}, {"fisher_trace": -1.0}])
def test_reply_without_a_valid_trace_is_rejected(metrics):
    strategy = FedAS()
    strategy.check_reply(seen(reply_of(1, fisher_trace=0.5)))
    with pytest.raises(InvalidReplyError):
        strategy.check_reply(seen(reply_of(2, **metrics)))
