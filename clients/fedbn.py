"""FedBN (Li et al., ICLR 2021): personal batch norms in a shared model."""

from functools import cached_property

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_frl.clients.device.groups import WHOLE
from flwr_frl.clients.fedper import FedPerClient
from flwr_frl.common.settings import SettingsError
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
    def stays(name: str, module: nn.Module) -> bool:
        """Return whether a module's arrays are personal, which is True for batch norms.

        Parameters
        ----------
        name : str
            The module's name in the model.
        module : Module
            The module.
        """
        return isinstance(module, _BatchNorm)

    @cached_property
    def personal_names(self) -> set[str]:
        """Names of the model's personal arrays."""
        named = self.model.named_modules(remove_duplicate=False)
        chosen = [(n, m) for n, m in named if self.stays(n, m)]
        return {f"{name}.{array}" for name, m in chosen for array in m.state_dict()}

    def _group_of(self, name: str) -> str:
        """Return the group of an array by its module instead of its part."""
        return NORMS if name in self.personal_names else super()._group_of(name)
