"""A device that arrives after the training gets its own part of the model."""

from flwr_frl.clients.personalize.fitting import Fitted, personalize

__all__ = ["Fitted", "personalize"]
