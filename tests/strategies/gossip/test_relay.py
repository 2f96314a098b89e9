"""Contents and receivers of relayed messages, and privacy towards the server."""

import numpy as np
import pytest
from gossip_network import GOSSIP, D, N, Network, away, name_of, relayed

from flwr_frl.common.compression import PerTensor, Sign, TopK

CONFIG = {
    "server-round",
    "acknowledged-round",
    "checkpoint-round",
    "exchanged-round",
    "consensus-step",
    "neighbour-weight",
}
RELAYED = {"relayed-rounds", "relayed-senders", "relayed-weights", "relayed-data"}


@GOSSIP
@pytest.mark.parametrize("graph", ["ring", "star", "erdos-renyi"])
def test_messages_are_relayed_to_neighbours_only(algorithm, graph):
    network = Network(
        algorithm, graph=graph, compressor="sign-top-k", compressor_k=0.1, seed=3
    )
    network.grid.down = away
    network.go(6, evaluate=True)
    weights = network.strategy.mixing_weights
    sender_of = {}
    for reply in network.grid.replies:
        if reply.metadata.message_type == "train":
            data = reply.content.config_records["bytes"]["message"]
            assert sender_of.setdefault(data, reply.metadata.src_node_id - 1) == (
                reply.metadata.src_node_id - 1
            )
    assert len(sender_of) == sum(row["sent"] for row in network.rows)
    seen = set()
    for message in network.grid.sent:
        if message.metadata.message_type not in ("train", "evaluate"):
            continue
        i = message.metadata.dst_node_id - 1
        assert list(message.content) == ["arrays", "config"]
        assert len(message.content["arrays"]) == 0
        config = message.content["config"]
        extra = set(config) - CONFIG
        assert extra in (set(), RELAYED)
        assert config["neighbour-weight"] == pytest.approx(1 - weights[i, i])
        for name, weight, data in zip(
            config.get("relayed-senders", []),
            config.get("relayed-weights", []),
            config.get("relayed-data", []),
            strict=True,
        ):
            j = sender_of[data]
            assert name == name_of(j)
            assert j != i
            assert weight == weights[i, j] > 0
            seen.add((i, j))
    # Each node has received messages from all of its neighbours.
    edges = {(i, j) for i in range(N) for j in range(N) if weights[i, j] > 0 and i != j}
    assert seen == edges


@GOSSIP
def test_nodes_send_only_messages_numbers_and_names(algorithm):
    network = Network(algorithm, compressor="sign-top-k", compressor_k=0.1)
    network.go(3, evaluate=True)
    length = 4 * D if algorithm == "dpsgd" else TopK(0.1, Sign()).num_bytes(D)
    kinds = {"train": 0, "evaluate": 0}
    for reply in network.grid.replies:
        kind, content = reply.metadata.message_type, reply.content
        assert sum(len(record) for record in content.array_records.values()) == 0
        if kind == "query":
            texts = {
                k: v for k, v in content["properties"].items() if isinstance(v, str)
            }
            digests = {"structure", "classes-digest"}
            assert set(texts) == {"client", "tested-model", *digests}
            assert sum(map(len, texts.values())) < 96
            continue
        if kind not in kinds:
            continue
        kinds[kind] += 1
        expected = {"train": {"message": length}, "evaluate": {"sketch": 4 * 256}}
        data = content.config_records["bytes"]
        assert {k: len(v) for k, v in data.items()} == expected[kind]
        (metrics,) = content.metric_records.values()
        assert all(isinstance(v, (int, float)) for v in metrics.values())
        allowed = {"arrays", "metrics", "bytes"}
        assert set(content) <= allowed
    assert len(network.arrays) == 0
    assert kinds == {"train": 15, "evaluate": 15}


def test_batch_statistics_stay_local_and_are_saved():
    network = Network(
        "squarm-sgd",
        model="resnet20",
        num_clients=5,
        batch_size=8,
        local_steps=2,
        compressor="sign-top-k",
        compressor_k=0.01,
        per_tensor=True,
        consensus_step=0.3,
        learning_rate=0.01,
        graph="complete",
    )
    network.go(1)
    network.go(1)

    def statistics(i: int) -> dict[str, np.ndarray]:
        records = network.grid.contexts[i + 1].state
        record = records[f"personal-{network.round}"]
        return {
            n: a.numpy() for n, a in record.items() if "running_" in n or "num_b" in n
        }

    first, second = statistics(0), statistics(1)
    assert len(first) == 19 * 3
    assert all(v == 4 for n, v in first.items() if n.endswith("num_batches_tracked"))
    means = [n for n in first if n.endswith("running_mean")]
    assert all(not np.array_equal(first[n], second[n]) for n in means)
    # Messages hold parameters only, and an exchange does not change statistics.
    model = network.task.scratch_model
    shapes = tuple(p.numel() for p in model.parameters())
    length = PerTensor(TopK(0.01, Sign()), shapes).num_bytes(sum(shapes))
    assert network.rows[-1]["bits"] == 8 * 5 * length
    network.node(0)
    for name, value in model.state_dict().items():
        if name in first:
            np.testing.assert_array_equal(value.numpy(), first[name])


def test_nodes_of_the_graph_are_numbered_by_sorted_names(tmp_path):
    file = tmp_path / "edges.txt"
    file.write_text("0 1\n1 2\n1 3\n3 4\n")
    network = Network("choco-sgd", graph=str(file), consensus_step=0.5)
    # The node ids do not matter.
    contexts = list(network.grid.contexts.values())
    network.grid.contexts.data = {i: contexts[i - 1] for i in (3, 5, 1, 4, 2)}
    network.go(2)
    (message,) = network.messages("train", 2, 1)
    assert relayed(message) == [(1, name_of(j)) for j in (0, 2, 3)]
    assert network.messages("train", 2)[0].content["config"]["neighbour-weight"] == 0.25
