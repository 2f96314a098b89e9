"""Model cards of custom tasks."""

import torch

from flwr_frl.clients.device.card import ModelCard
from flwr_frl.common.settings import resolve
from flwr_frl.task.tasks import build_task

MODULE = """
import torch
from torch import nn
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel

class Projected(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("fixed", torch.randn(3, 3), persistent=False)

    def forward(self, x):
        return super().forward(x @ self.fixed)

def drawn(num_clients):
    sets = [ExampleSet(torch.ones(2, 3), torch.ones(2, 1))] * max(1, num_clients)
    build = lambda: SplitModel(Projected(), nn.Linear(2, 1))
    return ExampleTask(build, sets, sets, nn.functional.mse_loss)
"""


def test_non_persistent_buffers_are_drawn_with_the_seed_of_the_run(write_module):
    path = f"{write_module('drawing', MODULE)}:drawn"
    settings = resolve({"task": path, "seed": 3})
    metadata = ModelCard.from_settings(settings, 4).metadata()
    restored, trained, other = (
        task.initial_model().representation.fixed
        for task in (
            ModelCard.from_metadata(metadata, {"task": path}).task,
            build_task(settings, 4),
            ModelCard.from_settings({**settings, "seed": 4}, 4).task,
        )
    )
    assert torch.equal(restored, trained)
    assert not torch.equal(restored, other)
