"""Clients with a model of their own beside the shared one."""

from flwr_frl.clients.base import Client, Config, Reply
from flwr_frl.clients.device.parameter_groups import Tensors, difference, under, within
from flwr_frl.task.messages import FROM_SHARED, IN_MEAN
from flwr_frl.task.models import SplitModel

PERSONAL_MODEL = "model."


class PersonalModelClient(Client):
    """Keeps a model of its own, and uses that."""

    # The own model, and the shared one.
    also_test_global = True
    personal = (PERSONAL_MODEL,)

    def load_personal_model(self) -> None:
        """Put the own model into ``model``; for a client without, the initial slot."""
        self.model.load_state_dict(under(PERSONAL_MODEL, self.saved))

    def keep_personal_model(self, config: Config) -> None:
        """Keep ``model`` as the own model."""
        self.saved |= within(PERSONAL_MODEL, self.model.state_dict())
        self.save(config)

    def deployed_model(self) -> SplitModel:
        """Return the own model."""
        self.load_personal_model()
        return self.model


class AllClientsMeanClient(PersonalModelClient):
    """What is shared is the mean of all own models, and each reply a change of one.

    A client that has none yet begins at the mean.
    """

    sends_changes = True

    def initial_group(self, slot: str) -> Tensors:
        """Return the mean that came from the server."""
        if slot == PERSONAL_MODEL and self.received:
            return self.received
        return super().initial_group(slot)

    def send_change(self, loss: float, config: Config) -> Reply:
        """Keep ``model`` as the own model, and send by how much that moves the mean."""
        before = self.received
        # What an earlier run has left is not in this run's mean.
        in_mean = self.state.round and config.get(IN_MEAN, True)
        if in_mean and not config.get(FROM_SHARED):
            before = under(PERSONAL_MODEL, self.saved)
        after = self.model.state_dict()
        reply = self.send_arrays(difference(after, before), loss)
        self.keep_personal_model(config)
        return reply
