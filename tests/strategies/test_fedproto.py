"""FedProto compared with a NumPy implementation of server and clients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import (
    ArrayRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from layered import (
    WIDTH,
    average_classes,
    class_means,
    descend,
    features,
    layered,
    loss_of,
    parts,
    start,
)
from paper_rounds import run_variant
from seen_replies import round_of, seen
from softmax_runs import CLASSES, DIMENSION, N, assert_near, draw, run

from flwr_frl.clients.algorithms import client_setup
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import FedProto, FedTGP
from flwr_frl.strategies.server.replies import InvalidReplyError, to_record
from flwr_frl.task import ExampleSet

TASK = {"task": "layered:layered"}
PULL = 2.0
MEANS, COUNTS = "prototypes.means", "prototypes.counts"


def trained(a, w, i, means, known):
    """Train locally near the prototypes of the classes that have one."""

    def pull(z, y):
        return 2 * PULL * (z - means[y]) * known[y][:, None] / z.size

    return descend(a, w, i, extra=pull)


def nearest(a, i, means, known):
    x, y = draw(i, test=True)
    distances = np.square(features(a, x)[:, None] - means).sum(2)
    return np.mean(np.where(known, distances, np.inf).argmin(1) == y)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_every_round_matches_the_paper(weighting):
    more = {"fedproto_lambda": PULL, "weighting": weighting}
    more["fedproto_predicted"] = "all"
    result = run_variant("fedproto", evaluate=True, **more, **TASK)
    models = [start()] * N
    means, known = np.zeros((CLASSES, WIDTH)), np.zeros(CLASSES, bool)
    for now, clients in enumerate(result.trained):
        for i in clients:
            models[i] = trained(*models[i], i, means, known)
        own = [class_means(models[i][0], i) for i in clients]
        average_classes(means, known, own, weighting)
        np.testing.assert_allclose(result.arrays[now][MEANS], means, atol=1e-5)
        assert ((result.arrays[now][COUNTS] > 0) == known).all()
        for i, (a, w) in enumerate(models):
            if kept := result.kept[now][i]:
                assert_near(parts(kept)[0], a)
                assert_near(parts(kept)[1], w)
            metrics = result.metrics[now][i]
            assert metrics["loss"] == pytest.approx(loss_of(a, w, i), abs=1e-5)
            assert metrics["accuracy"] == pytest.approx(nearest(a, i, means, known))
    differs = [m["accuracy"] != m["accuracy-head"] for m in result.metrics[-1]]
    assert any(differs)


def missing_one(num_clients):
    """The layered task, in which client i has no training examples of class i mod 3."""
    task = layered(num_clients)
    kept = [(s, s.targets != i % CLASSES) for i, s in enumerate(task.train)]
    train = [ExampleSet(s.inputs[mask], s.targets[mask]) for s, mask in kept]
    return replace(task, train=train)


MISSING = {"task": f"{__name__}:missing_one"}


def accuracies(found, i, server_round=4):
    """Return client i's accuracies among its own classes and among all classes."""
    kept = found.kept[server_round - 1][i]
    a = parts(kept)[0] if kept else start()[0]
    arrays = found.arrays[server_round - 1]
    known = arrays[COUNTS] > 0
    present = known & (np.arange(CLASSES) != i % CLASSES)
    return [nearest(a, i, arrays[MEANS], mask) for mask in (present, known)]


def test_fedproto_predicted_selects_own_or_all_classes():
    only_own = run("fedproto", evaluate=True, **MISSING)
    every = run("fedproto", evaluate=True, fedproto_predicted="all", **MISSING)
    for i in range(N):
        assert only_own.metrics[-1][i]["accuracy"] == accuracies(only_own, i)[0]
        assert every.metrics[-1][i]["accuracy"] == accuracies(every, i)[1]
    assert any(np.subtract(*accuracies(only_own, i)) for i in range(N))


