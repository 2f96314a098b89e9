"""GPFL (Zhang et al., ICCV 2023): global and personalised features side by side."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize, relu

from flwr_frl.clients.base import Client, Update, linear_head, needs_classes
from flwr_frl.clients.device.groups import HEAD, REPRESENTATION, Tensors, under, within
from flwr_frl.clients.device.training import class_counts, minimise
from flwr_frl.common.settings import setting
from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import IGNORED
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.sgd import freeze

EMBEDDING, VALVE, SHARES = "embedding.", "valve.", "shares."


class ConditionalValve(nn.Module):
    """The conditional valve: ReLU((1 + γ(c)) ⊙ z + β(c)) of features z, given c.

    γ and β are each a linear layer, a ReLU and a layer norm.

    Parameters
    ----------
    width : int
        Width of z and c.
    dtype : torch.dtype
        Type of the parameters.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()

        def affine() -> nn.Sequential:
            layer = nn.Linear(width, width, dtype=dtype)
            return nn.Sequential(layer, nn.ReLU(), nn.LayerNorm(width, dtype=dtype))

        self.gamma, self.beta = affine(), affine()

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        """Return features of the same shape."""
        return relu((1 + self.gamma(condition)) * features + self.beta(condition))


class ValvedHead(nn.Module):
    """A head behind the valve.

    Parameters
    ----------
    valve : ConditionalValve
        The valve.
    condition : Tensor, shape (width,)
        Its conditional input.
    head : nn.Module
        The head.
    """

    def __init__(
        self, valve: ConditionalValve, condition: Tensor, head: nn.Module
    ) -> None:
        super().__init__()
        self.valve, self.head = valve, head
        self.condition = nn.Buffer(condition)

    def forward(self, features: Tensor) -> Tensor:
        """Return the outputs."""
        outputs: Tensor = self.head(self.valve(features, self.condition))
        return outputs


class GPFLClient(Client, requires=(needs_classes, linear_head("GPFL"))):
    """Client side: representation, embeddings and valve are shared, the head personal.

    The valve turns features z into global ones, z_G, given the mean g of the category
    embeddings e_k, and into personalised ones, z_P, given p_i, their mean weighted by
    the client's class proportions. Both conditions are computed from the received
    embeddings. The loss is the sum of the head's loss on z_P, the cross-entropy of the
    cosine similarities of z_G with all e_k, and λ mean ‖z_G − e_y‖ with frozen received
    embeddings. The deployed model is the head behind the valve, given p_i.

    A client that is not sampled keeps its head; one that has not trained has the
    initial head. The authors' code differs from the paper. The paper is followed in
    two points:

    - p_i and g are those of the received embeddings. The code uses the embeddings that
      the client had before, and zeros in the first round;
    - the distance is a mean of norms. In the code it is the norm of the differences of
      a whole batch, which is √B times the mean for B equal distances. The authors' λ of
      0.01 was chosen for that norm; for batches of 10, it is about 0.03 here.

    The code is followed in two others: p_i is not divided by the number of classes,
    unlike in (7), and embeddings and valve have weight decay instead of the norms
    of (11). Biases do not decay, unlike in both.

    Parameters
    ----------
    gpfl_lambda : float, default 0.01
        λ of the mean distance of global features to the embeddings of their classes.
    gpfl_mu : float, default 0.1
        μ, the weight decay of category embeddings and valve; biases do not decay. Both
        defaults are the authors' values for their small CNN.
    """

    shared = (REPRESENTATION, EMBEDDING, VALVE)
    personal = (HEAD, SHARES)
    gpfl_lambda: float = setting(0.01, ge=0)
    gpfl_mu: float = setting(0.1, ge=0)

    def initial_group(self, group: str) -> Tensors:
        """Return shares of 0; draw embeddings and valve from the task's seed."""
        if group == SHARES:
            return {"value": torch.zeros(self.model.linear_head("GPFL").out_features)}
        embedding, valve = self.drawn()
        return valve.state_dict() if group == VALVE else {"weight": embedding}

    def drawn(self) -> tuple[Tensor, ConditionalValve]:
        """Return embeddings and a valve drawn with the task's seed."""
        like = self.model.linear_head("GPFL").weight
        with seeded(getattr(self.task, "seed", 0) or 0):
            embedding = torch.randn(like.shape, dtype=like.dtype)
            return embedding, ConditionalValve(like.shape[1], like.dtype)

    def update(self) -> Update:
        """Train all parts for ``representation-epochs``."""
        settings, model = self.settings, self.model
        self.saved[f"{SHARES}value"] = self.class_shares()
        frozen = self.received[f"{EMBEDDING}weight"]
        valve, condition = self.valve(), self.condition()
        embedding = nn.Parameter(frozen.clone())
        shared = nn.ModuleDict({"valve": valve})
        shared.register_parameter("embedding", embedding)
        decayed = replace(settings, weight_decay=settings.gpfl_mu)
        pair = settings.optimizer(freeze(model, "all")), decayed.optimizer(shared)

        def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            features = model.representation(inputs)
            outputs = model.head(valve(features, condition))
            loss, y = self.task.loss(outputs, targets), targets.flatten()
            z = valve(features, frozen.mean(0)).flatten(0, -2)
            cosines = linear(normalize(z), normalize(embedding))
            # The task's loss may ignore other negative targets than torch's does.
            value = loss + cross_entropy(cosines, y.masked_fill(y < 0, IGNORED))
            away = (z - frozen[y.clamp(min=0)])[y >= 0]
            distance = torch.linalg.vector_norm(away, dim=1).mean()
            return loss, value + settings.gpfl_lambda * distance

        loss = minimise(self, objective, settings.representation_epochs, pair)
        others = {**within(VALVE, valve.state_dict()), f"{EMBEDDING}weight": embedding}
        return loss, {**model.state_dict(), **others}

    def valve(self) -> ConditionalValve:
        """Return the received valve."""
        _, valve = self.drawn()
        valve.load_state_dict(under(VALVE, self.received))
        return valve.to(self._device)

    def class_shares(self) -> Tensor:
        """Return the share of each class in the training examples.

        Without examples, return the saved shares, or equal shares if none are saved.
        """
        classes = self.model.linear_head("GPFL").out_features
        counts = class_counts(self, classes).float()
        if not counts.any():
            saved = self.saved[f"{SHARES}value"]
            return saved if saved.any() else torch.full_like(saved, 1 / classes)
        return (counts / counts.sum()).to(self._device)

    def condition(self) -> Tensor:
        """Return p_i, the received embeddings' mean weighted by the saved shares."""
        shares = self.saved[f"{SHARES}value"]
        # A client that has not trained yet computes them from its examples.
        shares = shares if shares.any() else self.class_shares()
        embedding = self.received[f"{EMBEDDING}weight"]
        return shares.to(embedding.dtype) @ embedding

    def deployed_model(self) -> SplitModel:
        """Return the model with the valve, conditioned on p_i, before its head."""
        head = ValvedHead(self.valve(), self.condition(), self.model.head)
        return SplitModel(self.model.representation, head)
