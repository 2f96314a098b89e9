"""A trained model in use: classify images, export the model."""

from clients.predict.export import export
from clients.predict.loading import classify, load_model, load_run

__all__ = ["classify", "export", "load_model", "load_run"]
