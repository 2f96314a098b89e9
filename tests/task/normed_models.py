"""Models with batch norms for local training."""

import torch
from torch import nn

from flwr_frl.task.models import SplitModel


class TwoNorms(nn.Module):
    """Two batch norms, of which only the second needs more than one example.

    The first has four values per channel and example. Calls with one example are
    counted.
    """

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(1), nn.BatchNorm1d(4)
        self.alone = 0

    def forward(self, x):
        self.alone += len(x) == 1
        return self.second(self.first(x[:, None]).flatten(1))


def normed() -> SplitModel:
    torch.manual_seed(0)
    return SplitModel(TwoNorms(), nn.Linear(4, 1))
