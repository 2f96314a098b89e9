"""Use a trained model: load it from files, predict, and export it to one file."""

from flwr_frl.predict.loading import load_model, load_run
from flwr_frl.predict.predictor import Prediction, Predictor

__all__ = ["Prediction", "Predictor", "load_model", "load_run"]