def test_untrained_client_predicts_its_own_classes():
    result = run("fedproto", 1, evaluate=True, **MISSING)
    others = [i for i in range(N) if i not in result.trained[0]]
    assert len(others) == 3
    for i in others:
        assert not result.kept[0][i]
        assert result.metrics[0][i]["accuracy"] == accuracies(result, i, 1)[0]


def test_prediction_knows_the_own_classes_without_examples():
    result = run("fedproto", 4, **MISSING)
    i = result.trained[-1][0]
    client = result.client(i, 4)
    none = ExampleSet(torch.zeros(0, DIMENSION), torch.zeros(0, dtype=torch.long))
    client.task = replace(client.task, train=[none] * N)
    client._receive([result.arrays[-1][n] for n in (MEANS, COUNTS)], {})
    model = client.deployed_model()
    x, _ = draw(i, test=True)
    with torch.no_grad():
        predicted = model(torch.from_numpy(x).float()).argmax(1)
    assert i % CLASSES not in predicted


def test_huge_features_select_no_class_without_a_prototype():
    client = run("fedproto", 0, fedproto_predicted="all", **TASK).client(0, 0)
    means = np.repeat(np.float32([[0], [3e4], [-3e4]]), WIDTH, axis=1)
    client._receive([means, np.array([0, 1, 1])], {})
    scores = client.deployed_model().head(torch.full((1, WIDTH), 1e4))
    assert scores.argmax(1).item() == 1


# Aggregation of hand-written replies


def record_of(means, counts) -> ArrayRecord:
    means = np.asarray(means, np.float32)
    return to_record({MEANS: means, COUNTS: np.asarray(counts, np.int64)})


def reply_of(node: int, means, counts) -> Message:
    """Return the reply of a client with four examples."""
    metrics = MetricRecord({"num-examples": 4, "train-loss": 1.0})
    content = RecordDict({"arrays": record_of(means, counts), "metrics": metrics})
    return Message(content, reply_to=Message(RecordDict(), node, MessageType.TRAIN))


def aggregated(strategy: FedProto, counts, replies) -> dict[str, np.ndarray]:
    """Return the result for replies to prototypes with the given counts."""
    round = round_of(replies)
    round._strategy = strategy
    round.like["arrays"] = record_of([[0, 1], [2, 3], [4, 5]], counts)
    return strategy.aggregate(round)


@pytest.mark.parametrize(
    ("weighting", "first"), [("uniform", [2, 3]), ("examples", [1.5, 2])]
)
def test_class_without_examples_keeps_its_prototype(weighting, first):
    # Prototypes without examples are ignored.
    one = reply_of(1, [[1, 1], [4, 0], [9, 9]], [3, 1, 0])
    other = reply_of(2, [[3, 5], [0, 0], [9, 9]], [1, 3, 0])
    strategy = FedProto(weighting=weighting)
    arrays = aggregated(strategy, [5, 5, 5], [one, other])
    second = [2, 0] if weighting == "uniform" else [1, 0]
    np.testing.assert_allclose(arrays[MEANS], [first, second, [4, 5]])
    assert arrays[COUNTS].tolist() == [2, 2, 5]


def test_class_counts_are_capped_at_the_number_of_examples():
    honest = reply_of(1, [[1, 1]] * 3, [2, 1, 1])
    liar = reply_of(2, [[7, 7]] * 3, [2**60, 0, 0])
    strategy = FedProto(weighting="examples")
    arrays = aggregated(strategy, [0, 0, 0], [honest, liar])
    # The client has 2 examples; the other is limited to 4.
    np.testing.assert_allclose(arrays[MEANS], [[5, 5], [1, 1], [1, 1]])


@pytest.mark.parametrize(("value", "count"), [(-1e6, -1), (-3e38, 0)])
def test_negative_counts_and_huge_prototypes_are_rejected(value, count):
    strategy = FedProto(weighting="uniform")
    strategy.check_reply(seen(reply_of(1, [[1, -1e6]] * 3, [2, 0, 2])))
    with pytest.raises(InvalidReplyError):
        strategy.check_reply(seen(reply_of(1, [[1, value]] * 3, [2, count, 2])))


