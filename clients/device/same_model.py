"""Evaluate clients that test the same model together, with their examples in one batch.

A client without a saved state tests the model that it has received. In a large
population most clients have never trained, so they have no state.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import prod

from flwr.app import ArrayRecord, Context, Message

from flwr_frl.clients.base import Client, Config, Evaluation
from flwr_frl.clients.device.codec import unpack
from flwr_frl.clients.device.evaluation import evaluate_clients
from flwr_frl.clients.device.setup import Setup, build_client, partition
from flwr_frl.common.messages import ACKNOWLEDGED_ROUND
from flwr_frl.common.settings import SettingsError
from flwr_frl.task.base import Task
from flwr_frl.task.examples import EVALUATION_BATCH
from flwr_frl.task.resident import test_examples

# Maximum number of input values in a batch; larger batches are not faster.
LARGEST = 2**16
Reader = Callable[[Message, Context], tuple[Setup, Config]]
Answer = Callable[[Message, Setup, Client, Evaluation], Message]


def answer_together(
    messages: Sequence[Message],
    contexts: Sequence[Context],
    read: Reader,
    answer: Answer,
) -> dict[int, Message]:
    """Answer the evaluations of clients that have received the same model.

    Parameters
    ----------
    messages, contexts : sequence
        Messages of evaluations, and the contexts of their nodes.
    read : callable
        Returns a client's setup and the config of its message.
    answer : callable
        Returns the reply, given a message, a setup, a client and the result.

    Returns
    -------
    dict of int to Message
        Replies by the positions of their messages; none for clients that must be
        evaluated one by one.
    """
    groups: dict[Hashable, list[int]] = {}
    for position, pair in enumerate(zip(messages, contexts, strict=True)):
        with contextlib.suppress(SettingsError):
            setup, config = read(*pair)
            if tests_received_model(pair[1], setup, config):
                records = pair[0].content.values()
                arrays = (id(r) for r in records if isinstance(r, ArrayRecord))
                groups.setdefault((id(setup.run), *arrays), []).append(position)
    replies: dict[int, Message] = {}
    for first, *others in groups.values():
        # After an error, clients are evaluated one by one, and each reports its own.
        with contextlib.suppress(Exception):
            setup, config = read(messages[first], contexts[first])
            client = build_client(contexts[first], setup, config)
            if client.task.metrics or not client.model.is_layered:
                continue
            client._receive(unpack(messages[first], client), config)
            indices = {
                position: partition(contexts[position].node_config, setup.run)[0]
                for position in (first, *others)
            }
            for batch in _batches(client.task, indices):
                of_batch = [indices[position] for position in batch]
                results = evaluate_clients(client.task, of_batch, client.model)
                for position, result in zip(batch, results, strict=True):
                    message = messages[position]
                    replies[position] = answer(message, setup, client, result)
    return replies


def tests_received_model(context: Context, setup: Setup, config: Config) -> bool:
    """Return whether a client tests received arrays with initial personal ones."""
    kind = setup.kind
    hooks = "evaluate", "deployed_model", "_test", "_receive"
    return (
        context.node_config.keys() == {"partition-id", "num-partitions"}
        and not context.state
        and setup.states is None
        # A client whose state is lost reports it.
        and not (kind.personal and config.get(ACKNOWLEDGED_ROUND))
        and all(getattr(kind, name) is getattr(Client, name) for name in hooks)
        and isinstance(kind.shared, tuple)
        and not setup.device.dp_noise
    )


def _batches(task: Task, indices: Mapping[int, int]) -> Iterator[list[int]]:
    """Yield the positions of clients whose test examples form one batch."""
    batch: list[int] = []
    numbers = 0
    for position, index in indices.items():
        examples = test_examples(task, index)
        if not 0 < len(examples) <= EVALUATION_BATCH:
            continue
        more = len(examples) * prod(examples.inputs.shape[1:])
        if batch and numbers + more > LARGEST:
            yield batch
            batch, numbers = [], 0
        batch.append(position)
        numbers += more
    if batch:
        yield batch
