"""Fingerprints of clients' examples, which show that two processes have the same."""

import hashlib

import torch

from flwr_frl.common.run_cache import run_object
from flwr_frl.common.settings import ResourceError
from flwr_frl.task.base import Task
from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import ExampleSet

# Largest number of rows of a set that are read, and of values per row that count, so
# that a fingerprint takes about a millisecond of any mapped data.
ROWS, VALUES = 16, 256


class _Fingerprints(dict[tuple[int, int], tuple[Task, str]]):
    """Fingerprints by the id of the task, which each entry keeps alive, and client."""


def fingerprint(task: Task, client: int) -> str:
    """Return a digest of a client's examples, computed once per run and process.

    It covers the number of training and test examples, the shapes and dtypes of inputs
    and targets, and up to 4,096 values of 16 examples at equal distances. Another split
    changes it; a change of a few other examples may not. They are read under a fixed
    seed, so that random augmentations on access do not count.

    Parameters
    ----------
    task : Task
        The task.
    client : int
        Index of the client, from 0.
    """
    known, key = run_object(_Fingerprints), (id(task), client)
    if key not in known:
        with seeded(client):
            sets = task.train_examples(client), task.test_examples(client)
        # `Task.check` refuses other types.
        valid = all(isinstance(examples, ExampleSet) for examples in sets)
        known[key] = task, _digest(sets) if valid else ""
    return known[key][1]


def _digest(sets: tuple[ExampleSet, ...]) -> str:
    digest = hashlib.sha256()
    for examples in sets:
        rows = torch.arange(0, len(examples), -(-len(examples) // ROWS) or 1)
        places = rows if examples.rows is None else examples.rows[rows]
        for values, at in ((examples.inputs, places), (examples.targets, rows)):
            shape = f"{len(examples)} {values.dtype} {tuple(values.shape[1:])}"
            taken = values[at.to(values.device)].detach().cpu().flatten()
            # Copied, as bytes can only be read from contiguous memory.
            taken = taken[:: -(-len(taken) // (ROWS * VALUES)) or 1].clone()
            digest.update(shape.encode())
            digest.update(taken.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def check_examples(task: Task, client: int, expected: object) -> None:
    """Raise `ResourceError` if a simulated client's fingerprint is not the expected.

    Parameters
    ----------
    task : Task
        The task, as built in this process.
    client : int
        Index of the client, from 0.
    expected : object
        Fingerprint at the start of the run; None if it is unknown.
    """
    if expected is not None and (found := fingerprint(task, client)) != expected:
        raise ResourceError(
            f"examples of client {client} have the fingerprint {found}; expected "
            f"{expected}, as at the start of the run: each process must build the same "
            "task, from the same data, with a seed for each random split",
            "other-examples",
        )
