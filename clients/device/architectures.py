"""Clients whose models may differ in architecture; some also share a small one."""

import copy
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, softmax

from flwr_frl.clients.base import Client, Config
from flwr_frl.clients.device.groups import WHOLE, Groups, Tensors, under, within
from flwr_frl.clients.device.training import Objective, minimise
from flwr_frl.common.errors import SettingsError, require
from flwr_frl.common.messages import MODEL
from flwr_frl.common.run_cache import TASKS_AT_A_TIME, run_cache
from flwr_frl.common.settings import setting
from flwr_frl.task.base import Task
from flwr_frl.task.devices import seeded
from flwr_frl.task.models import SplitModel
from flwr_frl.task.tasks.image import PartitionedTask
from flwr_frl.task.training.cohort import scratch_model
from flwr_frl.task.training.sgd import freeze

SMALL, LINK = "small.", "link."


class OwnArchitectureClient(Client):
    """A client whose personal model may have another architecture than the others'.

    Parameters
    ----------
    client_models : str, default ""
        Models of the simulated clients, assigned in turn: with ``"mlp resnet20"``,
        every second client has a ResNet. The arrays that clients share must have the
        same shapes.
    model_, head_layers
        As of the task. A device may set them in its node config.
    """

    client_models: str = setting("", form="models' names", safe=True)
    model_: str = setting("", form="a model's name", per_device=True)
    head_layers: int = setting(0, ge=0, per_device=True)

    def get_properties(self, config: Config) -> Config:
        """Add the name of the client's model, if models may differ."""
        properties = super().get_properties(config)
        name = getattr(self.task, "model_name", "")
        may_differ = self.settings.client_models or self._own_data
        return {**properties, MODEL: name} if name and may_differ else properties


class SmallModelClient(OwnArchitectureClient):
    """A client that keeps its model, and shares a small one of equal architecture.

    Parameters
    ----------
    shared_model : str, default ""
        The small model, the same for all clients. By default it is the first one of
        ``client-models``, or else the model of the task.
    """

    shared: Groups = (SMALL,)
    personal: Groups = WHOLE
    shared_model: str = setting("", form="a model's name", safe=True)

    @property
    def small_task(self) -> Task:
        """The task with the small model."""
        first = (*self.settings.client_models.split(), "")[0]
        return with_model(self.task, self.settings.shared_model or first)

    def initial_group(self, group: str) -> Tensors:
        """Return the initial small model, or the personal layer of a subclass."""
        linked = group == LINK
        return self.link().state_dict() if linked else self.small_task.initial_state

    def link(self) -> nn.Linear:
        """Return the layer that links the features of both models, if there is one."""
        raise NotImplementedError

    def small_model(self) -> SplitModel:
        """Return the received small model."""
        model = scratch_model(self.small_task)
        model.load(under(SMALL, self.received))
        return model

    def widths(self, algorithm: str) -> tuple[int, int]:
        """Return the numbers of features of the small model and of the client's."""
        small, own = self.small_task.scratch_model, self.task.scratch_model
        heads = small.linear_head(algorithm), own.linear_head(algorithm)
        return heads[0].in_features, heads[1].in_features

    def layer(self, inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
        """Return the saved layer; its initial values are drawn with the task's seed."""
        with seeded(getattr(self.task, "seed", 0) or 0):
            layer = nn.Linear(inputs, outputs, bias).to(self._device)
        if saved := under(LINK, self.saved):
            layer.load_state_dict(saved)
        return layer

    def train_both(
        self, objective: Objective, small: SplitModel, *others: nn.Module
    ) -> tuple[float, Tensors]:
        """Train both models, and other modules, for ``representation-epochs``.

        Returns the training loss and the small model.
        """
        trained = *(freeze(model, "all") for model in (self.model, small)), *others
        optimizers = [self.settings.optimizer(module) for module in trained]
        # Batch norms of either model may refuse a last batch of one example.
        first = self.train_examples.on(self._device).first(1)
        model = small if small.refuses_one(first) else self.model
        epochs = self.settings.representation_epochs
        loss = minimise(self, objective, epochs, optimizers, model)
        return loss, within(SMALL, small.state_dict())


@run_cache(maxsize=TASKS_AT_A_TIME)
def with_model(task: Task, name: str) -> Task:
    """Return a task with an additional model: a built-in one, or that of the task.

    Raises `SettingsError` if the task cannot build a model of that name.
    """
    other = copy.copy(task)
    other.forget_model()
    if name:
        allowed = "'' for a task whose model has no name"
        require(isinstance(other, PartitionedTask), "shared-model", name, allowed)
        # Pretrained weights are those of the clients' models.
        plain = replace(vars(task)["settings"], weights="")
        vars(other).update(model_name=name, settings=plain)
    try:
        _ = other.scratch_model
    except SettingsError as error:
        raise SettingsError(f"shared-model {name!r}: {error}", "shared-model") from None
    return other


def divergence(outputs: Tensor, others: Tensor) -> Tensor:
    """Return the mean over a batch of KL(p' ‖ p), for the softmax p of outputs.

    Parameters
    ----------
    outputs, others : Tensor, shape (batch, classes) or (batch, classes, time)
        Outputs of the model with probabilities p, and of that with p'.
    """
    target = softmax(others, 1)
    return kl_div(log_softmax(outputs, 1), target, reduction="none").sum(1).mean()
