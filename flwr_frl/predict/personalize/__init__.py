"""Fit personal parameters of a device that arrives after the training."""

from flwr_frl.predict.personalize.fitting import Fitted, personalize

__all__ = ["Fitted", "personalize"]
