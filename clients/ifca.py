"""IFCA (Ghosh et al., NeurIPS 2020): each client trains the model that fits it best."""

from math import inf, isnan

import torch

from flwr_frl.clients.base import Client
from flwr_frl.clients.device.groups import WHOLE, Tensors, under
from flwr_frl.common.messages import CLUSTER, CLUSTERS
from flwr_frl.common.run_cache import run_cache
from flwr_frl.common.settings import setting
from flwr_frl.task.base import Task
from flwr_frl.task.devices import seeded
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.frozen import new_model
from flwr_frl.task.training.local_training import evaluate

# Distinguishes the seeds of the clusters' initial models from others.
STARTS = 0x1FCA


class IFCAClient(Client):
    """Algorithm 1, client side: choose ĵ = argmin_j F_i(θ_j), and train θ_ĵ.

    F_i is the mean loss over all training examples, without augmentation. The deployed
    model is chosen in the same way, with the current models; a client without training
    examples deploys the first one. Among equal losses the first cluster is chosen.

    In the authors' code for MNIST and CIFAR-10, test data are predicted by the model
    with the least loss on them; that for FEMNIST chooses by the training data, as here.
    That for CIFAR-10 chooses on augmented images.

    Parameters
    ----------
    num_clusters : int, default 4
        Number k of clusters, as for the strategy.
    """

    shared = (CLUSTERS,)
    sent = WHOLE
    num_clusters: int = setting(4, ge=1)

    def initial_group(self, group: str) -> Tensors:
        """Return the initial models of all clusters, stacked."""
        return initial_models(self.task, self.settings.num_clusters)

    def update(self) -> float:
        """Choose a cluster, and train its model for ``representation-epochs``."""
        self.metrics[CLUSTER] = self.choose()
        return self.train("all", self.settings.representation_epochs)

    def choose(self) -> int:
        """Load the model with the least loss, and return its cluster."""
        clusters, losses = self.settings.num_clusters, [0.0]
        if clusters > 1 and len(self.task.train_examples(self._index)):
            losses = [self._loss_of(cluster) for cluster in range(clusters)]
        chosen = losses.index(min(losses))
        self._load(chosen)
        return chosen

    def _loss_of(self, cluster: int) -> float:
        self._load(cluster)
        examples = self.train_examples.without_augmentation()
        loss, _ = evaluate(self.model, examples, self.task.loss)
        return inf if isnan(loss) else loss

    def _load(self, cluster: int) -> None:
        models = under(CLUSTERS, self.received)
        self.model.load({name: values[cluster] for name, values in models.items()})

    def deployed_model(self) -> SplitModel:
        """Return the model with the least loss on the training examples."""
        self.choose()
        return self.model


@run_cache(maxsize=4)
def initial_models(task: Task, count: int) -> Tensors:
    """Return the initial models of ``count`` clusters, stacked along the first axis.

    The first is the task's. In the others all layers are initialised anew, even if the
    first has pretrained weights; layers without ``reset_parameters`` start equal.
    """
    states = [task.initial_state]
    for number in range(1, count):
        model = new_model(task)
        seed = (STARTS + 7919 * (getattr(task, "seed", 0) or 0)) * number
        # Seeds have 64 bits.
        with seeded(seed % 2**63):
            for module in model.modules():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
        states.append(model.state_dict())
    return {name: torch.stack([s[name] for s in states]) for name in states[0]}
