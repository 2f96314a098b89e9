"""Built-in models compared with the papers' layers, and wrapped with plain modules."""

import copy
from collections import OrderedDict

import pytest
import torch
from refusals import assert_says
from torch import nn

from flwr_frl.task.models import SplitModel, build_model

# Shapes of weights (outputs, inputs, ...) in the order of the layers; each layer has a
# bias. CIFAR: 32 - 4 = 28, pooled 14, - 4 = 10, pooled 5, so 5 x 5 x channels features.
# Digits: 8 x 8, padded and pooled twice: 2 x 2 x 32 = 128.
COLOURED = (3, 32, 32)
CIFAR10 = [(64, 3, 5, 5), (64, 64, 5, 5), (120, 1600), (64, 120), (10, 64)]
CIFAR100 = [(64, 3, 5, 5), (128, 64, 5, 5), (256, 3200), (128, 256), (100, 128)]
LAYERS = {
    "cifar10-cnn": (COLOURED, 10, CIFAR10),
    "cifar100-cnn": (COLOURED, 100, CIFAR100),
    "cifar100-cnn-srpfl": (COLOURED, 100, CIFAR100),
    "digits-cnn": ((1, 8, 8), 10, [(16, 1, 3, 3), (32, 16, 3, 3), (32, 128), (10, 32)]),
    "mlp": ((1, 28, 28), 26, [(512, 784), (256, 512), (64, 256), (26, 64)]),
    "mlp-2": ((1, 28, 28), 62, [(256, 784), (62, 256)]),
    "logistic": ((1, 28, 28), 10, [(10, 784)]),
    # Windows of 3 channels and 10 rows, pooled twice: 2 x 64 features
    "cnn-1d": ((3, 10), 4, [(32, 3, 5), (64, 32, 5), (64, 128), (4, 64)]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_match_the_papers(name):
    shape, num_classes, layers = LAYERS[name]
    model = build_model(name, shape, num_classes)
    parameters = dict(model.named_parameters())
    weights = [tuple(p.shape) for n, p in parameters.items() if n.endswith("weight")]
    biases = [tuple(p.shape) for n, p in parameters.items() if n.endswith("bias")]
    assert weights == layers
    assert biases == [layer[:1] for layer in layers]
    assert len(parameters) == 2 * len(layers)
    assert model(torch.zeros(3, *shape)).shape == (3, num_classes)


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_array_names_begin_with_their_part(name):
    shape, num_classes, layers = LAYERS[name]
    for head_layers in range(1, len(layers)):
        model = build_model(name, shape, num_classes, head_layers)
        parts = [n.split(".")[0] for n in model.state_dict()]
        number = len(layers) - head_layers
        assert parts == ["representation"] * 2 * number + ["head"] * 2 * head_layers
        assert model(torch.zeros(2, *shape)).shape == (2, num_classes)


def test_dropout_of_the_cifar100_model():
    model = build_model("cifar100-cnn", (3, 32, 32), 100)
    dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    assert [m.p for m in dropouts] == [0.6]
    assert not any(isinstance(m, nn.Dropout) for m in model.head.modules())
    # SRPFL, appendix C: dropout follows the first two fully connected layers.
    model = build_model("cifar100-cnn-srpfl", (3, 32, 32), 100)
    kept = (nn.Linear, nn.ReLU, nn.Dropout)
    order = [type(m).__name__ for m in model.modules() if isinstance(m, kept)]
    assert order[2:] == ["Linear", "ReLU", "Dropout"] * 2 + ["Linear"]
    dropouts = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert dropouts == [0.6, 0.6]


# ResNet-20 and logistic regression


def count_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def resnet20_by_hand(state: dict, x: torch.Tensor, training: bool) -> torch.Tensor:
    """Compute ResNet-20 (He et al. 2016, section 4.2, shortcuts A) from tensors."""
    arrays = iter([v for n, v in state.items() if "num_batches" not in n])

    def convolved(x: torch.Tensor, stride: int) -> torch.Tensor:
        weight, scale, shift, mean, variance = (next(arrays) for _ in range(5))
        x = nn.functional.conv2d(x, weight, stride=stride, padding=1)
        if training:
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        column = (None, slice(None), None, None)
        x = (x - mean[column]) / (variance[column] + 1e-5).sqrt()
        return x * scale[column] + shift[column]

    x = convolved(x, 1).relu()
    for width in (16, 32, 64):
        for _ in range(3):
            stride = 1 if x.shape[1] == width else 2
            shortcut = x[:, :, ::stride, ::stride]
            missing = torch.zeros(len(x), width - x.shape[1], *shortcut.shape[2:])
            shortcut = torch.cat([shortcut, missing], 1)
            x = (convolved(convolved(x, stride).relu(), 1) + shortcut).relu()
    weight, bias = arrays
    return x.mean((2, 3)) @ weight.T + bias


@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 16, 16), (1, 8, 8), (1, 28, 28)])
@pytest.mark.parametrize("training", [False, True])
def test_resnet20_matches_the_paper(shape, training):
    torch.manual_seed(0)
    model = build_model("resnet20", shape, 10).train(training)
    # He et al. have 0.27 million parameters; a grey image saves two channels of 9 x 16.
    assert count_of(model) == 269_722 - 9 * 16 * (3 - shape[0])
    assert count_of(model.head) == 650
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "bn" in name and "num_batches" not in name:
                value.uniform_(0.5, 1.5)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(5, *shape)
    with torch.no_grad():
        expected = resnet20_by_hand(state, x, training)
        torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)


