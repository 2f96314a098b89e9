"""Fingerprints of clients' examples, which show that two processes have the same."""

import hashlib
from contextlib import nullcontext

import torch

from flwr_frl.common.run_cache import run_object
from flwr_frl.common.settings import ResourceError
from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.types import Task

# Largest number of rows of a set, and approximate number of values of a row, that are
# read, so that a fingerprint takes less than a millisecond of any mapped data.
ROWS, VALUES = 16, 256


class _Fingerprints(dict[tuple[int, int], tuple[Task, str]]):
    """Fingerprints by the id of the task, which each entry keeps alive, and client."""


def fingerprint(task: Task, client: int) -> str:
    """Return a digest of a client's examples, computed once per run and process.

    It covers the number of training and test examples, the shapes and dtypes of inputs
    and targets, and their values in up to 16 examples at equal distances, of each
    about 256 values. Another split changes it; a change of a few other examples may
    not. If the task is not of this package, or reads examples on access, they are read
    under a fixed seed, so that random augmentations do not count.

    Parameters
    ----------
    task : Task
        The task.
    client : int
        Index of the client, from 0.
    """
    known, key = run_object(_Fingerprints), (id(task), client)
    if key not in known:
        source = type(getattr(task, "train", task)).__module__.partition(".")[0]
        with nullcontext() if source in ("builtins", "flwr_frl") else seeded(client):
            sets = task.train_examples(client), task.test_examples(client)
        # `Task.check` refuses other types.
        valid = all(isinstance(examples, ExampleSet) for examples in sets)
        known[key] = task, _digest(sets) if valid else ""
    return known[key][1]


def _digest(sets: tuple[ExampleSet, ...]) -> str:
    digest = hashlib.sha256()
    for examples in sets:
        every = slice(None, None, -(-len(examples) // ROWS) or 1)
        rows = None if examples.rows is None else examples.rows[every]
        for values, chosen in ((examples.inputs, rows), (examples.targets, None)):
            shape = values.shape[1:]
            most = round(VALUES ** (1 / max(1, len(shape))))
            steps = [slice(None, None, -(-size // most) or 1) for size in shape]
            # Slices of rows, so that no other bytes of a mapped file are read.
            taken = values[(every if chosen is None else slice(None), *steps)]
            taken = taken if chosen is None else taken[chosen.to(taken.device)]
            digest.update(f"{len(examples)} {values.dtype} {tuple(shape)}".encode())
            # Expanded tensors count as contiguous, but cannot be viewed as bytes.
            taken = taken.detach().cpu().clone(memory_format=torch.contiguous_format)
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
