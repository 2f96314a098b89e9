"""FedAvg whose head every client fine-tunes in the end (FedRep, section 5.2)."""

from dataclasses import dataclass
from typing import Annotated

from flwr.common import NDArrays

from clients.base import Config, Evaluation, TrainingSettings
from clients.fedavg import FedAvgClient
from task.models import SplitModel
from task.settings import Range


@dataclass(frozen=True)
class FineTuningSettings(TrainingSettings):
    """FedAvg's settings, and those of the fine-tuning.

    Parameters
    ----------
    finetune_epochs : int, default 10
        Epochs of the head before the final test (FedRep, section 5.2).
    """

    finetune_epochs: Annotated[int, Range("[0, inf)")] = 10


class FedAvgFTClient(FedAvgClient):
    """Train as in FedAvg; use the model with a head fine-tuned on the own data."""

    settings_type = FineTuningSettings
    settings: FineTuningSettings

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Test the fine-tuned model; ``accuracy-global`` is that of the global one."""
        self.receive(parameters, config)
        return self.test_beside_global()

    def deployed_model(self) -> SplitModel:
        """Fine-tune the head of the global model for ``finetune-epochs``."""
        self.train("head", self.settings.finetune_epochs)
        return self.model
