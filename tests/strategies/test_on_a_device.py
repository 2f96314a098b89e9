"""Training on a device other than the CPU gives the same numbers.

There may be no GPU here, so a fake device takes its place. It rejects what a GPU
rejects.
"""

import numpy as np
import pytest
import torch
from cohort_tasks import N, dense
from outcomes import assert_same, outcome
from pictures import write_images

from flwr_frl import simulate
from flwr_frl.predict import personalize
from flwr_frl.predict.runs import Fitted
from flwr_frl.task import base, devices
from flwr_frl.task.examples import ExampleSet

double = pytest.importorskip("double_device", exc_type=(ImportError, AttributeError))


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Register a device ``gpu`` with a gigabyte of memory."""
    find = devices.find
    there = {"gpu": double.GPU}
    monkeypatch.setattr(devices, "find", lambda n: there[n] if n in there else find(n))
    monkeypatch.setattr(devices, "memory", lambda: 2**30)
    monkeypatch.setattr(base, "memory", lambda: 2**30)
    with double.Factories():
        yield
    devices.use("cpu")


def test_fake_device_rejects_what_a_gpu_rejects():
    there = torch.ones(3, device=double.GPU)
    assert there.device == double.GPU
    assert (there + torch.tensor(1.0)).sum().item() == 6
    assert there.cpu().device == double.CPU
    with pytest.raises(double.MixedDevicesError, match=r"with tensors \[\(3,\)\]"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()
    with pytest.raises(TypeError, match="float64"):
        there.double()


@pytest.mark.parametrize(
    ("algorithm", "size", "optimizer"),
    [
        ("apfl", "off", "sgd"),
        ("squarm-sgd", "off", "sgd"),
        ("flute", 3, "sgd"),
        ("scaffold", 3, "sgd"),
        ("fedrep", 3, "adam"),
    ],
)
def test_results_equal_those_of_the_cpu(algorithm, size, optimizer, caplog):
    options = {"rounds": 1, "optimizer": optimizer}
    result = outcome(algorithm, size, device="gpu", **options)
    assert devices.current() == double.GPU
    assert not [line for line in caplog.messages if "one by one" in line]
    # The fake device computes on the CPU, so results are bitwise equal.
    assert_same(result, outcome(algorithm, size, device="cpu", **options), 0)


def test_random_numbers_on_the_device_differ_by_client():
    options = {"task": "cohort_tasks:dropping", "device": "gpu", "rounds": 1}
    options |= {"head-epochs": 1, "representation-epochs": 1}
    one_by_one = outcome("fedrep", "off", **options)
    # In a cohort of all clients
    assert_same(outcome("fedrep", N, **options), one_by_one, 1e-6)
    # Dropout uses the device's generator, so results differ from the CPU's.
    with pytest.raises(AssertionError):
        assert_same(
            outcome("fedrep", "off", **{**options, "device": "cpu"}), one_by_one
        )


def images(n: int) -> ExampleSet:
    pixels = torch.arange(n * 8 * 8 * 3).remainder(251).reshape(n, 8, 8, 3)
    mean, std = torch.full((3,), 100.0), torch.full((3,), 50.0)
    everything = pixels.to(torch.uint8), torch.arange(n)
    rows = torch.arange(n).flip(0)
    return ExampleSet(everything[0], everything[1].flip(0), mean, std, True, rows)


@pytest.mark.parametrize("how", ["on", "moved"])
def test_batches_on_the_device_equal_those_of_the_cpu(how):
    here = images(9)
    there = getattr(here, how)(double.GPU)
    assert there.device == double.GPU
    for shuffle in (False, True):
        torch.manual_seed(1)
        expected = list(here.batches(4, shuffle))
        torch.manual_seed(1)
        moved = list(there.batches(4, shuffle))
        assert len(moved) == 3
        for batch, other in zip(moved, expected, strict=True):
            for tensor, like in zip(batch, other, strict=True):
                assert tensor.device == double.GPU
                assert torch.equal(tensor.cpu(), like)


def test_examples_are_moved_to_the_device_once_and_cached(monkeypatch):
    task = dense()
    devices.use("gpu")
    # The 9 examples of a client have 6 float32 and an int64 each.
    size = 9 * (6 * 4 + 8)
    monkeypatch.setattr(base, "memory", lambda: base.PART * 2 * size)
    first, second = (task.resident("train", i) for i in (0, 1))
    assert first.inputs.device == second.inputs.device == double.GPU
    assert task.resident("train", 0) is first
    # There is no room for a third client's examples.
    third = task.resident("train", 4)
    assert third.inputs.device == double.CPU
    assert third.device == double.GPU
    assert task.resident("train", 1) is second


def test_newcomers_are_fitted_on_the_device(tmp_path):
    rng = np.random.default_rng(0)
    for part, count in (("train", 30), ("test", 12)):
        for label in range(3):
            images = rng.normal(100 * label, 15, (count // 3, 8, 8)).clip(0, 255)
            write_images(tmp_path / part / str(label), images.astype("u1"))
    options = {"task": "image-folder", "data-dir": str(tmp_path), "partition": "iid"}
    options |= {"num-clients": 2, "rounds": 1, "fraction": 1.0, "device": "cpu"}
    options |= {"output": str(tmp_path / "out"), "cache-dir": str(tmp_path / "cache")}
    simulate("fedrep", "inline", **options)

    def fitted(device: str) -> Fitted:
        folder = tmp_path / f"state-{device}"
        checkpoint = tmp_path / "out" / "fedrep"
        return personalize(checkpoint, tmp_path, "late", folder, device=device)

    here, there = fitted("cpu"), fitted("gpu")
    assert devices.current() == double.GPU
    assert there.loss == here.loss
    assert there.metrics == here.metrics
