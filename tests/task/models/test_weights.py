"""Pretrained weights: names, shapes and errors."""

import pickle
from collections import OrderedDict

import pytest
import torch
from refusals import assert_says
from safetensors.torch import save_file
from torch import nn

from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.weights import load_weights

SHAPE = "size mismatch for representation."


def small(outputs: int = 2) -> nn.Module:
    layers = [("body", nn.Linear(4, 3)), ("norm", nn.BatchNorm1d(3))]
    return nn.Sequential(OrderedDict([*layers, ("fc", nn.Linear(3, outputs))]))


@pytest.fixture
def saved(tmp_path):
    """The state dict of an unsplit module in both formats."""
    state = small().state_dict()
    torch.save(state, tmp_path / "small.pth")
    save_file(state, tmp_path / "small.safetensors")
    return tmp_path, state


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_weights_of_an_unsplit_module_are_split(saved, suffix):
    folder, state = saved
    model = SplitModel.wrap(small())
    load_weights(model, str(folder / f"small.{suffix}"), "small")
    assert torch.equal(model.representation.body.weight, state["body.weight"])
    assert torch.equal(model.head.weight, state["fc.weight"])
    assert torch.equal(model.head.bias, state["fc.bias"])


@pytest.mark.parametrize(("body", "head"), [("body", "head"), ("representation", "fc")])
def test_weights_of_a_module_with_a_part_named_head_are_split(tmp_path, body, head):
    def module(width: int = 3) -> nn.Module:
        layers = [(body, nn.Linear(4, width)), (head, nn.Linear(width, 2))]
        return nn.Sequential(OrderedDict(layers))

    plain = module()
    torch.save(plain.state_dict(), tmp_path / "whole.pth")
    model = SplitModel.wrap(module(), head)
    load_weights(model, str(tmp_path / "whole.pth"), "own")
    assert torch.equal(model.representation[0].weight, plain[0].weight)
    assert torch.equal(model.head.weight, plain[1].weight)
    other = SplitModel.wrap(module(5), head)
    torch.save(model.state_dict(), tmp_path / "split.pth")
    for name in ("whole", "split"):
        assert_says(SHAPE, load_weights, other, str(tmp_path / f"{name}.pth"), "own")


def test_head_of_another_shape_keeps_its_initial_values(saved):
    folder, state = saved
    model = SplitModel.wrap(small(outputs=5))
    before = {name: value.clone() for name, value in model.head.state_dict().items()}
    load_weights(model, str(folder / "small.pth"), "small")
    assert torch.equal(model.representation.body.weight, state["body.weight"])
    for name, value in model.head.state_dict().items():
        assert torch.equal(value, before[name])


def test_weights_of_a_split_model_and_of_a_representation(tmp_path):
    first = SplitModel.wrap(small())
    state = first.state_dict()
    # Counters of batch norms may be missing.
    del state["representation.norm.num_batches_tracked"]
    body = {name: value for name, value in state.items() if "head" not in name}
    for saved, same_head in ((state, True), (body, False)):
        torch.save(saved, tmp_path / "saved.pth")
        model = SplitModel.wrap(small())
        load_weights(model, str(tmp_path / "saved.pth"), "small")
        for layer in ("body", "norm"):
            ours, theirs = (getattr(m.representation, layer) for m in (model, first))
            assert torch.equal(ours.weight, theirs.weight)
        assert torch.equal(model.head.weight, first.head.weight) is same_head


WRONG = [
    (lambda s: {}, "Missing key(s)"),
    (lambda s: [1, 2], "expected a state dict"),
    (lambda s: {"epoch": 3, **s}, "Unexpected key(s)"),
    (lambda s: {**s, "body.bias": 3}, "received <class 'int'>"),
    (lambda s: {**s, "fc.bias": 3}, "expected a state dict"),
    (lambda s: dict(enumerate(s.values())), "expected a state dict"),
    (lambda s: {n: v for n, v in s.items() if n != "body.bias"}, "Missing key(s)"),
    (
        lambda s: {**s, "body.weight": torch.zeros(7, 4)},
        "size mismatch for representation.body.weight",
    ),
    (lambda s: {**s, "more.weight": torch.ones(1)}, "Unexpected key(s)"),
]


@pytest.mark.parametrize(("change", "line"), WRONG)
def test_weights_of_another_model_raise(saved, change, line):
    folder, state = saved
    torch.save(change(state), folder / "wrong.pth")
    model = SplitModel.wrap(small())
    assert_says(line, load_weights, model, str(folder / "wrong.pth"), "small")


def test_missing_and_damaged_files_are_an_error(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "cut.safetensors").write_bytes(b"\x10")
    model = SplitModel.wrap(small())
    for name, line in (
        ("nowhere.pth", "cannot be read: FileNotFoundError"),
        ("evil.pth", "cannot be read"),
        ("cut.safetensors", "cannot be read"),
    ):
        assert_says(line, load_weights, model, str(tmp_path / name), "small")
    assert not (tmp_path / "ran").exists()
