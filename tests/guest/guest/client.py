"""The client: trains the head, then both parts with a custom training step."""

from flwr_frl.clients import Client
from flwr_frl.task import setting
from flwr_frl.task.training.sgd import freeze, loop


class GuestClient(Client):
    """Shares the representation and keeps the head.

    Parameters
    ----------
    warm_up : int, default 2
        Epochs of the head before both parts train.
    gradient_bound : float, default 1
        Largest norm of a step's gradient.
    """

    shared, personal = "representation", "head"
    warm_up: int = setting(2, ge=0)
    gradient_bound: float = setting(1.0, gt=0)

    def update(self):
        """Train the head, then the whole model with bounded gradients."""
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
        return loop(step, examples, epochs, self.settings, self.model)
