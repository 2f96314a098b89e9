"""fedjax: its federated averaging, with models in Haiku."""

from collections.abc import Callable
from typing import Any

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.peer_apps.work import BATCH, LEARNING_RATE, Job, read_client

Parameters = dict[str, dict[str, Any]]


def cnn(x: Any) -> Any:
    """Return the outputs of the CNN for images of shape (n, height, width, 3)."""
    for i, channels in enumerate((32, 64), 1):
        x = hk.Conv2D(channels, 5, padding="VALID", name=f"conv{i}")(x)
        x = hk.max_pool(jax.nn.relu(x), 2, 2, "VALID")
    x = jax.nn.relu(hk.Linear(512, name="fc1")(hk.Flatten()(x)))
    return hk.Linear(10, name="fc")(x)


def softmax(x: Any) -> Any:
    """Return the outputs of softmax regression."""
    return hk.Linear(10, name="fc")(x)


def to_haiku(name: str, value: np.ndarray) -> np.ndarray:
    """Return a PyTorch parameter in Haiku's layout."""
    if name == "fc1.weight":
        # PyTorch flattens channels first.
        value = value.reshape(-1, 64, 5, 5).transpose(0, 2, 3, 1)
        value = value.reshape(len(value), -1)
    return value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T


def to_torch(name: str, value: np.ndarray) -> torch.Tensor:
    """Return a Haiku parameter in PyTorch's layout."""
    value = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
    if name == "fc1.weight":
        value = value.reshape(-1, 5, 5, 64).transpose(0, 3, 1, 2)
        value = value.reshape(len(value), -1)
    return torch.from_numpy(np.ascontiguousarray(value))


PARTS = {"weight": "w", "bias": "b"}


def split(name: str) -> tuple[str, str]:
    """Return the Haiku module and parameter name of a PyTorch parameter."""
    layer, part = name.split(".")
    return layer, PARTS[part]


def gradient(forward: Any) -> Callable[..., Parameters]:
    """Return a function for the gradient of a batch's mean cross-entropy."""

    def loss(parameters: Parameters, batch: Any, rng: Any) -> Any:
        scores = jax.nn.log_softmax(forward.apply(parameters, batch["x"]))
        rows = jnp.arange(len(scores))
        return -scores[rows, batch["y"]].mean()

    return jax.grad(loss)


def main() -> None:
    """Carry out the job."""
    job = Job.read()
    is_cnn = job.model_name == "cnn"
    clients = {}
    for client in {client for sampled in job.sampled for client in sampled}:
        x, y = (tensor.numpy() for tensor in read_client(job.folder, client))
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if is_cnn else x
        clients[client] = fedjax.ClientDataset({"x": x, "y": y})
    names = dict(job.initial_model().named_parameters())
    start: Parameters = {}
    for name, value in names.items():
        layer, part = split(name)
        start.setdefault(layer, {})[part] = to_haiku(name, value.detach().numpy())
    forward = hk.without_apply_rng(hk.transform(cnn if is_cnn else softmax))
    averaging = fedjax.algorithms.fed_avg.federated_averaging(
        gradient(forward),
        fedjax.optimizers.sgd(LEARNING_RATE),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=job.epochs),
    )
    state, steps = averaging.init(start), 0
    keys = jax.random.split(jax.random.PRNGKey(0), len(job.sampled))
    for key, sampled in zip(keys, job.sampled, strict=True):
        round_keys = jax.random.split(key, len(sampled))
        chosen = [
            (client, clients[client], client_key)
            for client, client_key in zip(sampled, round_keys, strict=True)
        ]
        state, _ = averaging.apply(state, chosen)
        # JAX computes asynchronously.
        jax.block_until_ready(state.params)
        steps += job.epochs * sum(len(clients[i]) // BATCH for i in sampled)
        job.note(steps)
    job.keep(
        to_torch(name, np.asarray(state.params[layer][part]))
        for name in names
        for layer, part in [split(name)]
    )


if __name__ == "__main__":
    main()
