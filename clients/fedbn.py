"""FedBN (Li et al., ICLR 2021): personal batch norms in a shared model."""

from torch.nn.modules.batchnorm import _BatchNorm

from flwr_frl.clients.device.groups import WHOLE
from flwr_frl.clients.fedper import FedPerClient
from flwr_frl.common.errors import SettingsError
from flwr_frl.task.base import Task

NORMS = "batch-norms."


def batch_norms(task: Task) -> None:
    """Refuse models without batch norms."""
    if not any(isinstance(m, _BatchNorm) for m in task.scratch_model.modules()):
        text = "it needs a model with batch norms, resnet20 say"
        raise SettingsError(text, "no-batch-norms")


# With batch norms, gradients of single examples are not defined.
class FedBNClient(FedPerClient, requires=(batch_norms,), supports_example_dp=False):
    """Algorithm 1, client side: batch norms are personal."""

    shared = WHOLE
    personal = (NORMS,)

    @staticmethod
    def _group_of(task: Task, name: str) -> str:
        """Return the group of an array by its module instead of its part."""
        module = task.scratch_model.get_submodule(name.rpartition(".")[0])
        is_norm = isinstance(module, _BatchNorm)
        return NORMS if is_norm else FedPerClient._group_of(task, name)
