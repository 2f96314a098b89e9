"""SGD of several stacked models, with the arithmetic of torch's optimiser."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.training.sgd import SGD
from flwr_frl.task.training.stacked import Objective, Tensors, stacked
from flwr_frl.task.training.stacked_batches import StackedBatch


class StackedSGD:
    """SGD steps of several models at once.

    Parameters
    ----------
    models : sequence of SplitModel
        Frozen alike; parameters that require gradients are trained.
    objective : Objective
        Of the first model.
    constants : list of Tensor
        The regularizers' stacked tensors.
    correction : dict of str to Tensor
        Stacked terms that are added to gradients.
    sgd : SGD
        The hyper-parameters.
    """

    def __init__(
        self,
        models: Sequence[SplitModel],
        objective: Objective,
        constants: list[Tensor],
        correction: Tensors,
        sgd: SGD,
    ) -> None:
        self.models = models
        self.objective = objective
        self.constants = constants
        self.correction = correction
        self.sgd = sgd
        self.state = stacked([model.tensors for model in models])
        self.trained = {
            name: self.state[name]
            for name, parameter in models[0].named_parameters()
            if parameter.requires_grad
        }
        self.momentum = {n: torch.zeros_like(t) for n, t in self.trained.items()}

    def step(self, batch: StackedBatch) -> Tensor:
        """Make a step of the models that have a batch.

        Returns
        -------
        Tensor, shape (members,)
            Mean losses of the batches.
        """
        members = batch.members
        if members is not None:
            members = members.to(batch.inputs.device)
        tensors = batch.inputs, batch.targets, batch.weights

        def chosen(tensor: Tensor) -> Tensor:
            return tensor if members is None else tensor[members]

        state = {name: chosen(tensor) for name, tensor in self.state.items()}
        with self.sgd.autocast():
            gradients, losses = self.objective.gradients(
                state,
                list(self.trained),
                [tensor for tensor in tensors if tensor is not None],
                [chosen(constant) for constant in self.constants],
            )
        for name, gradient in zip(self.trained, gradients, strict=True):
            if gradient is not None:
                if name in self.correction:
                    gradient = gradient + chosen(self.correction[name])
                self._update(name, state[name], gradient, members)
        if members is not None:
            # Statistics of batch norms.
            for name in self.state.keys() - self.trained.keys():
                self.state[name][members] = state[name]
        return losses

    def _update(
        self, name: str, value: Tensor, gradient: Tensor, members: Tensor | None
    ) -> None:
        sgd = self.sgd
        if sgd.weight_decay and not sgd.is_bias(name):
            gradient = gradient.add(value, alpha=sgd.weight_decay)
        if sgd.momentum:
            old = self.momentum[name]
            decayed = (old if members is None else old[members]).mul(sgd.momentum)
            gradient = decayed.add_(gradient)
            if members is None:
                self.momentum[name] = gradient
            else:
                old[members] = gradient
        if members is None:
            self.trained[name].sub_(gradient, alpha=sgd.learning_rate)
        else:
            new = value.sub(gradient, alpha=sgd.learning_rate)
            self.trained[name][members] = new

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the trained state into the models."""
        for i, model in enumerate(self.models):
            for name, tensor in model.tensors.items():
                tensor.copy_(self.state[name][i])
