"""SCAFFOLD (Karimireddy et al., ICML 2020): corrected local steps."""

import torch
from flwr.common import NDArrays

from flwr_frl.clients.base import Client, Config, Reply, TrainingSettings
from flwr_frl.clients.device.parameter_groups import (
    WHOLE,
    Tensors,
    difference,
    under,
    within,
)
from flwr_frl.task.messages import CONTROL, FROM_SHARED, IN_MEAN
from flwr_frl.task.training import steps_an_epoch

OWN_CONTROL = "own-control."


class SCAFFOLDClient(Client):
    """Algorithm 1, client side, with option II; c_i stays here.

    y_i ← y_i − η_l (g_i(y_i) − c_i + c), K times from y_i = x; then
    c_i⁺ = c_i − c + (x − y_i) / (K η_l).

    The paper has no momentum. With ``momentum`` β a gradient moves y_i more than once,
    so K becomes the sum Σ_t (1 − βᵗ)/(1 − β) of all the gradients' weights: c_i⁺ stays
    their mean.
    """

    shared = (*WHOLE, CONTROL)
    personal = (OWN_CONTROL,)
    predicts_with_personal = False
    settings: TrainingSettings
    supports_example_dp = True
    sends_changes = True

    def initial_group(self, slot: str) -> Tensors:
        """Return control variates of 0, one for each name of a parameter."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in named}

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Make K corrected steps from x, move c_i, and send Δy_i and Δc_i."""
        self.receive(parameters, config)
        c, own = under(CONTROL, self.received), under(OWN_CONTROL, self.saved)
        if not (self.state.round and config.get(IN_MEAN, True)):
            # What an earlier run has left is no part of c, nor what was before c began.
            own = {name: torch.zeros_like(value) for name, value in own.items()}
        epochs = self.settings.representation_epochs
        correction = {name: c[name] - own[name] for name in c}
        loss = self.train("all", epochs, correction=correction)
        changes = difference(self.model.state_dict(), self.received)
        moved = own
        if step := self.total_step(epochs):
            moved = {n: own[n] - c[n] - changes[n] / step for n in own}
        before = c if config.get(FROM_SHARED) else own
        changes |= within(CONTROL, {n: moved[n] - before[n] for n in own})
        self.saved = within(OWN_CONTROL, moved)
        self.save(config)
        return self.send_arrays(changes, loss)

    def total_step(self, epochs: int) -> float:
        """Return K η_l, the gradients' total weight in x − y_i; 0 without steps.

        A batch whose targets cross-entropy all ignores is counted as a step.
        """
        examples, sgd = self.train_examples, self.settings
        steps = epochs * steps_an_epoch(self.model, examples, sgd)
        beta = self.settings.momentum
        weights = ((1 - beta**t) / (1 - beta) for t in range(1, steps + 1))
        return self.settings.learning_rate * sum(weights)
