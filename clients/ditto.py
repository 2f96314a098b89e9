"""Ditto (Li et al., ICML 2021): a personal model held near the global one."""

from dataclasses import dataclass
from typing import Annotated

from flwr.common import NDArrays

from clients.base import Client, Config, Evaluation, Reply, TrainingSettings
from clients.device.slots import under, within
from task.models import SplitModel
from task.settings import Range
from task.training import Proximal

PERSONAL_MODEL = "model."


@dataclass(frozen=True)
class DittoSettings(TrainingSettings):
    """Settings of Ditto's clients; ``representation_epochs`` are the global model's.

    Parameters
    ----------
    ditto_lambda : float, default 0.1
        λ of the personal objective F_k(v) + λ/2 ‖v − w‖² (equation 2); 0 trains alone.
    personal_epochs : int, default 1
        Epochs of the personal model v_k.
    """

    ditto_lambda: Annotated[float, Range("[0, inf)")] = 0.1
    personal_epochs: Annotated[int, Range("[0, inf)")] = 1


class DittoClient(Client):
    """Algorithm 1, client side: w_k goes back to the server, v_k stays here."""

    personal = (PERSONAL_MODEL,)
    settings_type = DittoSettings
    settings: DittoSettings

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Train w_k from wᵗ, and v_k from where it was, held near wᵗ."""
        self.receive(parameters, config)
        reply = self.send(self.train("all", self.settings.representation_epochs))
        self.load_personal_model()
        near = Proximal(self.settings.ditto_lambda, self.received)
        self.train("all", self.settings.personal_epochs, near)
        self.kept = within(PERSONAL_MODEL, self.model.state_dict())
        self.keep(config)
        return reply

    def load_personal_model(self) -> None:
        """Put v_k into the model; the initial model for a client without one."""
        self.model.load_state_dict(under(PERSONAL_MODEL, self.kept))

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Test v_k; ``accuracy-global`` is that of the global model."""
        self.receive(parameters, config)
        return self.test_beside_global()

    def deployed_model(self) -> SplitModel:
        """Return v_k."""
        self.load_personal_model()
        return self.model
