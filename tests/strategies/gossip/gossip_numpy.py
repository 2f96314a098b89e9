"""The algorithms in NumPy, without the package's clients, compressors and graphs."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from gossip_network import RING, Network


def data_of(network: Network) -> list[tuple[np.ndarray, np.ndarray]]:
    data = []
    for i in range(network.n):
        ((inputs, targets),) = network.task.train_examples(i).batches(10_000)
        data.append((inputs.reshape(len(inputs), -1).double().numpy(), targets.numpy()))
    return data


def gradient(x: np.ndarray, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the gradient of the mean cross-entropy at x = (W, b), W row by row."""
    weight, bias = x[:-10].reshape(10, -1), x[-10:]
    logits = inputs @ weight.T + bias
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(targets)), targets] -= 1
    p /= len(targets)
    return np.concatenate([(p.T @ inputs).ravel(), p.sum(0)])


def sign_top_k(x: np.ndarray, k: int) -> np.ndarray:
    order = np.argsort(-np.abs(x))
    gap = np.abs(x[order[k - 1]]) - np.abs(x[order[k]])
    # With a smaller gap, rounding could decide which entry is kept.
    assert gap > 2e-6
    kept = order[:k]
    result = np.zeros_like(x)
    result[kept] = np.abs(x[kept]).mean() * np.sign(x[kept])
    return result


@dataclass
class PlainSQuARM:
    """Algorithm 1 as printed: every node keeps the estimate x^_j of each neighbour."""

    data: list
    start: np.ndarray
    weights: np.ndarray
    rate: Callable[[int], float]
    step: float
    compress: Callable[[np.ndarray], np.ndarray]
    beta: float = 0.0
    local_steps: int = 1
    trigger: Callable[[int], float] = lambda t: 0.0
    decay: float = 0.0
    t: int = 0
    sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = len(self.data)
        self.x = np.tile(self.start, (n, 1))
        self.v = np.zeros_like(self.x)
        # public[i][j] is node i's estimate of node j's model.
        near = [[j for j in range(n) if self.weights[i, j] > 0] for i in range(n)]
        self.public = [
            {j: np.zeros_like(self.start) for j in near[i]} for i in range(n)
        ]

    def round(self, present: Callable[[int], bool] = lambda i: True) -> None:
        n = len(self.data)
        for _ in range(self.local_steps):
            for i in filter(present, range(n)):
                g = gradient(self.x[i], *self.data[i])
                g[:-10] += self.decay * self.x[i][:-10]
                self.v[i] = self.beta * self.v[i] + g
                self.x[i] -= self.rate(self.t) * (self.beta * self.v[i] + g)
            self.t += 1
        t = self.t - 1
        q = np.zeros_like(self.x)
        sent = 0
        for i in filter(present, range(n)):
            difference = self.x[i] - self.public[i][i]
            left, right = difference @ difference, self.trigger(t) * self.rate(t) ** 2
            assert abs(left - right) > 1e-5 * right
            if left > right:
                q[i] = self.compress(difference)
                sent += 1
        for i in range(n):
            for j in self.public[i]:
                self.public[i][j] = self.public[i][j] + q[j]
            for j in self.public[i]:
                between = self.public[i][j] - self.public[i][i]
                self.x[i] += self.step * self.weights[i, j] * between
        self.sent.append(sent)


def plain_dpsgd(network: Network, weights: np.ndarray):
    """Yield the nodes' models after each round."""
    data = data_of(network)
    x = np.tile(network.initial(), (network.n, 1))
    while True:
        g = np.stack([gradient(x[i], *data[i]) for i in range(network.n)])
        x = weights @ (x - 0.1 * g)
        yield x


SQUARM = {
    "momentum": 0.9,
    "local_steps": 3,
    "compressor": "sign-top-k",
    "compressor_k": 100.0,
    "consensus_step": 0.3,
    "learning_rate": 1.0,
    "learning_rate_schedule": "inverse:40",
    "trigger": "3000:1000:6:24",
    "weight_decay": 0.01,
    # With this seed, magnitudes near the threshold of top-k are not almost equal.
    "seed": 1,
}


def plain_squarm(network: Network) -> PlainSQuARM:
    return PlainSQuARM(
        data_of(network),
        network.initial(),
        RING,
        rate=lambda t: 1 / (t + 40),
        step=0.3,
        compress=lambda x: sign_top_k(x, 100),
        beta=0.9,
        local_steps=3,
        trigger=lambda t: 3000 + 1000 * (min(t, 24) // 6),
        decay=0.01,
    )
