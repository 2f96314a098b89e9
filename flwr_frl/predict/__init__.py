"""Use a trained model: predict from files and export to one file."""

from flwr_frl.predict.export import export
from flwr_frl.predict.loading import load_model, load_run
from flwr_frl.predict.predictor import (
    Prediction,
    Predictor,
    load,
    predict,
)

__all__ = [
    "Prediction",
    "Predictor",
    "export",
    "load",
    "load_model",
    "load_run",
    "predict",
]
