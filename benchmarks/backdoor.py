"""The digits with a backdoor attack or flipped labels, for `benchmarks.liars`.

The trigger is a white patch of 2 x 2 pixels in the corner of an image. An attacker
trains on its own digits, of which every second one has the trigger and the label of the
target class. Tests use clean digits, or the digits of all other classes with the
trigger and the target's label; the accuracy is then the attack's success rate.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import nn

from flwr_frl.common.settings import setting
from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.tasks.image import ImageSettings, ImageTask

TARGET, PATCH, WHITE, HIDDEN = 0, 2, 255, 64


@dataclass(frozen=True)
class BackdoorSettings(ImageSettings):
    """Settings of `BackdoorDigits`.

    Parameters
    ----------
    attackers : int, default 0
        Number of clients, starting from the first, that train on poisoned digits.
    label_flip : bool, default False
        Whether poisoned digits have flipped labels, 9 - y, instead of triggers.
    test_triggered : bool, default False
        Whether tests use triggered digits.
    """

    attackers: int = setting(0, ge=0)
    label_flip: bool = setting(False)
    test_triggered: bool = setting(False)


class BackdoorDigits(ImageTask):
    """The digits, with the trigger in some of the images."""

    _settings_type: ClassVar[type] = BackdoorSettings

    def __init__(self, settings: BackdoorSettings, num_clients: int) -> None:
        super().__init__("digits", settings, num_clients)
        self.attackers, self.label_flip = settings.attackers, settings.label_flip
        self.test_triggered = settings.test_triggered
        # Cached, to return the same object in each call, like a client's examples.
        self._poisoned = cache(self._poison)
        self._triggered = cache(self._trigger)

    def initial_model(self) -> SplitModel:
        """Return a new perceptron with one hidden layer, which is fast to train."""
        channels, height, width = self.shape
        pixels = channels * height * width
        with seeded(self.seed):
            hidden = nn.Sequential(nn.Flatten(), nn.Linear(pixels, HIDDEN), nn.ReLU())
            return SplitModel(hidden, nn.Linear(HIDDEN, self.num_classes))

    def train_examples(self, client: int) -> ExampleSet:
        """Return a client's training examples; an attacker's are poisoned."""
        return (
            self._poisoned(client)
            if client < self.attackers
            else super().train_examples(client)
        )

    def test_examples(self, client: int) -> ExampleSet:
        """Return a client's test examples, all triggered if the settings say so."""
        if self.test_triggered:
            return self._triggered(client)
        return super().test_examples(client)

    def _poison(self, client: int) -> ExampleSet:
        examples = super().train_examples(client)
        if self.label_flip:
            return replace(examples, targets=self.num_classes - 1 - examples.targets)
        return triggered(examples, torch.arange(len(examples)) % 2 == 1)

    def _trigger(self, client: int) -> ExampleSet:
        examples = super().test_examples(client)
        others = examples.targets != TARGET
        chosen = replace(
            examples, inputs=examples.inputs[others], targets=examples.targets[others]
        )
        return triggered(chosen, torch.ones(len(chosen), dtype=torch.bool))


def triggered(examples: ExampleSet, where: torch.Tensor) -> ExampleSet:
    """Add the trigger and the target's label to the examples where the mask is True.

    Images have the shape (n, height, width, channels) and values up to 255.
    """
    inputs, targets = examples.inputs.clone(), examples.targets.clone()
    rows = where.nonzero().flatten()
    inputs[rows, -PATCH:, -PATCH:] = WHITE
    targets[rows] = TARGET
    return replace(examples, inputs=inputs, targets=targets)
