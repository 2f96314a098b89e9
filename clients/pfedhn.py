"""pFedHN (Shamsian et al., ICML 2021): train a model that the server generates."""

from flwr_frl.clients.base import Client, Update
from flwr_frl.clients.device.groups import changes_of
from flwr_frl.clients.feddyn import only_parameters
from flwr_frl.common.errors import require
from flwr_frl.task.base import Task

# For each of them, the hypernetwork has 100 float32 weights and as many momenta, which
# is 800 MB in total.
MOST_PARAMETERS = 1_000_000


def small(task: Task) -> None:
    """Refuse models that are too large for a hypernetwork."""
    count = sum(parameter.numel() for parameter in task.scratch_model.parameters())
    allowed = f"at most {MOST_PARAMETERS:,}, for a hypernetwork of moderate size"
    require(count <= MOST_PARAMETERS, "number of parameters", count, allowed, "model")


class PFedHNClient(Client, supports_example_dp=True, requires=(small, only_parameters)):
    """Algorithm 1, client side: train θ_i and send its change; no state is kept.

    The authors train for 50 steps with batches of 64, step size 0.005, momentum 0.9 and
    weight decay 5e-5, and clip gradients to a norm of 50; here
    ``representation-epochs`` and the other settings of local training apply.
    """

    def update(self) -> Update:
        """Train the received model for ``representation-epochs``."""
        loss = self.train("all", self.settings.representation_epochs)
        return loss, changes_of(self)
