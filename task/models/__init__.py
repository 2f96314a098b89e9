"""Split models: built-in architectures, pretrained weights and vectorised layers."""

from flwr_frl.task.models.builtin import MODELS, build_model
from flwr_frl.task.models.split_model import Part, SplitModel, called_with

__all__ = ["MODELS", "Part", "SplitModel", "build_model", "called_with"]
