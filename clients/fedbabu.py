"""FedBABU (Oh et al., ICLR 2022): the head is trained only by fine-tuning."""

from dataclasses import dataclass
from typing import Annotated

import torch
from flwr.common import NDArrays

from flwr_frl.clients.base import Config, Reply
from flwr_frl.clients.device.conversions import under
from flwr_frl.clients.device.parameter_groups import HEAD, REPRESENTATION
from flwr_frl.clients.fine_tuning import FineTuned, FineTuningSettings
from flwr_frl.task.settings import Choice


@dataclass(frozen=True)
class FedBABUSettings(FineTuningSettings):
    """Settings of FedBABU's clients; ``finetune_epochs`` is the paper's τ_f.

    Parameters
    ----------
    finetune_part : {"head", "representation", "all"}, default "head"
        Part that is fine-tuned before the final test; the paper compares all three.
    """

    finetune_part: Annotated[str, Choice("head", "representation", "all")] = "head"  # type: ignore[misc]


class FedBABUClient(FineTuned, supports_example_dp=True):
    """Algorithm 1, client side: all clients keep the initial head.

    The authors' code fine-tunes the whole model for 5 epochs. The defaults here are the
    head and 10 epochs, as for the other fine-tuned methods.
    """

    shared = (REPRESENTATION,)
    settings_type = FedBABUSettings
    settings: FedBABUSettings

    def _structure(self) -> list[object]:
        """Add the classes and the initial head, which is not sent."""
        head = under(HEAD, self.task.initial_state)
        # Sums with 3 digits, as the last digits of weights differ between machines.
        sums = [f"{t.sum(dtype=torch.float64).item():.3g}" for t in head.values()]
        return [*super()._structure(), self.task.classes, sums]

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Train the representation with the initial head frozen."""
        self.receive(parameters, config)
        epochs = self.settings.representation_epochs
        return self.send(self.train("representation", epochs))
