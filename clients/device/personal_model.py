"""Clients that keep a personal model besides the shared one."""

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.groups import Groups, Tensors, difference, under, within
from flwr_frl.common import messages as keys
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.sgd import Proximal

PERSONAL_MODEL = "model."


class PersonalModelClient(Client):
    """Keep a personal model and deploy it."""

    personal: Groups = (PERSONAL_MODEL,)

    def load_personal_model(self) -> None:
        """Load the saved personal model, or its initial values, into ``model``."""
        self.model.load_state_dict(under(PERSONAL_MODEL, self.saved))

    def keep_personal_model(self) -> None:
        """Let ``model`` be the personal model that is saved."""
        self.saved |= within(PERSONAL_MODEL, self.model.state_dict())

    def personalize_near(self, weight: float) -> None:
        """Fit the personal model of a client that joins after training.

        It starts from the shared model w and trains for ``newcomer-epochs`` with the
        proximal term μ/2 ‖v − w‖², where μ is ``weight``.
        """
        near = Proximal(weight, self.received)
        self.train("all", self.settings.newcomer_epochs, near)
        self.keep_personal_model()

    def deployed_model(self) -> SplitModel:
        """Return the personal model."""
        self.load_personal_model()
        return self.model


class AllClientsMeanClient(PersonalModelClient):
    """Share the mean of all personal models; each reply is the change of one.

    A client without a saved model starts from the mean.
    """

    def initial_group(self, group: str) -> Tensors:
        """Return the received mean as the initial personal model."""
        if group == PERSONAL_MODEL and self.received:
            return self.received
        return super().initial_group(group)

    def change(self) -> Tensors:
        """Let ``model`` be the personal model, and return its change, which is sent."""
        before = self._counted(PERSONAL_MODEL, self.received)
        change = difference(self.model.state_dict(), before)
        self.metrics[keys.IS_CHANGE] = 1
        self.keep_personal_model()
        return change
