"""FedEM (Marfoq et al., NeurIPS 2021): each client mixes common component models."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flwr_frl.clients.base import Client, Update, needs_classes
from flwr_frl.clients.device.groups import Tensors, under, within
from flwr_frl.clients.ifca import initial_models
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.settings import setting
from flwr_frl.task.base import Task
from flwr_frl.task.examples import EVALUATION_BATCH, IGNORED
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.frozen import copy_sharing_frozen
from flwr_frl.task.training.local_training import train

COMPONENTS, MIXTURE = "components.", "mixture."
WEIGHTS = f"{MIXTURE}weights"


def needs_cross_entropy(task: Task) -> None:
    """Refuse tasks whose loss is not the cross-entropy."""
    if task.loss is not cross_entropy:
        text = "it needs the loss torch.nn.functional.cross_entropy, as its components "
        raise SettingsError(f"{text}are distributions of the class", "loss")


class MixedModel(nn.Module):
    """Map inputs to log Σ_m π_m softmax(h_m(x)).

    Parameters
    ----------
    components : list of SplitModel
        The models h_m.
    weights : Tensor, shape (M,)
        Their weights π_m, which sum to 1.
    """

    def __init__(self, components: list[SplitModel], weights: Tensor) -> None:
        super().__init__()
        self.components = nn.ModuleList(components)
        self.weights = nn.Buffer(weights)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logarithms of the probabilities, of the shape of a model's."""
        logarithms = zip(self.weights.log(), self.components, strict=True)
        terms = [weight + model(x).log_softmax(1) for weight, model in logarithms]
        return torch.stack(terms).logsumexp(0)


class FedEMClient(Client, requires=(needs_classes, needs_cross_entropy)):
    """Algorithm 1, client side: an EM step for the weights π, and training of all θ_m.

    With ℓ the cross-entropy, an example (x, y) belongs to component m with probability
    q_m ∝ π_m exp(−ℓ(h_m(x), y)) (E-step), where h_m is the received component, in
    evaluation mode. π_m is the mean of q_m over the n training examples, and SGD on
    Σ q_m ℓ(h_m(x), y) / n trains each component with q fixed (M-step). All components
    are sent; π is personal, and starts at 1/M. One component is FedAvg.

    The deployed model predicts Σ_m π_m softmax(h_m(x)), with the current components. A
    client that joins after training fits π by ``newcomer-epochs`` EM steps, with the
    components fixed (section 3.3).

    The equations were compared with the authors' code (commit b80911f), and are the
    same but for texts: there the losses of a sequence are averaged before the E-step,
    here each position is an example. ``train-loss`` is the mean of Σ_m q_m ℓ.

    Parameters
    ----------
    fedem_components : int, default 3
        Number M of components (section 4). Messages contain M models.
    """

    shared = (COMPONENTS,)
    personal = (MIXTURE,)
    fedem_components: int = setting(3, ge=1)

    def initial_group(self, group: str) -> Tensors:
        """Return M initial models, the first of them the task's; equal weights."""
        count = self.settings.fedem_components
        if group == MIXTURE:
            return {"weights": torch.full((count,), 1 / count)}
        return initial_models(self.task, count)

    def update(self) -> Update:
        """Make an EM step; train the components for ``representation-epochs``."""
        shares = self.assign(self.losses())
        examples = self.train_examples
        rows = torch.arange(len(examples), device=examples.targets.device)
        numbered, loss, trained = replace(examples, targets=rows), 0.0, list[Tensors]()
        for m, share in enumerate(shares):
            self.load_component(m)
            how = self.settings.representation_epochs, self.settings
            objective = partial(self.weighted_loss, share)
            loss += train(self.model, "all", numbered, objective, *how)
            trained.append({n: t.clone() for n, t in self.model.tensors.items()})
        stacked = {n: torch.stack([t[n] for t in trained]) for n in trained[0]}
        return loss, within(COMPONENTS, stacked)

    def load_component(self, m: int) -> None:
        """Let ``model`` be a received component."""
        received = under(COMPONENTS, self.received).items()
        self.model.load({name: values[m] for name, values in received})

    def targets(self) -> Tensor:
        """Return the targets of the training examples, on the device."""
        return self.train_examples.targets.to(self._device)

    def each_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each target, in the shape of the targets."""
        return cross_entropy(outputs, targets, reduction="none")

    def weighted_loss(self, share: Tensor, outputs: Tensor, rows: Tensor) -> Tensor:
        """Return Σ q_m ℓ / n over the labelled targets of a batch.

        Parameters
        ----------
        share : Tensor, of the shape of all targets
            q_m.
        outputs : Tensor
            Outputs of h_m.
        rows : Tensor of int64, shape (batch,)
            Indices of the batch's examples.
        """
        targets = self.targets()[rows]
        total = (share[rows] * self.each_loss(outputs, targets)).sum()
        return total / (targets != IGNORED).sum().clamp(min=1)

    @torch.no_grad()
    def losses(self) -> Tensor:
        """Return the received components' losses of all training targets.

        Returns
        -------
        Tensor, shape (M, ...)
            For each component, in the shape of the targets.
        """
        examples = self.train_examples.without_augmentation().on(self._device)
        losses = list[Tensor]()
        for m in range(self.settings.fedem_components):
            self.load_component(m)
            self.model.eval()
            pairs = examples.batches(EVALUATION_BATCH)
            parts = [self.each_loss(self.model(x), y) for x, y in pairs]
            losses.append(torch.cat(parts))
        return torch.stack(losses)

    def assign(self, losses: Tensor) -> Tensor:
        """Return q of all targets (E-step); let π be its mean (M-step).

        Parameters
        ----------
        losses : Tensor, shape (M, ...)
            Losses of the M components, as from the method `losses`.
        """
        logarithms = self.saved[WEIGHTS].log().view(-1, *[1] * (losses.ndim - 1))
        shares = (logarithms - losses).softmax(0)
        self.saved[WEIGHTS] = shares[:, self.targets() != IGNORED].mean(1)
        return shares

    def personalize(self) -> None:
        """Fit π by ``newcomer-epochs`` EM steps."""
        losses = self.losses()
        for _ in range(self.settings.newcomer_epochs):
            self.assign(losses)

    def deployed_model(self) -> SplitModel:
        """Return the mixture as the head of a model without a representation."""
        components = list[SplitModel]()
        for m in range(self.settings.fedem_components):
            self.load_component(m)
            components.append(copy_sharing_frozen(self.model))
        return SplitModel(nn.Identity(), MixedModel(components, self.saved[WEIGHTS]))
