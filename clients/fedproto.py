"""FedProto (Tan et al., AAAI 2022): prototypes instead of weights."""

from dataclasses import dataclass
from typing import Annotated

import torch
from flwr.common import NDArrays
from torch import Tensor, nn

from flwr_frl.clients.base import Client, Config, Evaluation, Reply, TrainingSettings
from flwr_frl.clients.device.evaluation import class_mask
from flwr_frl.clients.device.parameter_groups import WHOLE, Tensors
from flwr_frl.task.base import Task
from flwr_frl.task.messages import PROTOTYPE_COUNTS, PROTOTYPES
from flwr_frl.task.models import SplitModel
from flwr_frl.task.settings import Choice, Free, Range, Settings, SettingsError
from flwr_frl.task.training import features_of

SLOT, CLASSES = "prototypes.", "classes."
OWN_CLASSES = f"{CLASSES}own"
# Further away than any prototype.
FAR = 1e9


@dataclass(frozen=True)
class FedProtoSettings(TrainingSettings):
    """Settings of FedProto's clients.

    Parameters
    ----------
    fedproto_lambda : float, default 1
        λ of the distance to the prototypes (equation 7); 0 is local training.
    fedproto_predicted : {"own", "all"}, default "own"
        Which classes a client predicts: those of its training examples, as the authors'
        code does, or all that have a prototype.
    client_models : str, default ""
        The clients' models in simulation, by client and from the first again after the
        last: ``"mlp resnet20"`` gives every second one a ResNet. Their features must be
        of the same width. A device has ``model`` in its node config.
    """

    fedproto_lambda: Annotated[float, Range("[0, inf)")] = 1.0
    fedproto_predicted: Annotated[str, Choice("own", "all")] = "own"
    client_models: Annotated[str, Free("models' names")] = ""


@dataclass(frozen=True)
class NearPrototypes:
    """λ mean ‖z − C̄_y‖² over a batch's examples and the features' entries.

    The mean over entries is the authors' code's. Classes without a prototype have no
    distance.

    Parameters
    ----------
    weight : float
        λ (equation 7).
    means : Tensor, shape (classes, width)
        The prototypes C̄.
    known : Tensor of bool, shape (classes,)
        Which classes have one.
    """

    weight: float
    means: Tensor
    known: Tensor

    def __call__(self, features: Tensor, targets: Tensor, model: SplitModel) -> Tensor:
        """Return the term, a scalar."""
        # What cross-entropy ignores is of no class.
        place = targets.clamp(min=0)
        near = (self.known[place] & (targets >= 0)).unsqueeze(-1)
        distances = (features - self.means[place]).square() * near
        return self.weight * distances.mean()


class FedProtoClient(Client):
    """Algorithm 1, client side: the model stays here, whatever it is.

    The loss is L_S + λ mean ‖z − C̄_y‖² (equation 7). A local prototype C_j is the mean
    feature of the examples of class j (equation 3). Predicted is the class with the
    nearest prototype, of the client's own classes unless ``fedproto-predicted`` is
    ``"all"``. They are kept, so that prediction needs no training examples.
    """

    shared = (SLOT,)
    personal = (*WHOLE, CLASSES)
    settings_type = FedProtoSettings
    settings: FedProtoSettings
    needs_classes = True
    node_settings = (*Client.node_settings, "model", "model-head", "head-layers")

    @classmethod
    def own_settings(cls, settings: Settings, node: Settings) -> Settings:
        """Add the model that ``client-models`` has for a simulated client."""
        own = super().own_settings(settings, node)
        models = str(settings.get("client-models", "")).split()
        if not models or "partition-id" not in node:
            return own
        return {"model": models[int(node["partition-id"]) % len(models)], **own}

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Refuse heads that cannot tell the nearest prototype."""
        super().check_task(task)
        if task.scratch_model.linear_head("FedProto").bias is None:
            raise SettingsError("it needs a head with a bias; this one has none")

    @property
    def head(self) -> nn.Linear:
        """The head."""
        return self.model.linear_head("FedProto")

    def initial_group(self, slot: str) -> Tensors:
        """Return no prototype of any class, and no own classes."""
        classes, width = self.head.weight.shape
        if slot == CLASSES:
            return {"own": torch.zeros(classes, dtype=torch.bool)}
        empty = {
            PROTOTYPES: torch.zeros(classes, width),
            PROTOTYPE_COUNTS: torch.zeros(classes, dtype=torch.int64),
        }
        return {name.removeprefix(SLOT): value for name, value in empty.items()}

    def structure(self) -> list[object]:
        """Name the classes as well, which are the prototypes'."""
        return [*super().structure(), self.task.classes]

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Train near the prototypes for ``representation-epochs``; send one's own."""
        self.receive(parameters, config)
        own, near = self.settings, None
        if own.fedproto_lambda:
            means, counts = self.received[PROTOTYPES], self.received[PROTOTYPE_COUNTS]
            near = NearPrototypes(own.fedproto_lambda, means, counts > 0)
        loss = self.train("all", own.representation_epochs, near)
        self.saved[OWN_CLASSES] = class_mask(self.task, self.index, self.head)[0]
        self.save(config)
        return self.send_arrays(self.prototypes(), loss)

    def prototypes(self) -> Tensors:
        """Return the mean feature of each class, and how many examples it is of."""
        examples = self.train_examples.without_augmentation()
        found = features_of(self.model.eval(), examples, self.settings)
        features, targets = found.inputs.flatten(0, -2), found.targets.flatten()
        features, targets = features[targets >= 0], targets[targets >= 0]
        counts = torch.bincount(targets, minlength=self.head.out_features)
        sums = torch.zeros_like(self.received[PROTOTYPES])
        sums.index_add_(0, targets, features.to(sums.dtype))
        means = sums / counts.clamp(min=1).unsqueeze(1)
        return {PROTOTYPES: means, PROTOTYPE_COUNTS: counts}

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Test by prototypes; loss and ``accuracy-head`` are those of the own head.

        So is ``-head`` of the task's own metrics.
        """
        self.receive(parameters, config)
        loss, num_examples, metrics = self.test(self.model)
        _, _, nearest = self.test(self.deployed_model())
        for name in ("accuracy", *self.task.metrics):
            if name in nearest:
                metrics |= {f"{name}-head": metrics[name], name: nearest[name]}
        return loss, num_examples, metrics

    @torch.no_grad()
    def deployed_model(self) -> SplitModel:
        """Return the model with a head that says which prototype is nearest.

        −‖z − C‖² is 2 C z − ‖C‖², and what is the same for all classes. Without any
        prototype the head is the own one.
        """
        means, known = self.received[PROTOTYPES], self.received[PROTOTYPE_COUNTS] > 0
        if self.settings.fedproto_predicted == "own":
            known = known & self.own_classes()
        if known.any():
            self.head.weight.copy_(2 * means)
            far = means.new_full((), -FAR)
            self.head.bias.copy_(torch.where(known, -means.square().sum(1), far))
        return self.model

    def own_classes(self) -> Tensor:
        """Return which classes the client trains on; all if there are no examples.

        A client that has never trained has kept none, and looks at its examples.
        """
        own = self.saved[OWN_CLASSES]
        if not own.any():
            own = class_mask(self.task, self.index, self.head)[0]
        return own if own.any() else torch.ones_like(own)
