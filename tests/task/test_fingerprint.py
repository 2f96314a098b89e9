"""Fingerprints of examples: other examples have another one, in little time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from flwr_frl.common.settings import ResourceError
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel
from flwr_frl.task.base import VALUES, check_examples, fingerprint

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40)


def task_of(train, test=None) -> ExampleTask:
    test = ExampleSet(X[:5], Y[:5]) if test is None else test
    model = lambda: SplitModel(nn.Linear(6, 2), nn.Linear(2, 40))  # noqa: E731
    sets = train if hasattr(train, "__getitem__") else [train]
    return ExampleTask(model, sets, [test] * len(sets), classes=tuple(map(str, Y)))


def test_other_examples_have_another_fingerprint():
    base = ExampleSet(X[5:], Y[5:])
    first = fingerprint(task_of(base), 0)
    assert fingerprint(task_of(ExampleSet(X[5:].clone(), Y[5:].clone())), 0) == first
    assert fingerprint(task_of(ExampleSet(X, Y[5:], rows=Y[5:])), 0) == first
    others = [
        task_of(ExampleSet(X[5:-1], Y[5:-1])),
        task_of(ExampleSet(X[5:].flip(0), Y[5:].flip(0))),
        task_of(ExampleSet(X[5:], Y[5:].flip(0))),
        task_of(ExampleSet(X[5:] * 2, Y[5:])),
        task_of(ExampleSet(X[5:].double(), Y[5:])),
        task_of(ExampleSet(X[5:].unsqueeze(1), Y[5:])),
        task_of(ExampleSet(X, Y[5:], rows=Y[:-5])),
        task_of(base, ExampleSet(X[1:6], Y[1:6])),
    ]
    found = {fingerprint(task, 0) for task in others}
    assert len(found | {first}) == len(others) + 1
    check_examples(others[0], 0, None)
    for other in (first, "a\nb"):
        with pytest.raises(ResourceError) as raised:
            check_examples(others[0], 0, other)
        assert raised.value.code == "other-examples"
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "examples",
    [
        ExampleSet(X[:0], Y[:0]),
        ExampleSet(X[:3, :0], Y[:3]),
        ExampleSet(X[:20].bfloat16(), X[:20] > 0),
        ExampleSet(X[:20].view(20, 1, 2, 3, 1), X[:20, 0]),
        ExampleSet(X[:1], torch.tensor(3).expand(1)),
    ],
)
def test_unusual_examples_have_one(examples):
    empty = ExampleSet(X[:0], Y[:0])
    assert fingerprint(task_of(examples, empty), 0) != fingerprint(task_of(empty), 0)


def test_few_values_of_mapped_examples_are_read(tmp_path, monkeypatch):
    pixels = np.memmap(tmp_path / "p", np.uint8, "w+", shape=(3000, 64, 64, 3))
    pixels[1500:] = 7
    mapped = ExampleSet(torch.from_numpy(pixels), torch.zeros(3000).long())
    every_other = replace(mapped, rows=torch.arange(3000), targets=mapped.targets)
    read, clone = [], torch.Tensor.clone
    counted = lambda t, **how: read.append(t.numel()) or clone(t, **how)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "clone", counted)
    for examples in (mapped, every_other):
        fingerprint(task_of(examples, mapped), 0)
    assert 0 < max(read) <= 16 * 2 * VALUES


class Augmented(list):
    """Examples that are changed at random on each access."""

    def __getitem__(self, client):
        noise = torch.randn(40, 6) + np.random.rand()
        return ExampleSet(X + noise, Y)


def test_random_augmentation_on_access_does_not_count():
    state = torch.get_rng_state()
    first = fingerprint(task_of(Augmented([0])), 0)
    torch.rand(3)
    assert fingerprint(task_of(Augmented([0])), 0) == first
    torch.set_rng_state(state)
    before = torch.rand(1)
    torch.set_rng_state(state)
    fingerprint(task_of(Augmented([0])), 0)
    assert torch.equal(torch.rand(1), before)
