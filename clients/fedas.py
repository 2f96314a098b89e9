"""FedAS (Yang et al., CVPR 2024): parameter alignment and client synchronisation."""

import torch
from torch import Tensor

from flwr_frl.clients.base import Client, linear_head, needs_classes, on_copy
from flwr_frl.clients.device.groups import HEAD, Tensors
from flwr_frl.clients.device.training import minimise, no_means
from flwr_frl.clients.fedproto import own_prototypes
from flwr_frl.common.messages import FISHER_TRACE, PROTOTYPE_COUNTS, PROTOTYPES
from flwr_frl.common.settings import setting
from flwr_frl.task.devices import differentiable
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.sgd import SGD, freeze


class FedASClient(Client, requires=(needs_classes, linear_head("FedAS"))):
    """Head and prototypes are personal, the representation is shared.

    Before local training the received representation is aligned to the client: it
    trains towards the mean features that the client's last local model has of each
    class. Then the whole model trains for ``representation-epochs``.

    The authors' code keeps the last local model and computes the class means from it in
    the next round. Here they are computed and saved at the end of the round, which
    gives the same numbers while the data stay the same. As in that code, the loss of a
    batch is the sum over its classes of the mean squared difference, and the trace is
    the sum, over batches, of the squared norm of the gradient of a batch's mean loss.
    Its batches for the alignment have 16 examples; here they have ``batch-size``.

    The deployed model is the received representation, aligned, with the client's head.
    A client that is not sampled keeps head and prototypes. Before its first training it
    deploys the received representation as it is.

    Parameters
    ----------
    fedas_learning_rate : float, default 0.01
        Learning rate of the parameter alignment, which has neither momentum nor weight
        decay; 0 omits the alignment.
    fedas_epochs : int, default 1
        Epochs of the parameter alignment. Both defaults are those of the authors' code.
    """

    shared = "representation"
    personal = (HEAD, "prototypes.")
    fedas_learning_rate: float = setting(0.01, ge=0)
    fedas_epochs: int = setting(1, ge=0)

    def initial_group(self, group: str) -> Tensors:
        """Return zeros, as there are no prototypes yet."""
        return no_means(self.model.linear_head("FedAS"))

    def update(self) -> float:
        """Align the representation, train the model, and add the Fisher trace."""
        self.align()
        loss = self.train("all", self.settings.representation_epochs)
        self.saved |= own_prototypes(self)
        self.metrics[FISHER_TRACE] = self.fisher_trace()
        return loss

    def personalize(self) -> None:
        """Train the head for ``newcomer-epochs``, without prototypes."""
        self.train("head", self.settings.newcomer_epochs)

    def align(self) -> None:
        """Train the representation towards the prototypes, if there are any."""
        means = self.saved[PROTOTYPES]
        has_prototype = self.saved[PROTOTYPE_COUNTS] > 0
        rate, model = self.settings.fedas_learning_rate, self.model
        has_examples = len(self.task.train_examples(self._index)) > 0
        if not (rate and has_prototype.any() and has_examples):
            return
        batch, bfloat16 = self.settings.batch_size, self.settings.bfloat16
        sgd = SGD(rate, 0.0, 0.0, batch_size=batch, bfloat16=bfloat16)

        def objective(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            features = model.representation(inputs).flatten(0, -2)
            loss = alignment_loss(features, targets.flatten(), means, has_prototype)
            return loss, loss

        optimizer = sgd.optimizer(freeze(model, "representation"))
        minimise(self, objective, self.settings.fedas_epochs, [optimizer], sgd=sgd)

    def fisher_trace(self) -> float:
        """Return the trace of the empirical Fisher information of the whole model."""
        model = self.model.requires_grad_(True).eval()
        examples = self.train_examples.without_augmentation()
        total = 0.0
        for inputs, targets in examples.batches(self.settings.batch_size):
            # Cross-entropy ignores negative targets.
            if not (targets >= 0).any():
                continue
            parameters = list(model.parameters())
            with differentiable(model):
                with self.settings.autocast():
                    loss = self.task.loss(model(inputs), targets)
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            total += sum(float(g.square().sum()) for g in gradients if g is not None)
        return total

    def deployed_model(self) -> SplitModel:
        """Return the received representation, aligned, with the client's head."""
        with on_copy(self) as client:
            client.align()
        return client.model


def alignment_loss(
    features: Tensor, targets: Tensor, means: Tensor, known: Tensor
) -> Tensor:
    """Return the sum over classes of the mean squared distance to the prototype.

    Parameters
    ----------
    features : Tensor, shape (n, width)
        Features of a batch.
    targets : Tensor, shape (n,)
        Their classes; negative ones are ignored.
    means : Tensor, shape (classes, width)
        The prototypes.
    known : Tensor of bool, shape (classes,)
        Classes that have a prototype.
    """
    place = targets.clamp(min=0)
    counted = (known[place] & (targets >= 0)).to(features.dtype)
    in_class = features.new_zeros(len(means)).index_add(0, place, counted)
    squares = (features - means[place]).square().mean(1)
    return (counted * squares / in_class[place].clamp(min=1)).sum()
