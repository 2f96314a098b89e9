"""Training on a custom objective, and features of the training examples by class."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flwr_frl.clients.base import Client
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.local_training import evaluate, features_of
from flwr_frl.task.training.sgd import SGD, Optimizer, freeze, loop

# Maps a batch's inputs and targets to its loss, and to the value that is minimised.
Objective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def minimise(
    client: Client,
    objective: Objective,
    epochs: int,
    optimizers: Sequence[Optimizer] = (),
    model: SplitModel | None = None,
    sgd: SGD | None = None,
) -> float:
    """Train on an objective for which `Client.train` has no argument.

    Parameters
    ----------
    client : Client
        Its training examples are used.
    objective : callable
        Maps a batch to its loss, which is reported, and to the objective.
    epochs : int
        Passes over the examples.
    optimizers : sequence of optimizer, optional
        By default one for the whole model.
    model : SplitModel, optional
        The model that is trained, by default that of the client.
    sgd : SGD, optional
        Hyper-parameters, by default the client's settings.

    Returns
    -------
    float
        Mean loss over the last epoch.
    """
    model = client.model if model is None else model
    hyper = client.settings if sgd is None else sgd
    each = optimizers or [hyper.optimizer(freeze(model, "all"))]

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        for optimizer in each:
            optimizer.zero_grad()
        with hyper.autocast():
            loss, value = objective(inputs, targets)
        if value.requires_grad:  # A representation may have no parameters.
            value.backward()  # type: ignore[no-untyped-call]
        for optimizer in each:
            optimizer.step()
        return loss.detach()

    return loop(step, client.train_examples, epochs, hyper, model)


def received_loss(client: Client) -> float:
    """Return the model's mean loss on all training examples, before it is trained."""
    examples = client.train_examples.without_augmentation()
    return evaluate(client.model, examples, client.task.loss)[0]


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


def class_counts(client: Client, classes: int) -> Tensor:
    """Return the client's number of training examples of each class."""
    targets = client.task.train_examples(client._index).targets
    # Cross-entropy ignores negative targets.
    return torch.bincount(targets[targets >= 0], minlength=classes)


def for_each_class(values: Tensor, outputs: Tensor) -> Tensor:
    """Return a value of each class in a shape that can be added to outputs.

    The outputs of a sequence have shape (n, classes, time).
    """
    return values.reshape(-1, *[1] * (outputs.ndim - 2))


def class_means(
    features: Tensor, targets: Tensor, classes: int
) -> tuple[Tensor, Tensor]:
    """Return each class's mean feature, 0 without examples, and number of examples."""
    counts = torch.bincount(targets, minlength=classes)
    sums = features.new_zeros(classes, features.shape[1])
    sums.index_add_(0, targets, features)
    return sums / counts.clamp(min=1).unsqueeze(1), counts


def no_means(head: nn.Linear) -> dict[str, Tensor]:
    """Return the means and counts of classes without examples, for a linear head."""
    classes, width = head.weight.shape
    counts = torch.zeros(classes, dtype=torch.int64)
    return {"means": torch.zeros(classes, width), "counts": counts}
