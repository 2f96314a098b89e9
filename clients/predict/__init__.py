"""A trained model in use: predictions from files, and its export."""

from clients.predict.export import export
from clients.predict.lines import predict
from clients.predict.loading import classify, load_model, load_run

__all__ = ["classify", "export", "load_model", "load_run", "predict"]
