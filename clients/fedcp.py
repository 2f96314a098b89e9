"""FedCP (Zhang et al., KDD 2023): a policy splits features between two heads."""

import copy

import torch
from torch import Tensor, nn

from flwr_frl.clients.base import Client, Update, linear_head, separate_head
from flwr_frl.clients.device.groups import HEAD, WHOLE, Tensors, under, within
from flwr_frl.clients.device.training import minimise
from flwr_frl.common.settings import setting
from flwr_frl.task.devices import seeded
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.frozen import copy_sharing_frozen, set_apart

PERSONAL_HEAD, POLICY = "personal-head.", "policy."
# Widths a of the kernel Σ_a exp(−‖x − y‖² / 2a), from the authors' code.
BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)


class SeparatingHead(nn.Module):
    """A personal and a global head, and the policy that splits features between them.

    Parameters
    ----------
    personal, shared : nn.Linear
        The heads; the global one is frozen.
    policy : nn.Module
        The conditional policy network, from K numbers to 2K.
    """

    def __init__(
        self, personal: nn.Linear, shared: nn.Linear, policy: nn.Module
    ) -> None:
        super().__init__()
        self.personal, self.shared, self.policy = personal, shared, policy
        set_apart(shared.requires_grad_(False))
        # v / ‖v‖ of the personal head before this round's training.
        context = personal.weight.detach().sum(0)
        self.context = nn.Buffer(nn.functional.normalize(context, dim=0))

    def forward(self, features: Tensor) -> Tensor:
        """Return the sum of both heads' outputs."""
        pairs = self.policy(features * self.context).unflatten(-1, (2, -1))
        shares, rest = pairs.softmax(-2).unbind(-2)
        outputs: Tensor = self.personal(features * shares)
        outputs = outputs + self.shared(features * rest)
        return outputs


class FedCPClient(Client, requires=(linear_head("FedCP"), separate_head)):
    """Algorithm 1, client side.

    The policy network Θ (a linear layer, a layer norm and a ReLU) assigns the share s^k
    of each feature h^k to the personal head W_i, and the rest r^k = 1 − s^k to the
    frozen global head W. Its input is h ⊙ v/‖v‖, where v is the sum of W_i's rows. Its
    output is two numbers for each k; their softmax gives the shares. The objective is
    the loss of W_i (s ⊙ h) + W (r ⊙ h), plus λ times the maximum mean discrepancy (MMD)
    between h and the features of the received representation.

    As in the authors' code, (W_i + W)/2 is sent. The MMD of a short batch is weighted
    by its share of examples; otherwise one example would have the effect of a whole
    batch. This client follows the equations where the authors' code differs:

    - its softmax has Gumbel noise, also in tests;
    - its v is random until a client has trained once; here it is computed from the
      initial head;
    - it sends W and Θ only to the clients of the previous round, so that others train
      and are tested with older ones; here all clients get the current ones.

    Parameters
    ----------
    fedcp_lambda : float, default 0.2
        λ of the maximum mean discrepancy between the features and those of the received
        representation; 0 omits it. The authors' code uses 5 with 512 features. The
        kernels' widths do not depend on the number of features, and 5 is too large for
        the fewer features of the built-in models.
    """

    shared = (*WHOLE, POLICY)
    personal = (PERSONAL_HEAD,)
    fedcp_lambda: float = setting(0.2, ge=0)

    def initial_group(self, group: str) -> Tensors:
        """Return the initial head, or a policy network drawn with the task's seed."""
        if group == PERSONAL_HEAD:
            return under(HEAD, self.task.initial_state)
        return self.policy().state_dict()

    def policy(self) -> nn.Module:
        """Return a policy network drawn with the task's seed."""
        weight = self.model.linear_head("FedCP").weight
        k, dtype = weight.shape[1], weight.dtype
        with seeded(getattr(self.task, "seed", 0) or 0):
            layer = nn.Linear(k, 2 * k, dtype=dtype)
        return nn.Sequential(layer, nn.LayerNorm(2 * k, dtype=dtype), nn.ReLU())

    def deployed_model(self) -> SplitModel:
        """Return the received representation with both heads and the policy."""
        shared = self.model.linear_head("FedCP")
        personal, policy = copy.deepcopy(shared), self.policy().to(self._device)
        personal.load_state_dict(under(PERSONAL_HEAD, self.saved))
        policy.load_state_dict(under(POLICY, self.received))
        head = SeparatingHead(personal, copy.deepcopy(shared), policy)
        return SplitModel(self.model.representation, head)

    def update(self) -> Update:
        """Train representation, personal head and policy together."""
        model, settings = self.deployed_model(), self.settings
        received = copy_sharing_frozen(model.representation)
        received.requires_grad_(False).train()
        batch = min(settings.batch_size, len(self.train_examples))

        def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            features = model.representation(inputs)
            loss = self.task.loss(model.head(features), targets)
            share = settings.fedcp_lambda * len(targets) / batch
            return loss, loss + share * discrepancy(features, received(inputs))

        loss = minimise(self, objective, settings.representation_epochs, model=model)
        head = under("head.personal.", model.state_dict())
        self.saved = within(PERSONAL_HEAD, head)
        mean = {n: (t + self.received[HEAD + n]) / 2 for n, t in head.items()}
        policy = within(POLICY, under("head.policy.", model.state_dict()))
        return loss, {**model.state_dict(), **within(HEAD, mean), **policy}


def discrepancy(x: Tensor, y: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of two samples of equal size."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squares = (a[:, None] - b[None]).square().sum(2)
        return torch.stack([(-squares / (2 * w)).exp() for w in BANDWIDTHS]).sum(0)

    x, y = x.flatten(1).float(), y.flatten(1).float()
    return (kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)).mean()
