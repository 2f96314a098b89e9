"""FedDyn (Acar et al., ICLR 2021): a dynamic regulariser of local training."""

from flwr_frl.clients.base import Client, Update
from flwr_frl.clients.device.groups import Tensors, changes_of, parameter_zeros, within
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.messages import PROXIMAL_WEIGHT
from flwr_frl.task.base import Task

GRADIENT = "gradient."


def only_parameters(task: Task) -> None:
    """Refuse models with buffers, which have no gradient for the server's h."""
    model = task.scratch_model
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # Buffers outside of the state dict are frozen.
    names = [name for name in model.tensors if name not in parameters]
    if names:
        line = "it needs a model of parameters only; this one has the buffer"
        raise SettingsError(f"{line} {names[0]!r}, as batch norms have", "has-buffers")


class FedDynClient(Client, requires=(only_parameters,), assumes_sgd=True):
    """Algorithm 1, client side; the gradient λ_k = ∇L_k(θ_k) is personal.

    Local SGD from θ lowers L_k(w) − ⟨λ_k, w⟩ + α/2 ‖w − θ‖² (equation 1), inexactly.
    At its minimum ∇L_k(θ_k) = λ_k − α (θ_k − θ) (equation 2), which becomes λ_k. A
    client that is not sampled keeps its λ_k; a new one begins with 0. The authors' code
    also clips the gradient of each step to a norm of 10, as ``max-gradient-norm=10``
    does here.
    """

    personal = (GRADIENT,)

    def initial_group(self, group: str) -> Tensors:
        """Return gradients of 0, one per parameter name."""
        return parameter_zeros(self.model)

    def update(self) -> Update:
        """Train with the regulariser, update λ_k, and send θ_k − θ.

        `Client.train` adds α/2 ‖w − θ‖².
        """
        alpha = float(self.config[PROXIMAL_WEIGHT])
        gradients = self._counted(GRADIENT)
        # In the order of the model, not of the file: clients train together only if
        # their arrays are in the same order.
        correction = {name: -gradients[name] for name in self.received}
        epochs = self.settings.representation_epochs
        loss = self.train("all", epochs, correction=correction)
        changes = changes_of(self)
        moved = {
            name: value - alpha * changes[name] for name, value in gradients.items()
        }
        self.saved = within(GRADIENT, moved)
        return loss, changes