def test_median_covers_the_clients_that_have_the_class():
    replies = [
        reply_of(1, [[1, 1], [4, 0], [9, 9]], [3, 1, 0]),
        reply_of(2, [[3, 5], [0, 0], [9, 9]], [1, 0, 0]),
        reply_of(3, [[1e6, -1e6], [6, 2], [9, 9]], [1, 3, 0]),
    ]
    arrays = aggregated(FedProto(aggregation="median"), [5, 5, 5], replies)
    np.testing.assert_allclose(arrays[MEANS], [[3, 1], [5, 1], [4, 5]])
    assert arrays[COUNTS].tolist() == [3, 2, 5]


# Different models per client


def test_node_config_selects_the_model():
    def model_of(algorithm: str, node) -> str:
        settings = resolve({"algorithm": algorithm, "client-models": "logistic"})
        context = Context(0, 0, {"client-name": "pi", **node}, RecordDict(), {})
        return client_setup(context, settings).run["model"]

    assert model_of("fedproto", {"model": "mlp"}) == "mlp"
    # Without a partition id, no entry of the list is assigned to the device.
    default = model_of("fedproto", {})
    assert default != "logistic"
    assert model_of("fedproto", {"partition-id": 0}) == "logistic"
    # Only clients of FedProto may choose their model.
    assert model_of("fedavg", {"partition-id": 0, "model": "mlp"}) == default


# FedTGP


def trained_by_hand(model, pairs, margin, rate, epochs):
    """Return the prototypes after steps on −log of a softmax over distances."""
    every = torch.arange(3)
    for _ in range(epochs):
        losses = []
        for p, c in pairs:
            distances = (model(every) - p).square().sum(1).sqrt()
            scores = torch.exp(-distances - margin * (every == c))
            losses.append(-torch.log(scores[c] / scores.sum()))
        slopes = torch.autograd.grad(sum(losses) / len(losses), [*model.parameters()])
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                parameter -= rate * slope
    return model(every).detach().numpy()


@pytest.mark.parametrize(("threshold", "margin"), [(100.0, 5**0.5), (0.5, 0.5)])
def test_fedtgp_trains_the_prototypes(threshold, margin):
    # The class means are (2, 3), (4, 0) and (4, 2); the nearest are √5, 2 and 2 apart.
    replies = [
        reply_of(1, [[1, 1], [4, 0], [9, 9]], [3, 1, 0]),
        reply_of(2, [[3, 5], [9, 9], [4, 2]], [1, 0, 3]),
    ]
    how = {"fedtgp_learning_rate": 0.2, "fedtgp_epochs": 4}
    strategy = FedTGP(fedtgp_threshold=threshold, **how)
    pairs = [((1, 1), 0), ((4, 0), 1), ((3, 5), 0), ((4, 2), 2)]
    pairs = [(torch.tensor(p).float(), c) for p, c in pairs]
    model = strategy.generator(3, 2)
    for counts in ([0, 0, 0], [2, 1, 1]):
        # The second round continues from the state of the first.
        arrays = aggregated(strategy, counts, replies)
        expected = trained_by_hand(model, pairs, margin, 0.2, 4)
        np.testing.assert_allclose(arrays[MEANS], expected, atol=1e-5)
        assert arrays[COUNTS].tolist() == [2, 1, 1]


def test_fedtgp_keeps_the_prototypes_without_any_class():
    replies = [reply_of(1, [[1, 1]] * 3, [0, 0, 0])]
    arrays = aggregated(FedTGP(), [2, 0, 1], replies)
    assert arrays[COUNTS].tolist() == [2, 0, 1]
    np.testing.assert_array_equal(arrays[MEANS], [[0, 1], [2, 3], [4, 5]])


def test_fedtgp_of_one_class_has_the_largest_margin():
    replies = [reply_of(1, [[1, 1]] * 3, [2, 0, 0])]
    arrays = aggregated(FedTGP(fedtgp_epochs=1), [0, 4, 0], replies)
    assert arrays[COUNTS].tolist() == [1, 4, 0]
    assert np.isfinite(arrays[MEANS]).all()
