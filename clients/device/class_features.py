"""Features of a client's training examples, and their means by class."""

import torch
from torch import Tensor

from flwr_frl.clients.base import Client
from flwr_frl.task.training.calls import features_of


def labelled_features(client: Client) -> tuple[Tensor, Tensor]:
    """Return the features and classes of a client's training examples.

    Inputs are not augmented. Examples with a negative target, which cross-entropy
    ignores, are left out.

    Returns
    -------
    features : Tensor, shape (n, width)
        Output of the representation in evaluation mode.
    targets : Tensor, shape (n,)
        Classes.
    """
    examples = client.train_examples.without_augmentation()
    pairs = features_of(client.model.eval(), examples, client.settings)
    features, targets = pairs.inputs.flatten(0, -2).float(), pairs.targets.flatten()
    return features[targets >= 0], targets[targets >= 0]


def class_means(
    features: Tensor, targets: Tensor, classes: int
) -> tuple[Tensor, Tensor]:
    """Return each class's mean feature, 0 without examples, and number of examples."""
    counts = torch.bincount(targets, minlength=classes)
    sums = features.new_zeros(classes, features.shape[1])
    sums.index_add_(0, targets, features)
    return sums / counts.clamp(min=1).unsqueeze(1), counts
