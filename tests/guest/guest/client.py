"""The client: trains the head, then both parts with a custom training step."""

from dataclasses import dataclass
from typing import Annotated

from flwr_frl.clients import HEAD, REPRESENTATION, Client, TrainingSettings
from flwr_frl.task.settings import Range
from flwr_frl.task.training import freeze, loop


@dataclass(frozen=True)
class GuestSettings(TrainingSettings):
    """Settings of the guest's clients.

    Parameters
    ----------
    warm_up : int, default 2
        Epochs of the head before both parts train.
    gradient_bound : float, default 1
        Largest norm of a step's gradient.
    """

    warm_up: Annotated[int, Range("[0, inf)")] = 2
    gradient_bound: Annotated[float, Range("(0, inf)")] = 1.0


class GuestClient(Client):
    """Shares the representation and keeps the head."""

    shared = (REPRESENTATION,)
    personal = (HEAD,)
    settings_type = GuestSettings

    def fit(self, parameters, config):
        """Train the head, then the whole model with bounded gradients."""
        self.receive(parameters, config)
        self.train("head", self.settings.warm_up)
        parameters = list(freeze(self.model, "all").parameters())
        optimizer = self.settings.optimizer(self.model)

        def step(inputs, targets):
            optimizer.zero_grad()
            loss = self.task.loss(self.model(inputs), targets)
            loss.backward()
            norm = sum(p.grad.square().sum() for p in parameters).sqrt()
            for p in parameters:
                p.grad *= (self.settings.gradient_bound / norm).clamp(max=1)
            optimizer.step()
            return loss.detach()

        examples, epochs = self.train_examples, self.settings.representation_epochs
        loss = loop(step, examples, epochs, self.settings, self.model)
        self.save(config)
        return self.send(loss)
