"""Clients that minimise quadratic functions, for asynchronous rounds."""

import numpy as np
from flwr.app import Message, MessageType

from tests.strategies.base.function_clients import honest, partition_of, reply_with

CLIENTS = 9


TARGETS = np.random.default_rng(3).normal(size=(CLIENTS, 4))


def step(x: np.ndarray, client: int) -> np.ndarray:
    """Return x after local training: a step of size 0.3 towards the client's target."""
    return x + 0.3 * (TARGETS[client] - x)


def quadratic(message: Message, context) -> Message:
    if message.metadata.message_type != MessageType.TRAIN:
        return honest(message, context)
    x = message.content.array_records["arrays"]["w"].numpy()
    arrays = {"w": step(x, partition_of(context))}
    return reply_with(message, arrays, num_examples=1, train_loss=0.0)
