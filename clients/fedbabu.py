"""FedBABU (Oh et al., ICLR 2022): the head is trained only by fine-tuning."""

import torch

from flwr_frl.clients.device.groups import HEAD, under
from flwr_frl.clients.fine_tuning import FineTuned
from flwr_frl.common.settings import setting
from flwr_frl.task.models import Part


class FedBABUClient(FineTuned, supports_example_dp=True):
    """Algorithm 1, client side: all clients keep the initial head.

    The authors' code fine-tunes the whole model for 5 epochs. The defaults here are the
    head and 10 epochs, as for the other fine-tuned methods. ``finetune-epochs`` is the
    paper's τ_f.

    Parameters
    ----------
    finetune_part : {"head", "representation", "all"}, default "head"
        Part that is fine-tuned before the final test; the paper compares all three.
    """

    shared = "representation"
    finetune_part: Part = setting("head")

    def _structure(self) -> list[object]:
        """Add the classes and the initial head, which is not sent."""
        head = under(HEAD, self.task.initial_state)
        # Sums with 3 digits, as the last digits of weights differ between machines.
        sums = [f"{t.sum(dtype=torch.float64).item():.3g}" for t in head.values()]
        return [*super()._structure(), self.task.classes, sums]

    def update(self) -> float:
        """Train the representation with the initial head frozen."""
        return self.train("representation", self.settings.representation_epochs)
