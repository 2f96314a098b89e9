"""Softmax regression on features with a LoRA adapter, and a PyTorch reference.

A model is h = (W + s B A) x + b, tanh, and a linear head; W and b are frozen.
"""

import torch
from softmax_runs import CLASSES, DIMENSION, RATE, Run, draw, task_of
from torch import Tensor, nn

from flwr_frl.task import ExampleTask, SplitModel

WIDTH, RANK = 5, 2
ADAPTERS = {
    "task": "lora_tasks:plain",
    "adapters": "lora",
    "lora_rank": RANK,
    "lora_alpha": 3.0,
}
SCALE = 3.0 / RANK
FIRST = "representation.0."
A, B = (f"{FIRST}lora_{matrix}.default.weight" for matrix in "AB")
HEAD = ("head.weight", "head.bias")
State = dict[str, Tensor]


def layers() -> SplitModel:
    representation = nn.Sequential(nn.Linear(DIMENSION, WIDTH), nn.Tanh())
    return SplitModel(representation, nn.Linear(WIDTH, CLASSES))


def plain(num_clients: int) -> ExampleTask:
    return task_of(layers, classes=("a", "b", "c"))


class Reference:
    """The same model in plain PyTorch, with the frozen weights of a run."""

    def __init__(self, found: Run) -> None:
        task = found.client(0, 0).task
        base = task.initial_model().representation[0].base_layer
        self.weight, self.bias = base.weight.detach(), base.bias.detach()
        self.initial = {name: t.clone() for name, t in task.initial_state.items()}
        if A not in self.initial:
            matrices = task.initial_model().representation[0].lora_A
            self.initial[A] = matrices.default.weight.detach()

    def loss(self, state: State, i: int, delta: Tensor | float = 0.0, test=False):
        x, y = draw(i, test)
        x, y = torch.from_numpy(x).float(), torch.from_numpy(y)
        weight = self.weight + delta + SCALE * state[B] @ state[A]
        features = torch.tanh(x @ weight.T + self.bias)
        outputs = features @ state["head.weight"].T + state["head.bias"]
        return nn.functional.cross_entropy(outputs, y)

    def descend(self, state: State, i: int, steps: int, names, loss=None) -> State:
        """Return the state after steps of gradient descent on the named arrays."""
        for _ in range(steps):
            leaves = {n: t.clone().requires_grad_(n in names) for n, t in state.items()}
            value = (loss or self.loss)(leaves, i)
            slopes = torch.autograd.grad(value, [leaves[n] for n in names])
            moved = {n: state[n] - RATE * g for n, g in zip(names, slopes, strict=True)}
            state = {**state, **moved}
        return state


def average(states: list[State], names, shares) -> State:
    """Return the weighted mean of the named arrays."""
    return {
        n: sum(float(w) * s[n] for w, s in zip(shares, states, strict=True))
        for n in names
    }
