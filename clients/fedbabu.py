"""FedBABU (Oh et al., ICLR 2022): nobody's head is trained before the end."""

from dataclasses import dataclass
from typing import Annotated, cast

import torch
from flwr.common import NDArrays

from flwr_frl.clients.base import Config, Reply
from flwr_frl.clients.device.parameter_groups import HEAD, REPRESENTATION, under
from flwr_frl.clients.fine_tuning import FineTuned, FineTuningSettings
from flwr_frl.task.models import Part, SplitModel
from flwr_frl.task.settings import Choice


@dataclass(frozen=True)
class FedBABUSettings(FineTuningSettings):
    """Settings of FedBABU's clients; ``finetune_epochs`` is the paper's τ_f.

    Parameters
    ----------
    finetune_part : {"head", "representation", "all"}, default "head"
        What is fine-tuned before the final test: the three that the paper compares.
    """

    finetune_part: Annotated[str, Choice("head", "representation", "all")] = "head"


class FedBABUClient(FineTuned):
    """Algorithm 1, client side: the head is the initial one, the same for all."""

    shared = (REPRESENTATION,)
    settings_type = FedBABUSettings
    settings: FedBABUSettings
    supports_example_dp = True

    def structure(self) -> list[object]:
        """Name the classes and the initial head, which is not sent, as well."""
        head = under(HEAD, self.task.initial_state)
        # Sums to 3 digits, as machines may differ in the last ones of each weight.
        sums = [f"{t.sum(dtype=torch.float64).item():.3g}" for t in head.values()]
        return [*super().structure(), self.task.classes, sums]

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Train the representation for its epochs, under the initial head."""
        self.receive(parameters, config)
        epochs = self.settings.representation_epochs
        return self.send(self.train("representation", epochs))

    def deployed_model(self) -> SplitModel:
        """Fine-tune the named part for ``finetune-epochs``, the head being new.

        Without training examples it is the global model.
        """
        part = cast(Part, self.settings.finetune_part)
        if self.has_train_examples:
            self.train(part, self.settings.finetune_epochs)
        return self.model
