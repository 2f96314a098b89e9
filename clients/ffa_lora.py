"""FFA-LoRA (Sun et al., ICLR 2024): LoRA with frozen matrices A."""

from flwr_frl.clients.fedavg import FedAvgClient
from flwr_frl.task.models.adapters import needs_lora


class FFALoRAClient(
    FedAvgClient,
    requires=(needs_lora,),
    task_settings={"lora-share": "b"},
    supports_example_dp=True,
):
    """Train B and the head (section 4); the mean of B A is then exact.

    With the same A on all clients, mean(B_i) A = mean(B_i A).
    """
