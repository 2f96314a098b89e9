"""Batched layers and losses compared with those of each model alone."""

import subprocess
import sys
from operator import attrgetter

import pytest
import torch
from small_models import same_bits, state_of
from torch import nn
from torch.func import vmap
from torch.nn import functional

from flwr_frl.task.models import MODELS, SplitModel, build_model
from flwr_frl.task.models.layers import StackedNorms, applied, covers, mean_losses

MODULES, BATCH = 3, 4
GENERATOR = torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(MODULES, BATCH, *shape, generator=GENERATOR)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(3, (MODULES, BATCH, *shape), generator=GENERATOR)


def image() -> torch.Tensor:
    return randn(4, 7, 6)


def twice() -> nn.Module:
    relu = nn.GELU()
    return nn.Sequential(nn.Linear(5, 5), relu, nn.Sequential(nn.Linear(5, 5), relu))


LAYERS = {
    "linear": (lambda: nn.Linear(5, 2), randn(5)),
    "no bias": (lambda: nn.Linear(5, 2, bias=False), randn(5)),
    "sequence": (lambda: nn.Linear(5, 2), randn(3, 5)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3), image()),
    "odd": (lambda: nn.Conv2d(4, 6, (3, 2), 2, (1, 0), 2, groups=2), image()),
    "same size": (lambda: nn.Conv2d(4, 3, 3, padding="same"), image()),
    "series": (lambda: nn.Conv1d(4, 3, 3, stride=2), image()[..., 0]),
    "pools": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2)), image()),
    "mean of all": (
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
        image(),
    ),
    "the same module twice": (twice, randn(5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_batched_layers_equal_each_model_alone(name):
    make, inputs = LAYERS[name]
    torch.manual_seed(0)
    modules = [make() for _ in range(MODULES)]
    assert covers(modules[0])
    state = {
        f"part.{n}": torch.stack([dict(m.named_parameters())[n] for m in modules])
        for n, _ in modules[0].named_parameters()
    }
    outputs = applied(modules[0], state, "part.", inputs)
    for module, batch, output in zip(modules, inputs, outputs, strict=True):
        torch.testing.assert_close(output, module(batch), rtol=1e-5, atol=1e-6)


class Doubled(nn.Linear):
    """A subclass of a linear layer that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "module",
    [
        Doubled(5, 2),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"),
        nn.Flatten(0),
        nn.Sequential(nn.ReLU(), nn.LayerNorm(5)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_other_modules_are_not_covered(module):
    assert not covers(module)


def test_models_with_hooks_or_another_forward_are_not_stacked():
    def hook(*_):
        return None

    kinds = ("forward", "forward_pre", "full_backward", "full_backward_pre")
    changes = [("head", f"register_{kind}_hook") for kind in kinds]
    changes += [("head.weight", "register_hook")]
    changes += [("head.weight", "register_post_accumulate_grad_hook")]
    inputs = torch.zeros(2, 1, 8, 8)
    for place, register in changes:
        model = build_model("logistic", (1, 8, 8), 10)
        assert model.can_be_stacked(lambda: inputs)
        getattr(attrgetter(place)(model), register)(hook)
        assert not model.can_be_stacked(lambda: inputs)
    model = build_model("logistic", (1, 8, 8), 10)
    model.head.forward = lambda x: x.new_zeros(len(x), 10)
    assert not model.has_layered_head


@pytest.mark.parametrize(
    ("options", "stacked"),
    [({}, True), ({"padding_idx": 0}, False), ({"max_norm": 1.0}, False)],
)
def test_embeddings_with_padding_or_max_norm_are_not_stacked(options, stacked):
    words = nn.Sequential(nn.Embedding(5, 4, **options), nn.Flatten())
    model = SplitModel(words, nn.Linear(8, 2))
    before = state_of(model)
    tokens = torch.tensor([[0, 1], [0, 2]])
    assert model.can_be_stacked(lambda: tokens) is stacked
    assert same_bits(model.state_dict(), before)


def test_is_layered_of_built_in_and_custom_models():
    shapes = {"cnn-1d": (3, 16)}
    covered = {
        name: build_model(name, shapes.get(name, (3, 16, 16)), 10).is_layered
        for name in MODELS
    }
    assert covered == {**dict.fromkeys(MODELS, True), "resnet20": False}
    tied = SplitModel(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    assert tied.is_layered
    tied = SplitModel(tied.representation, nn.Linear(4, 4))
    tied.head.weight = tied.representation[0].weight
    assert not tied.is_layered


def hinge(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.relu(1 - outputs[:, 0] * targets).mean()


IGNORING = torch.tensor([[0, -100, 2, 1], [-100, 1, 1, 0], [2, 2, 2, -100]])
LOSSES = {
    "classes": (functional.cross_entropy, (3,), drawn()),
    "ignored": (functional.cross_entropy, (3,), IGNORING),
    "sequences": (functional.cross_entropy, (3, 5), drawn(5)),
    "probabilities": (functional.cross_entropy, (3,), randn(3).softmax(2)),
    "numbers": (functional.mse_loss, (2,), randn(2)),
    "channels last": (functional.mse_loss, (2, 5, 5), randn(2, 5, 5)),
    "own": (hinge, (1,), randn().sign()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_batched_losses_equal_each_model_alone(name):
    loss, width, targets = LOSSES[name]
    outputs = randn(*width)
    if len(width) == 3:
        flat = outputs.flatten(0, 1).to(memory_format=torch.channels_last)
        outputs = flat.view(outputs.shape)
    alone = [loss(o, t) for o, t in zip(outputs, targets, strict=True)]
    torch.testing.assert_close(
        mean_losses(loss, outputs, targets), torch.stack(alone), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", sorted({*LOSSES} - {"ignored", "own"}))
def test_losses_exclude_padding(name):
    loss, width, targets = LOSSES[name]
    outputs, lengths = randn(*width), [4, 1, 3]
    weights = torch.tensor([[i < n for i in range(BATCH)] for n in lengths]).float()
    alone = [loss(outputs[i, :n], targets[i, :n]) for i, n in enumerate(lengths)]
    # Excluded outputs may have any value.
    counts = weights.view(MODULES, BATCH, *[1] * len(width)) > 0
    outputs = torch.where(counts, outputs, 1e6)
    losses = mean_losses(loss, outputs, targets, weights)
    torch.testing.assert_close(losses, torch.stack(alone), rtol=1e-5, atol=1e-6)


def normed(**form) -> list[torch.Tensor]:
    """Return inputs, statistics, weights and biases of batch norms."""
    x = torch.empty(MODULES, BATCH, 6, 5, 4, **form).uniform_().permute(0, 1, 4, 2, 3)
    vectors = [torch.rand(MODULES, 4) + 0.5 for _ in range(4)]
    return [x.contiguous(), *vectors]


@pytest.mark.parametrize("training", [True, False])
def test_batch_norms_of_bfloat16_equal_each_model_alone(training):
    together = normed(dtype=torch.bfloat16)
    alone = [tensor.clone() for tensor in together]
    for tensor in (*together[3:], *alone[3:]):
        tensor.requires_grad_()

    def norm(*tensors):
        return functional.batch_norm(*tensors, training)

    with StackedNorms():
        outputs = vmap(norm)(*together)
    expected = torch.stack([norm(*rows) for rows in zip(*alone, strict=True)])
    for each in (outputs, expected):
        (each.float() * torch.arange(4.0)[:, None, None]).sum().backward()
    assert outputs.dtype == torch.bfloat16
    for mine, theirs in zip([outputs, *together], [expected, *alone], strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(together[3:], alone[3:], strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_batch_norms_of_channels_last_images_on_a_gpu():
    # Shapes and strides alone show the error, so no GPU is needed. After other tests,
    # torch may look for a driver.
    code = """if True:
        from functools import partial
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.func import vmap
        from flwr_frl.task.models.layers import StackedNorms
        with FakeTensorMode():
            x = torch.rand(3, 4, 6, 5, 4, device="cuda").permute(0, 1, 4, 2, 3)
            vectors = [torch.rand(3, 4, device="cuda") for _ in range(4)]
            norm = partial(torch.nn.functional.batch_norm, training=True)
            try:
                vmap(norm)(x, *vectors)
            except RuntimeError as error:
                print("is_contiguous" in str(error))
            with StackedNorms():
                print(vmap(norm)(x, *vectors).shape == x.shape)
    """
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True).split() == ["True", "True"]
