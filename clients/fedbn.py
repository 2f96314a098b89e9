"""FedBN (Li et al., ICLR 2021): batch norms of one's own in a common model."""

from functools import cached_property

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_frl.clients.device.parameter_groups import WHOLE
from flwr_frl.clients.fedper import FedPerClient
from flwr_frl.task.base import Task
from flwr_frl.task.settings import SettingsError

NORMS = "batch-norms."


class FedBNClient(FedPerClient):
    """Algorithm 1, client side: all trains, and what `stays` chooses is not shared."""

    shared = WHOLE
    personal = (NORMS,)
    model_groups = (*WHOLE, NORMS)
    # Batch norms have no gradients of single examples.
    supports_example_dp = False

    @staticmethod
    def stays(name: str, module: nn.Module) -> bool:
        """Return whether a module's arrays stay here: γ, β and statistics of norms.

        Parameters
        ----------
        name : str
            The module's name in the model.
        module : Module
            The module.
        """
        return isinstance(module, _BatchNorm)

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Refuse models of which nothing stays."""
        super().check_task(task)
        if not any(cls.stays(*named) for named in task.scratch_model.named_modules()):
            raise SettingsError("it needs a model with batch norms, resnet20 say")

    @cached_property
    def own_names(self) -> set[str]:
        """Names of the model's arrays that stay here."""
        kept = [(n, m) for n, m in self.model.named_modules() if self.stays(n, m)]
        return {f"{name}.{array}" for name, m in kept for array in m.state_dict()}

    def group_of(self, name: str) -> str:
        """Return a slot by module, not by the part that it is in."""
        return NORMS if name in self.own_names else super().group_of(name)