def test_logistic_regression_has_7850_parameters():
    model = build_model("logistic", (1, 28, 28), 10)
    assert count_of(model) == 7850
    x = torch.randn(3, 1, 28, 28)
    state = model.state_dict()
    assert list(state) == ["head.weight", "head.bias"]
    # The problem is convex, and training starts at 0.
    for value in state.values():
        assert not value.any()
        value.normal_()
    expected = x.reshape(3, 784) @ state["head.weight"].T + state["head.bias"]
    torch.testing.assert_close(model(x), expected)
    # The head is the whole model; the representation has no parameters.
    assert count_of(model.representation) == 0


# Custom modules


@pytest.mark.parametrize(
    ("name", "head"), [("resnet18", "fc"), ("mobilenet_v3_small", "classifier.3")]
)
def test_a_wrapped_torchvision_model_computes_the_same(name, head):
    from torchvision.models import get_model

    torch.manual_seed(0)
    module = get_model(name, weights=None, num_classes=7).eval()
    plain = copy.deepcopy(module)
    model = SplitModel.wrap(module, head)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    assert {n.split(".")[0] for n in model.state_dict()} == {"representation", "head"}
    assert len(model.state_dict()) == len(plain.state_dict())


BODY = nn.Sequential(OrderedDict(body=nn.Linear(2, 3), out=nn.Linear(3, 1)))
NO_FIT = "does not fit inputs of shape"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("name", "shape", "more", "part"),
    [
        ("resnet81", COLOURED, {}, "unknown model 'resnet81'"),
        *(("cifar10-cnn", COLOURED, {"head_layers": n}, "head-l") for n in (0, -1, 5)),
        *(("resnet20", COLOURED, {"head_layers": n}, "head-layers") for n in (0, 2)),
        *(("resnet18", COLOURED, {"head_layers": n}, "head-layers") for n in (0, 2)),
        # Images of another size
        ("cifar10-cnn", (1, 8, 8), {}, f"{NO_FIT} (1, 8, 8)"),
        ("cifar100-cnn", (3, 12, 12), {}, f"{NO_FIT} (3, 12, 12)"),
        ("resnet18", (1, 8, 8), {}, f"{NO_FIT} (1, 8, 8)"),
        ("vit_b_32", (3, 33, 33), {}, f"{NO_FIT} (3, 33, 33)"),
        ("squeezenet1_1", COLOURED, {}, "one that ends with a linear layer"),
    ],
)
def test_models_that_do_not_fit_are_an_error(name, shape, more, part):
    assert_says(part, build_model, name, shape, 10, **more)


@pytest.mark.parametrize("head", ["classifier", ""])
def test_a_module_without_the_named_head_is_an_error(head):
    line = f"Sequential has no head named {head!r}; its linear layers: body, out"
    assert_says(line, SplitModel.wrap, BODY, head)
