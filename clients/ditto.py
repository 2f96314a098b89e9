"""Ditto (Li et al., ICML 2021): a personal model regularised towards the global one."""

from dataclasses import dataclass
from typing import Annotated

from flwr.common import NDArrays

from flwr_frl.clients.base import Config, Reply, TrainingSettings
from flwr_frl.clients.device.personal_model import PersonalModelClient
from flwr_frl.task.settings import Range
from flwr_frl.task.training import Proximal


@dataclass(frozen=True)
class DittoSettings(TrainingSettings):
    """Settings of Ditto's clients; ``representation_epochs`` are for the global model.

    Parameters
    ----------
    ditto_lambda : float, default 0.1
        λ of the personal objective F_k(v) + λ/2 ‖v − w‖² (equation 2); 0 trains
        v locally.
    personal_epochs : int, default 1
        Epochs of the personal model v_k.
    """

    ditto_lambda: Annotated[float, Range("[0, inf)")] = 0.1
    personal_epochs: Annotated[int, Range("[0, inf)")] = 1


class DittoClient(PersonalModelClient, supports_example_dp=True):
    """Algorithm 1, client side: w_k is sent, v_k is personal."""

    settings_type = DittoSettings
    settings: DittoSettings

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Train w_k from wᵗ, and v_k from its last value, regularised towards wᵗ."""
        self.receive(parameters, config)
        reply = self.send(self.train("all", self.settings.representation_epochs))
        self.load_personal_model()
        near = Proximal(self.settings.ditto_lambda, self.received)
        self.train("all", self.settings.personal_epochs, near)
        self.save_personal_model(config)
        return reply

    def personalize(self) -> None:
        """Train v_k from w for ``newcomer-epochs`` (equation 2)."""
        self.personalize_near(self.settings.ditto_lambda)
