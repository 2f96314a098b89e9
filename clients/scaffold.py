"""SCAFFOLD (Karimireddy et al., ICML 2020): corrected local steps."""

from flwr_frl.clients.base import Client, Update
from flwr_frl.clients.device.groups import (
    WHOLE,
    Tensors,
    changes_of,
    parameter_zeros,
    under,
    within,
)
from flwr_frl.clients.fine_tuning import FineTuned
from flwr_frl.common.messages import CONTROL

OWN_CONTROL = "own-control."


class SCAFFOLDClient(Client, supports_example_dp=True, assumes_sgd=True):
    """Algorithm 1, client side, with option II; c_i is personal.

    y_i ← y_i − η_l (g_i(y_i) − c_i + c), K times from y_i = x; then
    c_i⁺ = c_i − c + (x − y_i) / (K η_l).

    The paper has no momentum. With ``momentum`` β, each gradient contributes to several
    steps, so K is replaced by the gradients' total weight Σ_t (1 − βᵗ)/(1 − β), and
    c_i⁺ remains their mean.
    """

    shared = (*WHOLE, CONTROL)
    personal = (OWN_CONTROL,)

    def initial_group(self, group: str) -> Tensors:
        """Return control variates of 0, one per parameter name."""
        return parameter_zeros(self.model)

    def update(self) -> Update:
        """Make K corrected steps from x, update c_i, and send Δy_i and Δc_i."""
        c, c_i = under(CONTROL, self.received), self._counted(OWN_CONTROL)
        epochs, eta = self.settings.representation_epochs, self.settings.learning_rate
        correction = {name: c[name] - c_i[name] for name in c}
        loss = self.train("all", epochs, correction=correction)
        changes = changes_of(self)
        moved = c_i
        if epochs:
            # K η_l. Batches in which all targets are ignored count as steps.
            step = eta * self._gradient_weight(epochs)
            moved = {n: c_i[n] - c[n] - changes[n] / step for n in c_i}
        changes |= within(CONTROL, {n: moved[n] - c_i[n] for n in c_i})
        self.saved = within(OWN_CONTROL, moved)
        return loss, changes


class SCAFFOLDFTClient(
    FineTuned, SCAFFOLDClient, supports_example_dp=True, assumes_sgd=True
):
    """Train as with SCAFFOLD, and fine-tune the head before each test."""
