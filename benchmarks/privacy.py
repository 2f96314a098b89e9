"""What a relaying server can learn about the nodes' models from their messages.

For each node, the server adds up the messages that it relays. D-PSGD's messages are the
models. Those of the other algorithms are differences to a public estimate, which every
neighbour, and the server, can maintain. The benchmark reports the cosine similarity of
the server's estimate after the last round and the node's actual model.
"""

import argparse

import numpy as np
import torch
from flwr.app import ConfigRecord

from benchmarks.common import markdown, write
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.gossip.flat import FlatParameters
from flwr_frl.common.settings import build, resolve
from flwr_frl.strategies import build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.task.compression.per_tensor import (
    CompressionSettings,
    Identity,
    from_settings,
)
from flwr_frl.task.tasks import build_task

ALGORITHMS = ("dpsgd", "choco-sgd", "squarm-sgd")


def cosines(algorithm: str, model: str, rounds: int, seed: int) -> list[float]:
    """Return the cosine similarity for each of eight nodes."""
    settings = resolve(
        {
            "algorithm": algorithm,
            "model": model,
            "num-clients": 8,
            "partition": "iid",
            "compressor-k": 0.01,
            "learning-rate": 0.05,
            "consensus-step": 0.2,
            "seed": seed,
        }
    )
    grid = InlineGrid(make_app(settings), 8)
    strategy = build_strategy(settings)
    arrays = strategy.initialize(grid)
    task = build_task(settings, 8)
    scratch = task.scratch_model
    flat = FlatParameters(scratch)

    def vector(state: dict[str, torch.Tensor]) -> np.ndarray:
        scratch.load_state_dict(state)
        return np.array(flat.vector.detach().numpy(), np.float64)

    start = vector(task.initial_state)
    compressor = (
        Identity()
        if algorithm == "dpsgd"
        else from_settings(build(CompressionSettings, settings), flat.sizes)
    )
    relayed = [np.zeros_like(start) for _ in range(8)]
    for server_round in range(1, rounds + 1):
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        replies = list(grid.send_and_receive(list(messages)))
        for reply in replies:
            data = reply.content.config_records["bytes"]["message"]
            node = reply.metadata.src_node_id - 1
            if data:
                found = compressor.decompress(data, len(start)).numpy()
                # A model, or an update of the estimate
                relayed[node] = found if algorithm == "dpsgd" else relayed[node] + found
        strategy.aggregate_train(server_round, replies)
    result = []
    for node, learned in enumerate(relayed):
        state = grid.contexts[node + 1].state[f"personal-{rounds}"]
        names = task.initial_state
        own = vector({n: torch.from_numpy(state[n].numpy().copy()) for n in names})
        scale = np.linalg.norm(own) * np.linalg.norm(learned)
        result.append(float(own @ learned / scale))
    return result


def main() -> None:
    """Measure all algorithms and write ``results/privacy``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--models", nargs="+", default=["logistic", "mlp"])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows, data = [], {}
    for model in arguments.models:
        for algorithm in ALGORITHMS:
            similarities = cosines(algorithm, model, arguments.rounds, arguments.seed)
            data[f"{algorithm}/{model}"] = similarities
            row = [f"`{algorithm}`", f"`{model}`", f"{min(similarities):.4f}"]
            rows.append([*row, f"{np.mean(similarities):.4f}"])
    body = (
        f"Cosine similarity, after {arguments.rounds} rounds, between a node's model "
        "and the sum of its messages, which the server can compute. Eight nodes on a "
        "ring, digits; the compressed algorithms send the signs of 1 % of the "
        "entries.\n\n"
    ) + markdown(["algorithm", "model", "worst node", "mean"], rows)
    write("privacy", "What can be learned from relaying", body, {"cosines": data})


if __name__ == "__main__":
    main()
