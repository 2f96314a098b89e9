"""Parameters as one vector: views, order, gradients and weight decay."""

import copy

import pytest
import torch
from torch import nn

from flwr_frl.clients.gossip.flat import FlatParameters
from flwr_frl.task.models import build_model

SHAPES = {
    "logistic": (1, 8, 8),
    "digits-cnn": (1, 8, 8),
    "resnet20": (3, 16, 16),
}
by_model = pytest.mark.parametrize("name", sorted(SHAPES))


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return build_model(name, SHAPES[name], 10)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the entries of a contiguous or channels-last tensor in memory order."""
    last = torch.channels_last
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=last):
        return tensor.permute(0, 2, 3, 1).reshape(-1)
    return tensor.reshape(-1)


def joined(tensors) -> torch.Tensor:
    return torch.cat([in_memory_order(tensor) for tensor in tensors])


@by_model
def test_the_vector_concatenates_the_parameters(name):
    model = model_of(name).requires_grad_(False)
    before = copy.deepcopy(model)
    flat = FlatParameters(model)
    parameters = list(before.parameters())
    assert flat.sizes == tuple(p.numel() for p in parameters)
    assert flat.vector.shape == flat.gradient.shape == flat.decayed.shape
    assert torch.equal(flat.vector, joined(p.detach() for p in parameters))
    assert flat.vector.dtype == torch.float32
    assert not flat.vector.requires_grad
    # Names, values, layout and buffers of the model are unchanged.
    for (name_, p), (other, q) in zip(
        model.named_parameters(), before.named_parameters(), strict=True
    ):
        assert name_ == other
        assert torch.equal(p, q)
        assert p.requires_grad
        if p.dim() == 4:
            assert p.is_contiguous(memory_format=torch.channels_last)
    for buffer, other in zip(model.buffers(), before.buffers(), strict=True):
        assert torch.equal(buffer, other)


@by_model
def test_vector_and_parameters_share_memory(name):
    model = model_of(name)
    flat = FlatParameters(model)
    flat.vector.copy_(torch.arange(len(flat.vector)))
    assert torch.equal(flat.vector, joined(p.detach() for p in model.parameters()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.5)
    assert (flat.vector == 2.5).all()
    # They still share memory after a state is loaded.
    state = model_of(name).state_dict()
    model.load_state_dict(state)
    others = dict(model_of(name).named_parameters())
    assert torch.equal(flat.vector, joined(p.detach() for p in others.values()))
    bounds = [
        flat.vector.data_ptr(),
        flat.vector.data_ptr() + 4 * len(flat.vector),
    ]
    for parameter in model.parameters():
        assert bounds[0] <= parameter.data_ptr() < bounds[1]
    for buffer in model.buffers():
        assert not bounds[0] <= buffer.data_ptr() < bounds[1]


@by_model
def test_gradients_are_those_of_an_untouched_copy(name):
    model = model_of(name)
    untouched = copy.deepcopy(model)
    flat = FlatParameters(model)
    x = torch.randn(4, *SHAPES[name]).to(memory_format=torch.channels_last)
    y = torch.tensor([1, 2, 3, 4])
    loss = nn.functional.cross_entropy(untouched(x), y)
    gradients = torch.autograd.grad(loss, list(untouched.parameters()))
    expected = joined(
        g.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else g
        for g, p in zip(gradients, untouched.parameters(), strict=True)
    )
    for _ in range(2):
        flat.gradient.zero_()
        nn.functional.cross_entropy(model(x), y).backward()
        torch.testing.assert_close(flat.gradient, expected, rtol=1e-4, atol=1e-6)
    # Gradients accumulate unless they are set to zero.
    nn.functional.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(flat.gradient, 2 * expected, rtol=1e-4, atol=1e-6)
    for parameter in model.parameters():
        assert parameter.grad.shape == parameter.shape


def test_a_second_vector_replaces_the_first():
    model = model_of("digits-cnn")
    first = FlatParameters(model)
    second = FlatParameters(model)
    assert torch.equal(first.vector, second.vector)
    second.vector.zero_()
    assert all((p == 0).all() for p in model.parameters())


def test_layouts_match_hand_computed_ones():
    # Shape 1 x 2 x 1 x 2. Channels last: both channels of a pixel are adjacent.
    conv = nn.Conv2d(2, 1, (1, 2))
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]]]))
        conv.bias.fill_(9)
    plain = FlatParameters(copy.deepcopy(conv))
    assert plain.vector.tolist() == [1, 2, 3, 4, 9]
    last = FlatParameters(conv.to(memory_format=torch.channels_last))
    assert last.vector.tolist() == [1, 3, 2, 4, 9]
    assert last.decayed.tolist() == [1, 1, 1, 1, 0]
    assert last.sizes == (4, 1)


def test_scalar_and_three_dimensional_parameters():
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(3.0))
    module.cube = nn.Parameter(torch.arange(8.0).view(2, 2, 2))
    flat = FlatParameters(module)
    assert flat.vector.tolist() == [3, *range(8)]
    assert module.scale.shape == ()
    (module.scale * module.cube.sum()).backward()
    assert flat.gradient.tolist() == [28] + [3] * 8
