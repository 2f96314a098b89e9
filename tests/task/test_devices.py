"""Devices by name, seeded generators, and errors for lack of memory."""

import random

import numpy as np
import pytest
import torch

from flwr_frl.task import devices
from flwr_frl.task.settings import SettingsError


@pytest.fixture
def gpus(monkeypatch):
    """Let there be some GPUs of CUDA's, and no other device."""

    def there_are(number):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    return there_are


@pytest.mark.parametrize(
    ("number", "name", "expected"),
    [
        (0, "auto", "cpu"),
        (0, "cpu", "cpu"),
        (2, "auto", "cuda:0"),
        (2, "cuda", "cuda:0"),
        (2, "cuda:1", "cuda:1"),
        (2, "cpu", "cpu"),
    ],
)
def test_a_name_is_a_device_of_this_machine(gpus, number, name, expected):
    gpus(number)
    assert devices.find(name) == torch.device(expected)


@pytest.mark.parametrize("number", [3, 2**40 + 3])
def test_seeded_is_reproducible_and_restores_the_generators(number):
    def drawn() -> tuple[float, ...]:
        return random.random(), np.random.rand(), torch.rand(()).item()

    def then(*seeds: int) -> tuple[float, ...]:
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        found.clear()
        for seed in seeds:
            with devices.seeded(seed):
                found.append(drawn())
        return drawn()

    found: list[tuple[float, ...]] = []
    expected = then()
    assert then(number, number, number + 1) == expected
    first, again, other = found
    assert first == again
    assert not set(first) & {*other, *expected}
    # Also where a model's function fails.
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    with pytest.raises(KeyError), devices.seeded(number):
        raise KeyError(drawn())
    assert drawn() == expected


def test_mps_is_taken_by_name_only(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.find("mps") == torch.device("mps", 0)
    assert devices.find("auto") == devices.CPU


@pytest.mark.parametrize(
    ("number", "name", "line"),
    [
        (0, "gpu", "'gpu'; expected auto, cpu, cuda, cuda:N or mps"),
        (0, "cuda:", "'cuda:'; expected auto, cpu, cuda, cuda:N or mps"),
        (0, "cuda", "'cuda'; expected auto, or what this machine has: cpu"),
        (0, "mps", "'mps'; expected auto, or what this machine has: cpu"),
        (1, "cuda:1", "'cuda:1'; expected auto, or what this machine has: cpu, "),
        (1, "mps", "'mps'; expected auto, or what this machine has: cpu, cuda:0"),
    ],
)
def test_an_invalid_device_is_an_error(gpus, number, name, line):
    gpus(number)
    with pytest.raises(SettingsError, match=f"^device is {line}"):
        devices.find(name)


# As torch 2.15 words them.
CUDA_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of "
    "15.77 GiB of which 1.10 GiB is free. Process 1 has 14.66 GiB memory in use."
)


def test_out_of_memory_reports_amounts():
    error = torch.OutOfMemoryError(CUDA_SAYS)
    assert devices.is_out_of_memory(error)
    line = str(devices.out_of_memory(error, "lower batch-size (10)"))
    assert line == (
        "device 'cpu' is out of memory: 2.50 GiB more were wanted, and 1.10 GiB of "
        "15.77 GiB are free; lower batch-size (10)"
    )


def test_out_of_memory_on_the_cpu():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58)
    assert devices.is_out_of_memory(caught.value)
    line = str(devices.out_of_memory(caught.value, "buy some"))
    assert "1152921504606846976 bytes more were wanted; buy some" in line
    assert not devices.is_out_of_memory(RuntimeError("shapes do not fit"))
