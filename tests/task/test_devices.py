"""Devices by name, seeded generators, and errors for lack of memory."""

import random

import numpy as np
import pytest
import torch
from refusals import code_of

from flwr_frl.task import devices


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that simulates a number of CUDA GPUs, and optionally MPS."""

    def pretend(number, has_mps=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)

    return pretend


@pytest.mark.parametrize(
    ("number", "has_mps", "name", "expected"),
    [
        (0, False, "auto", "cpu"),
        (2, False, "auto", "cuda:0"),
        (2, False, "cuda", "cuda:0"),
        (2, False, "cuda:1", "cuda:1"),
        (2, False, "cpu", "cpu"),
        (0, True, "mps", "mps:0"),
        # MPS is used only if it is named.
        (0, True, "auto", "cpu"),
    ],
)
def test_find_returns_the_named_device(gpus, number, has_mps, name, expected):
    gpus(number, has_mps)
    assert devices.find(name) == torch.device(expected)


@pytest.mark.parametrize("number", [3, 2**40 + 3])
def test_seeded_is_reproducible_and_restores_the_generators(number):
    def drawn() -> tuple[float, ...]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    def then(*seeds: int) -> tuple[float, ...]:
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        draws.clear()
        for seed in seeds:
            with devices.seeded(seed):
                draws.append(drawn())
        return drawn()

    draws: list[tuple[float, ...]] = []
    expected = then()
    assert then(number, number, number + 1) == expected
    first, again, other = draws
    assert first == again
    assert not set(first) & {*other, *expected}
    # The generators are also restored after an error.
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    with pytest.raises(KeyError), devices.seeded(number):
        raise KeyError(drawn())
    assert drawn() == expected


@pytest.mark.parametrize(
    ("number", "name"),
    [(0, "gpu"), (0, "cuda:"), (0, "cuda"), (0, "mps"), (1, "cuda:1"), (1, "mps")],
)
def test_an_invalid_device_is_an_error(gpus, number, name):
    gpus(number)
    assert code_of(devices.find, name) == "device"


def test_out_of_memory_is_one_line_with_advice():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58)
    assert devices.is_out_of_memory(caught.value)
    line = str(devices.out_of_memory(caught.value, "lower batch-size (10)"))
    assert "1152921504606846976 bytes" in line
    assert line.endswith("; lower batch-size (10)")
    assert not devices.is_out_of_memory(RuntimeError("shapes do not fit"))
