"""Models by name: the built-in architectures and torchvision's."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from flwr_frl.common.settings import SettingsError, reason_of, require, unknown
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.names import MODELS as DESCRIPTIONS

# Largest number of values of one input: an RGB image of 4096 x 4096 pixels.
MOST_INPUTS = 3 * 4096**2

# Named layers of each block; the last blocks are the head.
Blocks = list[list[tuple[str, nn.Module]]]


def _dense(widths: list[int]) -> Blocks:
    """Return fully connected blocks, each but the last followed by a ReLU."""
    blocks: Blocks = []
    for i, (fan_in, fan_out) in enumerate(pairwise(widths), 1):
        block: list[tuple[str, nn.Module]] = [(f"fc{i}", nn.Linear(fan_in, fan_out))]
        if i < len(widths) - 1:
            block.append((f"relu{i}", nn.ReLU()))
        blocks.append(block)
    return blocks


def _convolution(
    number: int, channels_in: int, channels_out: int, size: int, padding: int = 0
) -> list[tuple[str, nn.Module]]:
    # ReLU after the pooling equals ReLU before it, since both are monotone, and has a
    # quarter of the values.
    return [
        (f"conv{number}", nn.Conv2d(channels_in, channels_out, size, padding=padding)),
        (f"pool{number}", nn.MaxPool2d(2)),
        (f"convrelu{number}", nn.ReLU()),
    ]


def _cifar10_cnn(shape: tuple[int, ...], num_classes: int) -> Blocks:
    height, width = (((side - 4) // 2 - 4) // 2 for side in shape[1:])
    return [
        _convolution(1, shape[0], 64, 5),
        [*_convolution(2, 64, 64, 5), ("flatten", nn.Flatten())],
        *_dense([64 * height * width, 120, 64, num_classes]),
    ]


def _cifar100_cnn(shape: tuple[int, ...], num_classes: int) -> Blocks:
    height, width = (((side - 4) // 2 - 4) // 2 for side in shape[1:])
    return [
        [*_convolution(1, shape[0], 64, 5), ("dropout", nn.Dropout(0.6))],
        [*_convolution(2, 64, 128, 5), ("flatten", nn.Flatten())],
        *_dense([128 * height * width, 256, 128, num_classes]),
    ]


def _cifar100_cnn_srpfl(shape: tuple[int, ...], num_classes: int) -> Blocks:
    height, width = (((side - 4) // 2 - 4) // 2 for side in shape[1:])
    first, second, last = _dense([128 * height * width, 256, 128, num_classes])
    return [
        _convolution(1, shape[0], 64, 5),
        [*_convolution(2, 64, 128, 5), ("flatten", nn.Flatten())],
        [*first, ("dropout1", nn.Dropout(0.6))],
        [*second, ("dropout2", nn.Dropout(0.6))],
        last,
    ]


def _digits_cnn(shape: tuple[int, ...], num_classes: int) -> Blocks:
    height, width = (side // 2 // 2 for side in shape[1:])
    return [
        _convolution(1, shape[0], 16, 3, padding=1),
        [*_convolution(2, 16, 32, 3, padding=1), ("flatten", nn.Flatten())],
        *_dense([32 * height * width, 32, num_classes]),
    ]


def _mlp(*hidden: int) -> Callable[[tuple[int, ...], int], Blocks]:
    def build(shape: tuple[int, ...], num_classes: int) -> Blocks:
        size = int(torch.Size(shape).numel())
        first, *rest = _dense([size, *hidden, num_classes])
        return [[("flatten", nn.Flatten()), *first], *rest]

    return build


class _ResidualBlock(nn.Module):
    """Two convolutions and a parameter-free shortcut (He et al. 2016, option A)."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.stride = channels_out // channels_in
        self.added_channels = channels_out - channels_in
        self.conv1 = nn.Conv2d(
            channels_in, channels_out, 3, self.stride, padding=1, bias=False
        )
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.stride > 1:
            strided = x[:, :, :: self.stride, :: self.stride]
            shortcut = nn.functional.pad(strided, (0, 0, 0, 0, 0, self.added_channels))
        x = nn.functional.relu(self.bn1(self.conv1(x)), inplace=True)
        return nn.functional.relu(self.bn2(self.conv2(x)) + shortcut, inplace=True)


def _resnet20(shape: tuple[int, ...], num_classes: int) -> Blocks:
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(shape[0], 16, 3, padding=1, bias=False)),
        ("bn1", nn.BatchNorm2d(16)),
        ("relu1", nn.ReLU(inplace=True)),
    ]
    widths = [16, *(width for width in (16, 32, 64) for _ in range(3))]
    for i, (channels_in, channels_out) in enumerate(pairwise(widths), 1):
        layers.append((f"block{i}", _ResidualBlock(channels_in, channels_out)))
    layers += [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten())]
    return [layers, *_dense([64, num_classes])]


def _logistic(shape: tuple[int, ...], num_classes: int) -> Blocks:
    size = int(torch.Size(shape).numel())
    linear = nn.Linear(size, num_classes)
    # The problem is convex, so no symmetry has to be broken by random values.
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return [[("flatten", nn.Flatten())], [("fc1", linear)]]


