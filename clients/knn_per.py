"""kNN-Per (Marfoq et al., ICML 2022): nearest neighbours among the local features."""

from typing import Any

import torch
from torch import Tensor, nn

from flwr_frl.clients.base import needs_classes
from flwr_frl.clients.fedavg import FedAvgClient
from flwr_frl.common.settings import setting
from flwr_frl.task.examples import EVALUATION_BATCH, ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.local_training import features_of

# Number of candidates in addition to the neighbours.
EXTRA = 32


def neighbours(z: Tensor, stored: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the squared distances and the rows of the nearest stored features.

    Parameters
    ----------
    z : Tensor, shape (n, d)
        Features.
    stored : Tensor, shape (m, d)
        The features to search.
    count : int
        Number of neighbours, at most m.

    Returns
    -------
    Tensor, Tensor of int64, both of shape (n, count)
        In the order of the distances; equal ones in the order of the rows.
    """
    # Computed by inner products, distances take a tenth of the time, but small ones are
    # inexact. They select some more candidates than neighbours.
    centre = stored.mean(0)
    near, points = z - centre, stored - centre
    rough = torch.addmm(points.square().sum(1), near, points.T, alpha=-2)
    candidates = rough.sort(dim=1, stable=True).indices[:, : count + EXTRA]
    candidates = candidates.sort(dim=1).values
    exact = (z[:, None] - stored[candidates]).square().sum(2)
    distances, order = exact.sort(dim=1, stable=True)
    return distances[:, :count], candidates.gather(1, order[:, :count])


def feature_rows(features: Tensor, by_position: bool) -> Tensor:
    """Return a vector for each example, or for each of its positions."""
    return features.flatten(0, -2) if by_position else features.flatten(1)


class MixedHead(nn.Module):
    """A head that returns log(λ p_knn + (1 − λ) softmax(h)) for the model's head h.

    p_knn(y) is the share of class y among the k stored features nearest to the input's
    features z, each weighted by the kernel exp(−‖z − z'‖²/(σ d)). Equal distances are
    ordered by the index of the example.

    Parameters
    ----------
    head : nn.Module
        The model's head.
    stored : ExampleSet
        Features of the training examples, the datastore, with their classes. Negative
        classes, which cross-entropy ignores, are left out. If examples have a class at
        every position, so have the predictions.
    settings : object
        Settings of `KNNPerClient`: k, at most n, λ and σ.
    """

    def __init__(self, head: nn.Module, stored: ExampleSet, settings: Any) -> None:
        super().__init__()
        self.head, self.settings, targets = head, settings, stored.targets.flatten()
        self.by_position = stored.targets.ndim > 1
        features = feature_rows(stored.inputs, self.by_position)
        # Not in the state dict, so that clients with other examples are not stacked.
        self.features = nn.Buffer(features[targets >= 0], persistent=False)
        self.targets = nn.Buffer(targets[targets >= 0], persistent=False)

    def forward(self, z: Tensor) -> Tensor:
        """Return the logarithms of the mixed probabilities, at least 1e-30."""
        model = self.head(z).softmax(1)
        rows = torch.split(feature_rows(z, self.by_position), EVALUATION_BATCH)
        nearest = torch.cat([self.nearest(part, model.shape[1]) for part in rows])
        if self.by_position:
            nearest = nearest.reshape(*z.shape[:-1], -1).movedim(-1, 1)
        mixed: Tensor = torch.lerp(model, nearest, self.settings.knn_lambda)
        return mixed.clamp(min=1e-30).log()

    def nearest(self, z: Tensor, num_classes: int) -> Tensor:
        """Return p_knn, of shape (n, classes), of n features."""
        count = min(self.settings.knn_neighbours, len(self.targets))
        ordered, places = neighbours(z, self.features, count)
        # Normalised by the softmax, so that far neighbours do not underflow.
        shares: Tensor = (-ordered / (self.settings.knn_scale * z.shape[1])).softmax(1)
        probabilities = shares.new_zeros(len(z), num_classes)
        return probabilities.scatter_add_(1, self.targets[places], shares)


class KNNPerClient(FedAvgClient, requires=(needs_classes,), supports_example_dp=True):
    """FedAvg's client; the deployed model is mixed with nearest neighbours.

    The datastore holds the features of all training examples under the received
    representation and is rebuilt whenever a model is deployed, so that a client,
    sampled or not, keeps no state. A client that joins after training builds its
    datastore and trains nothing. A client without labelled training examples deploys
    the model alone.

    With ``dp-noise`` the training is private. The datastore and the deployed model are
    not, but never leave the device.

    Parameters
    ----------
    knn_neighbours : int, default 10
        Number k of neighbours; at most all training examples are used.
    knn_lambda : float, default 0.5
        Weight λ of the neighbours' prediction; 0 is the model alone. The paper has a λ
        for each client; here all have the same, as in the authors' scripts, which
        evaluate a grid of values.
    knn_scale : float, default 1
        Length scale σ of the kernel exp(−‖z − z'‖²/(σ d)) for d features, as in the
        authors' code; the paper has exp(−‖z − z'‖).
    """

    knn_neighbours: int = setting(10, ge=1)
    knn_lambda: float = setting(0.5, ge=0, le=1)
    knn_scale: float = setting(1.0, gt=0)

    def deployed_model(self) -> SplitModel:
        """Return the model with a `MixedHead`."""
        if self.settings.knn_lambda == 0 or not self.task.train_examples(self._index):
            return self.model
        examples = self.train_examples.without_augmentation()
        stored = features_of(self.model.eval(), examples, self.settings)
        head = MixedHead(self.model.head, stored, self.settings)
        mixed = SplitModel(self.model.representation, head)
        return mixed if len(head.targets) else self.model
