"""FedRoD (Chen & Chao, ICLR 2022): a generic head and a personalised one."""

import copy
from dataclasses import dataclass

import torch
from flwr.common import NDArrays
from torch import Tensor, nn

from flwr_frl.clients.base import Client, Config, Reply, TrainingSettings
from flwr_frl.clients.device.parameter_groups import HEAD, Tensors, under, within
from flwr_frl.task.base import Task
from flwr_frl.task.models import SplitModel
from flwr_frl.task.settings import SettingsError
from flwr_frl.task.training import Loss, Proximal, train

PERSONAL_HEAD = "personal-head."


class TwoHeads(nn.Module):
    """Both heads' outputs in training, of shape (batch, 2, classes).

    Cross-entropy of the first, g(x) + log N, is the balanced softmax loss of the
    generic head g; the second is g(x) + p(x), of which only p learns.

    Parameters
    ----------
    generic, personal : nn.Linear
        The heads g and p.
    log_counts : Tensor of shape (classes,)
        log N_c, of the client's training examples of each class c.
    """

    log_counts: Tensor

    def __init__(
        self, generic: nn.Linear, personal: nn.Linear, log_counts: Tensor
    ) -> None:
        super().__init__()
        self.generic = generic
        self.personal = personal
        self.register_buffer("log_counts", log_counts)

    def forward(self, features: Tensor) -> Tensor:
        """Return both outputs."""
        generic = self.generic(features)
        own = generic.detach() + self.personal(features.detach())
        return torch.stack([generic + self.log_counts, own], 1)


@dataclass(frozen=True)
class BothLosses:
    """The sum of a loss of each head's outputs."""

    loss: Loss

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum."""
        return self.loss(outputs[:, 0], targets) + self.loss(outputs[:, 1], targets)


class FedRoDClient(Client):
    """Algorithm 1, client side, with linear personalised heads.

    In each step the representation and the generic head g lower the balanced softmax
    loss −log (N_y exp g_y / Σ_c N_c exp g_c), and the personalised head p, which stays
    here, the loss of the sum g + p, which is the client's prediction. p begins at 0,
    where that is the generic one.
    """

    # g + p, and the generic g alone.
    also_test_global = True
    personal = (PERSONAL_HEAD,)
    needs_classes = True
    settings: TrainingSettings

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Raise `SettingsError` also unless the head is linear."""
        super().check_task(task)
        task.scratch_model.linear_head("FedRoD")

    def get_properties(self, config: Config) -> Config:
        """Raise `SettingsError` also if a class without examples makes the loss ∞."""
        properties = super().get_properties(config)
        counts = self.log_counts(self.model.linear_head("FedRoD"))
        present = counts.isfinite().nonzero()[:1, 0]
        if len(present) and not self.task.loss(counts[None], present).isfinite():
            raise SettingsError(
                "FedRoD needs a loss that is finite where a class has no examples, as "
                "cross-entropy is without label smoothing; the task's is not"
            )
        return properties

    def initial_group(self, slot: str) -> Tensors:
        """Return a personalised head of 0."""
        head = under(HEAD, self.task.initial_state)
        return {name: torch.zeros_like(tensor) for name, tensor in head.items()}

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Train both heads for ``representation-epochs``.

        The training loss is the sum of both heads'.
        """
        self.receive(parameters, config)
        generic = self.model.linear_head("FedRoD")
        heads = TwoHeads(generic, self.personal_head(), self.log_counts(generic))
        near = None
        if self.proximal_weight:
            generic_head = within(f"{HEAD}generic.", under(HEAD, self.received))
            near = Proximal(self.proximal_weight, {**self.received, **generic_head})
        loss = train(
            SplitModel(self.model.representation, heads),
            "all",
            self.train_examples,
            BothLosses(self.task.loss),
            self.settings.representation_epochs,
            self.settings,
            near,
        )
        self.saved = within(PERSONAL_HEAD, heads.personal.state_dict())
        self.save(config)
        return self.send(loss)

    def log_counts(self, head: nn.Linear) -> Tensor:
        """Return log N_c; −∞ for a class of which the client has no example."""
        targets = self.task.train_examples(self.index).targets
        # What cross-entropy ignores is of no class.
        counts = torch.bincount(targets[targets >= 0], minlength=head.out_features)
        return counts.to(head.weight.dtype).log().to(head.weight.device)

    def personal_head(self) -> nn.Linear:
        """Return p as a module of its own."""
        head = copy.deepcopy(self.model.linear_head("FedRoD"))
        head.load_state_dict(under(PERSONAL_HEAD, self.saved))
        return head

    def deployed_model(self) -> SplitModel:
        """Return the model whose head is g + p, one linear layer as well."""
        for name, own in under(PERSONAL_HEAD, self.saved).items():
            self.model.tensors[HEAD + name].detach().add_(own)
        return self.model
