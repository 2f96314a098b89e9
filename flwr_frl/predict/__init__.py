"""Use a trained model: load it from files, predict, and export it to one file."""

from flwr_frl.predict.predictor import Prediction, Predictor, load_model
from flwr_frl.predict.runs import load_run, personalize

__all__ = ["Prediction", "Predictor", "load_model", "load_run", "personalize"]
