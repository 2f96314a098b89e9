"""FFA-LoRA (Sun et al., ICLR 2024): LoRA with frozen matrices A."""

from flwr_frl.clients.fedavg import FedAvgClient
from flwr_frl.task.models.adapters import needs_lora


class FFALoRAClient(
    FedAvgClient,
    requires=(needs_lora,),
    task_settings={"lora-share": "b"},
    supports_example_dp=True,
):
    """Train B of h = W x + (α/r) B A x and the head; A keeps its initial values.

    With the same A on all clients, mean(B_i) A = mean(B_i A): averages are exact. The
    paper's experiments have a frozen head, as LoRA-A² (ACL 2025) reports in section
    5.1; here the head is trained and averaged.
    """
