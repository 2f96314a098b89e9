"""A trained model in use: predictions from files, and its export."""

from flwr_frl.clients.predict.export import export
from flwr_frl.clients.predict.lines import predict
from flwr_frl.clients.predict.loading import classify, load_model, load_run
from flwr_frl.clients.predict.predictor import Prediction, Predictor, load

__all__ = [
    "Prediction",
    "Predictor",
    "classify",
    "export",
    "load",
    "load_model",
    "load_run",
    "predict",
]
