"""FedProto (Tan et al., AAAI 2022): prototypes instead of weights."""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from flwr.common import NDArrays
from torch import Tensor, nn

from flwr_frl.clients.base import Client, Update, linear_head, needs_classes
from flwr_frl.clients.device.architectures import OwnArchitectureClient
from flwr_frl.clients.device.groups import WHOLE, Config, EvaluateResult, Tensors
from flwr_frl.clients.device.training import class_means, labelled_features, no_means
from flwr_frl.common.messages import PROTOTYPE_COUNTS, PROTOTYPES
from flwr_frl.common.settings import setting
from flwr_frl.task.models import SplitModel

CLASSES = "classes."
OWN_CLASSES = f"{CLASSES}own"
# Larger than any squared distance to a prototype, whose entries are at most 1e6.
FAR = 1e30


@dataclass(frozen=True)
class NearPrototypes:
    """λ mean ‖z − C̄_y‖² over a batch's examples and the features' entries.

    The mean over entries follows the authors' code. Classes without a prototype
    contribute nothing.

    Parameters
    ----------
    weight : float
        λ (equation 7).
    means : Tensor, shape (classes, width)
        The prototypes C̄.
    known : Tensor of bool, shape (classes,)
        Classes that have a prototype.
    """

    weight: float
    means: Tensor
    known: Tensor

    def __call__(self, features: Tensor, targets: Tensor, model: SplitModel) -> Tensor:
        """Return the term, a scalar."""
        # Cross-entropy ignores negative targets.
        place = targets.clamp(min=0)
        near = (self.known[place] & (targets >= 0)).unsqueeze(-1)
        return self.weight * ((features - self.means[place]).square() * near).mean()


def near_received(client: Client, weight: float) -> NearPrototypes | None:
    """Return the distance to a client's received prototypes, times a weight."""
    means, counts = client.received[PROTOTYPES], client.received[PROTOTYPE_COUNTS]
    return NearPrototypes(weight, means, counts > 0) if weight else None


def own_prototypes(client: Client) -> Tensors:
    """Return the mean feature and the number of a client's examples of each class."""
    classes = client.model.linear_head(type(client).__name__).out_features
    means, counts = class_means(*labelled_features(client), classes)
    return {PROTOTYPES: means, PROTOTYPE_COUNTS: counts}


class FedProtoClient(
    OwnArchitectureClient, requires=(needs_classes, linear_head("FedProto", bias=True))
):
    """Algorithm 1, client side: the model is personal; architectures may differ.

    The loss is L_S + λ mean ‖z − C̄_y‖² (equation 7). A local prototype C_j is the mean
    feature of the examples of class j after training (equation 3); the authors' code
    averages the features of the last epoch's steps. The prediction is the class with
    the nearest prototype, among the client's classes unless ``fedproto-predicted`` is
    ``"all"``. The client's classes are saved, so that prediction needs no training
    examples.

    Parameters
    ----------
    fedproto_lambda : float, default 1
        λ of the distance to the prototypes (equation 7); 0 is local training.
    fedproto_predicted : {"own", "all"}, default "own"
        Classes that a client predicts: those of its training examples, as in the
        authors' code, or all classes with a prototype.
    """

    shared = "prototypes"
    personal = (*WHOLE, CLASSES)
    fedproto_lambda: float = setting(1.0, ge=0)
    fedproto_predicted: Literal["own", "all"] = setting("own")

    @property
    def head(self) -> nn.Linear:
        """The head."""
        return self.model.linear_head("FedProto")

    def initial_group(self, group: str) -> Tensors:
        """Return zeros, as there are no prototypes and no saved classes yet."""
        if group == CLASSES:
            return {"own": torch.zeros(self.head.out_features, dtype=torch.bool)}
        return no_means(self.head)

    def update(self) -> Update:
        """Train towards the prototypes C̄; send the local prototypes C_j."""
        near = near_received(self, self.settings.fedproto_lambda)
        loss = self.train("all", self.settings.representation_epochs, near)
        self.saved[OWN_CLASSES] = self._class_mask()[0]
        return loss, own_prototypes(self)

    def evaluate(self, parameters: NDArrays, config: Config) -> EvaluateResult:
        """Test by prototypes; the loss and metrics with ``-head`` are from the head."""
        self._receive(parameters, config)
        loss, num_examples, metrics = self._test(self.model)
        _, _, nearest = self._test(self.deployed_model())
        for name in ("accuracy", *self.task.metrics):
            if name in nearest:
                metrics |= {f"{name}-head": metrics[name], name: nearest[name]}
        return loss, num_examples, metrics

    @torch.no_grad()
    def deployed_model(self) -> SplitModel:
        """Return the model with a head that selects the nearest prototype.

        −‖z − C‖² equals 2 C z − ‖C‖² up to a term that all classes share. Without any
        prototype, the trained head remains.
        """
        means, has_mean = self.received[PROTOTYPES], self.received[PROTOTYPE_COUNTS] > 0
        if self.settings.fedproto_predicted == "own":
            has_mean = has_mean & self.own_classes()
        if not has_mean.any():
            return self.model
        # A copy, as the head may share its weights with the representation.
        head = copy.deepcopy(self.head)
        head.weight.copy_(2 * means)
        far = means.new_full((), -FAR)
        head.bias.copy_(torch.where(has_mean, -means.square().sum(1), far))
        return SplitModel(self.model.representation, head)

    def own_classes(self) -> Tensor:
        """Return the mask of the classes that the client trains on.

        A client that has never trained derives it from its examples; if it has none,
        the mask contains all classes.
        """
        mask = self.saved[OWN_CLASSES]
        if not mask.any():
            mask = self._class_mask()[0]
        return mask if mask.any() else torch.ones_like(mask)
