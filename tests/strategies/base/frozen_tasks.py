"""Tasks whose model has a layer that is not trained: frozen, or made of buffers."""

import torch
from cohort_tasks import task_of
from torch import nn

from flwr_frl.task import ExampleTask, SplitModel

# Weights and biases of the frozen layer, in float32: 6 inputs and 5 outputs
FROZEN_BYTES = 4 * (6 * 5 + 5)


class Buffered(nn.Module):
    """A linear layer whose arrays are buffers of the state dict: sent, not trained."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", layer.weight.detach())
        self.register_buffer("bias", layer.bias.detach())

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


def model_with(first: nn.Module) -> SplitModel:
    layers = first, nn.Tanh(), nn.Linear(5, 4), nn.Tanh()
    return SplitModel(nn.Sequential(*layers), nn.Linear(4, 3))


def frozen(num_clients: int = 5) -> ExampleTask:
    return task_of(lambda: model_with(nn.Linear(6, 5).requires_grad_(False)), (6,))


def buffered(num_clients: int = 5) -> ExampleTask:
    return task_of(lambda: model_with(Buffered(nn.Linear(6, 5))), (6,))


def differently_frozen(num_clients: int = 5) -> ExampleTask:
    def model() -> SplitModel:
        layer = nn.Linear(6, 5).requires_grad_(False)
        with torch.no_grad():
            layer.weight[0, 0] += 1e-6
        return model_with(layer)

    return task_of(model, (6,))
