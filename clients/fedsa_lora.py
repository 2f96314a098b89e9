"""FedSA-LoRA (Guo et al., ICLR 2025): selective aggregation of LoRA matrices."""

from flwr_frl.clients.device.groups import HEAD
from flwr_frl.clients.fedper import FedPerClient
from flwr_frl.task.base import Task
from flwr_frl.task.models.adapters import is_lora, needs_trained_a

LORA_B = "lora-b."


class FedSALoRAClient(
    FedPerClient, requires=(needs_trained_a,), supports_example_dp=True
):
    """Train A and B of h = W x + (α/r) B A x and the head; only A is shared.

    The server averages the A_i, and each client keeps its B_i.
    """

    shared = "representation"
    personal = (LORA_B, HEAD)

    @staticmethod
    def _group_of(task: Task, name: str) -> str:
        """Return the group by LoRA matrix instead of by part."""
        return LORA_B if is_lora(name, "B") else FedPerClient._group_of(task, name)
