"""Models by name: the built-in architectures and torchvision's."""

import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from flwr_frl.common.errors import SettingsError, reason_of, require, unknown
from flwr_frl.task.models.split_model import SplitModel

# Largest number of values of one input: an RGB image of 4096 x 4096 pixels.
MOST_INPUTS = 3 * 4096**2

# The named layers of each block; the last blocks are the head.
Blocks = list[dict[str, nn.Module]]
Builder = Callable[[tuple[int, ...], int], Blocks]


def _dense(widths: list[int], dropout: float = 0.0) -> Blocks:
    """Return fully connected blocks, each but the last followed by a ReLU."""
    blocks: Blocks = []
    for i, (fan_in, fan_out) in enumerate(pairwise(widths), 1):
        blocks.append({f"fc{i}": nn.Linear(fan_in, fan_out)})
        if i < len(widths) - 1:
            blocks[-1][f"relu{i}"] = nn.ReLU()
            if dropout:
                blocks[-1][f"dropout{i}"] = nn.Dropout(dropout)
    return blocks


def _cnn(
    shape: tuple[int, ...],
    num_classes: int,
    channels: tuple[int, int],
    hidden: list[int],
    size: int = 5,
    padding: int = 0,
    dropout: float = 0.0,
    dense_dropout: float = 0.0,
) -> Blocks:
    """Return a network of two convolutions, each with pooling, and dense layers.

    Inputs are images, or series for convolutions over time. ``dropout`` follows the
    first convolution, ``dense_dropout`` the dense layers.
    """
    blocks: Blocks = []
    first, *sides = shape
    is_image = len(sides) == 2
    convolution = nn.Conv2d if is_image else nn.Conv1d
    pool = nn.MaxPool2d if is_image else nn.MaxPool1d
    for i, (fan_in, fan_out) in enumerate(pairwise((first, *channels)), 1):
        sides = [(side + 2 * padding - size + 1) // 2 for side in sides]
        block = {f"conv{i}": convolution(fan_in, fan_out, size, padding=padding)}
        # ReLU after the pooling equals ReLU before it, since both are monotone, and
        # has fewer values.
        blocks.append({**block, f"pool{i}": pool(2), f"convrelu{i}": nn.ReLU()})
    if dropout:
        blocks[0]["dropout"] = nn.Dropout(dropout)
    blocks[1]["flatten"] = nn.Flatten()
    features = channels[-1] * math.prod(sides)
    return blocks + _dense([features, *hidden, num_classes], dense_dropout)


def _mlp(shape: tuple[int, ...], num_classes: int, hidden: list[int]) -> Blocks:
    first, *rest = _dense([math.prod(shape), *hidden, num_classes])
    return [{"flatten": nn.Flatten(), **first}, *rest]


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
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(shape[0], 16, 3, padding=1, bias=False),
        "bn1": nn.BatchNorm2d(16),
        "relu1": nn.ReLU(inplace=True),
    }
    widths = [16, *(width for width in (16, 32, 64) for _ in range(3))]
    for i, (channels_in, channels_out) in enumerate(pairwise(widths), 1):
        layers[f"block{i}"] = _ResidualBlock(channels_in, channels_out)
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    return [layers, *_dense([64, num_classes])]


def _logistic(shape: tuple[int, ...], num_classes: int) -> Blocks:
    linear = nn.Linear(math.prod(shape), num_classes)
    # The problem is convex, so no symmetry has to be broken by random values.
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return [{"flatten": nn.Flatten()}, {"fc1": linear}]


_cifar100_cnn = partial(_cnn, channels=(64, 128), hidden=[256, 128])
# The functions that return the layers, by the names in `flwr_frl.task.names`.
MODELS: dict[str, Builder] = {
    "cifar10-cnn": partial(_cnn, channels=(64, 64), hidden=[120, 64]),
    "cifar100-cnn": partial(_cifar100_cnn, dropout=0.6),
    "cifar100-cnn-srpfl": partial(_cifar100_cnn, dense_dropout=0.6),
    "digits-cnn": partial(_cnn, channels=(16, 32), hidden=[32], size=3, padding=1),
    "mlp": partial(_mlp, hidden=[512, 256, 64]),
    "mlp-2": partial(_mlp, hidden=[256]),
    "resnet20": _resnet20,
    "logistic": _logistic,
    "cnn-1d": partial(_cnn, channels=(32, 64), hidden=[64], padding=2),
}


def build_model(
    name: str, shape: tuple[int, ...], num_classes: int, head_layers: int = 1
) -> SplitModel:
    """Build a model by name.

    Parameters
    ----------
    name : str
        A key of ``MODELS``, or a classification model of torchvision, whose head is its
        last linear layer.
    shape : tuple of int
        Shape of one input: channels, height and width, or the number of columns.
    num_classes : int
        Number of outputs.
    head_layers : int, default 1
        Number of last layers that form the head, for built-in models.

    Returns
    -------
    SplitModel
        The model in channels-last format, in which dense convolutions are the fastest
        on a CPU. Initial values are the default ones of its layers or of torchvision;
        ``logistic`` begins with zeros.

    Raises
    ------
    SettingsError
        If the name is unknown, the inputs are too small or too large, or the model has
        no such head.
    """
    allowed = f"of at most {MOST_INPUTS:,} numbers"
    require(math.prod(shape) <= MOST_INPUTS, "the shape of an input", shape, allowed)
    built = _built_in if name in MODELS else _torchvision_model
    try:
        # RegNets compute their widths with tensors, which need values.
        with torch.device("cpu") if name.startswith("regnet_") else nullcontext():
            model = built(name, shape, num_classes, head_layers)
            # An attempt to apply it shows whether it fits.
            with torch.no_grad():
                model.eval()(torch.zeros(1, *shape))
            return model.train().to(memory_format=torch.channels_last)
    except SettingsError:
        raise
    # torchvision's models raise exceptions of many types.
    except Exception as error:
        raise SettingsError(
            f"model {name!r} does not fit inputs of shape {shape}: {reason_of(error)}"
        ) from None


def _built_in(
    name: str, shape: tuple[int, ...], num_classes: int, head_layers: int
) -> SplitModel:
    blocks = MODELS[name](shape, num_classes)
    allowed = f"from 1 to {len(blocks) - 1} for model {name!r}"
    require(1 <= head_layers < len(blocks), "head-layers", head_layers, allowed)
    representation, head = blocks[:-head_layers], blocks[-head_layers:]
    return SplitModel(_sequential(representation), _sequential(head))


def _sequential(blocks: Blocks) -> nn.Module:
    layers = OrderedDict(layer for block in blocks for layer in block.items())
    return nn.Sequential(layers) if len(layers) > 1 else next(iter(layers.values()))


def _torchvision_model(
    name: str, shape: tuple[int, ...], num_classes: int, head_layers: int
) -> SplitModel:
    from torchvision import models as zoo

    require(head_layers == 1, "head-layers", head_layers, f"1 for model {name!r}")
    names = zoo.list_models(module=zoo)
    if name not in names:
        raise unknown("model", name, [*MODELS, *names], "simulation.py --list")
    module = zoo.get_model(name, weights=None, num_classes=num_classes)
    linear = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    allowed = "one that ends with a linear layer, which is the head"
    require(bool(linear), "model", name, allowed)
    return SplitModel.wrap(module, linear[-1])
