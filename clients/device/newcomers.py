"""Clients that join after training: who they are, and what they do."""

from functools import lru_cache

import numpy as np
from flwr.common import NDArrays

from flwr_frl.clients.base import Client, Config, Evaluation
from flwr_frl.task.held_out import fewer
from flwr_frl.task.messages import FITTED


@lru_cache(maxsize=16)
def newcomers(num_clients: int, count: int, seed: int) -> frozenset[int]:
    """Draw the simulated clients that join after training; at least one trains."""
    rng = np.random.default_rng([seed, 0x2E3C0])
    drawn = rng.permutation(num_clients)[: max(0, min(count, num_clients - 1))]
    return frozenset(drawn.tolist())


def join(
    client: Client, parameters: NDArrays, config: Config, share: float, seed: int
) -> Evaluation:
    """Fit the personal groups on a share of the training examples, and test.

    Parameters
    ----------
    client : Client
        The client.
    parameters : list of ndarray
        The trained shared arrays.
    config : dict
        As in `Client.receive`.
    share : float
        Share of the training examples, in (0, 1].
    seed : int
        Seed of the examples drawn.

    Returns
    -------
    loss, num_examples, metrics
        As of `Client.evaluate`; ``fitted`` is the number of training examples used.
    """
    client.task = fewer(client.task, client.index, share, seed)
    client.receive(parameters, config)
    client.personalize()
    loss, num_examples, metrics = client.test(client.deployed_model())
    metrics[FITTED] = len(client.task.train_examples(client.index))
    return loss, num_examples, metrics