_BLOCKS: dict[str, Callable[[tuple[int, ...], int], Blocks]] = {
    "cifar10-cnn": _cifar10_cnn,
    "cifar100-cnn": _cifar100_cnn,
    "cifar100-cnn-srpfl": _cifar100_cnn_srpfl,
    "digits-cnn": _digits_cnn,
    "mlp": _mlp(512, 256, 64),
    "mlp-2": _mlp(256),
    "resnet20": _resnet20,
    "logistic": _logistic,
}
# By name: the function that returns the layers, and a description.
MODELS = {name: (_BLOCKS[name], about) for name, about in DESCRIPTIONS.items()}


def build_model(
    name: str,
    shape: tuple[int, ...],
    num_classes: int,
    head_layers: int = 1,
    head: str = "",
) -> SplitModel:
    """Build a model by name.

    Parameters
    ----------
    name : str
        A key of ``MODELS``, or a classification model of torchvision.
    shape : tuple of int
        Shape of one input: channels, height and width, or the number of columns.
    num_classes : int
        Number of outputs.
    head_layers : int, default 1
        Number of last layers that form the head, for built-in models.
    head : str, default ""
        Dotted name of the head of a torchvision model; its last linear layer by
        default.

    Returns
    -------
    SplitModel
        The model in channels-last format, in which dense convolutions are the fastest
        on a CPU. Initial values are the default ones of its layers or of torchvision;
        ``logistic`` begins with zeros.

    Raises
    ------
    SettingsError
        If the name is unknown, the inputs are too small or too large, or the head does
        not exist.
    """
    allowed = f"of at most {MOST_INPUTS:,} numbers"
    require(math.prod(shape) <= MOST_INPUTS, "the shape of an input", shape, allowed)
    if name in MODELS:
        if head:
            raise SettingsError(
                f"model-head is {head!r}; the built-in model {name!r} has head-layers"
            )
        try:
            blocks = MODELS[name][0](shape, num_classes)
        except (RuntimeError, ZeroDivisionError, ValueError) as error:
            raise SettingsError(
                f"model {name!r} does not fit inputs of shape {shape}: {error}"
            ) from None
        require(
            1 <= head_layers < len(blocks),
            "head-layers",
            head_layers,
            f"from 1 to {len(blocks) - 1} for model {name!r}",
        )
        model = SplitModel(
            _sequential(blocks[:-head_layers]), _sequential(blocks[-head_layers:])
        )
        with _fitting(name, shape):
            _output(model, shape)
    else:
        require(head_layers == 1, "head-layers", head_layers, f"1 for model {name!r}")
        model = _torchvision_model(name, shape, num_classes, head)
    return model.to(memory_format=torch.channels_last)


@contextmanager
def without_memory() -> Iterator[None]:
    """Create modules on the device ``meta``, with shapes but without values."""
    with torch.device("meta"):
        yield


def _sequential(blocks: Blocks) -> nn.Module:
    layers = [layer for block in blocks for layer in block]
    if len(layers) == 1:
        return layers[0][1]
    return nn.Sequential(OrderedDict(layers))


def _torchvision_model(
    name: str, shape: tuple[int, ...], num_classes: int, head: str
) -> SplitModel:
    import sys

    from torchvision.models import __name__ as zoo
    from torchvision.models import get_model, list_models

    names = list_models(module=sys.modules[zoo])
    if name not in names:
        raise unknown("model", name, [*MODELS, *names], "simulation.py --list")
    options: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if name in ("googlenet", "inception_v3"):
        # Without auxiliary outputs, and without an initialisation that takes minutes.
        options |= {"aux_logits": False, "init_weights": False}
    if name.startswith("vit_"):
        options["image_size"] = shape[1]
    if name == "maxvit_t":
        options["input_size"] = shape[1:]
    # RegNets compute their widths with tensors, which need values in `without_memory`.
    computes = name.startswith("regnet_")
    with _fitting(name, shape), torch.device("cpu") if computes else nullcontext():
        module = get_model(name, **options)
        expected = _output(module, shape)
    if not head:
        linear = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]
        if not linear:
            raise SettingsError(
                f"model {name!r} does not end with a linear layer and cannot be split; "
                "choose another one"
            )
        head = linear[-1]
    model = SplitModel.wrap(module, head)
    with _fitting(name, shape), torch.device("cpu") if computes else nullcontext():
        split = _output(model, shape)
    if not split.is_meta and not torch.equal(split, expected):
        raise SettingsError(
            f"model-head is {head!r}; expected the last thing that {name!r} applies"
        )
    return model


@contextmanager
def _fitting(name: str, shape: tuple[int, ...]) -> Iterator[None]:
    """Turn an exception of a model into a `SettingsError` about its inputs."""
    try:
        yield
    # torchvision's models raise exceptions of many types.
    except Exception as error:
        raise SettingsError(
            f"model {name!r} does not fit inputs of shape {shape}: {reason_of(error)}"
        ) from None


def _output(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Return the output for an image of zeros; the model is left in training mode."""
    with torch.no_grad():
        output: Tensor = model.eval()(torch.zeros(1, *shape))
    model.train()
    return output
