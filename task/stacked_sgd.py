"""SGD of several models that are stacked, with the mathematics of torch's own."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from flwr_frl.task.sgd import SGD, refuses_one
from flwr_frl.task.split_model import SplitModel
from flwr_frl.task.stacked import Objective, Tensors, stacked


class StackedSGD:
    """Steps of several models at once.

    Parameters
    ----------
    models : sequence of SplitModel
        Frozen alike: what requires gradients learns.
    objective : Objective
        Of the first model.
    constants : list of Tensor
        The regularizers' tensors, stacked.
    correction : dict of str to Tensor
        Added to gradients, stacked.
    sgd : SGD
        The hyper-parameters.
    key : hashable
        Equal only for objectives that compute the same.
    """

    def __init__(
        self,
        models: Sequence[SplitModel],
        objective: Objective,
        constants: list[Tensor],
        correction: Tensors,
        sgd: SGD,
        key: Hashable,
    ) -> None:
        self.models = models
        self.objective = objective
        self.constants = constants
        self.correction = correction
        self.sgd = sgd
        self.key = key
        self.state = stacked([model.tensors for model in models])
        self.learning = {
            name: self.state[name]
            for name, parameter in models[0].named_parameters()
            if parameter.requires_grad
        }
        self.momentum = {n: torch.zeros_like(t) for n, t in self.learning.items()}

    def filled_step(
        self, inputs: Tensor, targets: Tensor, weights: Tensor, active: Tensor | None
    ) -> Tensor:
        """Make a step of the active models; return the sums of losses."""
        counts = weights.sum(1)
        with self.sgd.autocast():
            gradients, losses = self.objective.gradients(
                self.state,
                list(self.learning),
                (inputs, targets, weights),
                self.constants,
                self.key,
            )
        for name, gradient in zip(self.learning, gradients, strict=True):
            if gradient is not None:
                if name in self.correction:
                    gradient = gradient + self.correction[name]
                value = self.learning[name]
                before = value if active is None else value.clone()
                momentum = self.momentum[name]
                self._move(name, value, gradient, None)
                if active is not None:
                    mask = active.view(-1, *[1] * (value.dim() - 1))
                    value.copy_(torch.where(mask, value, before))
                    new = self.momentum[name]
                    self.momentum[name] = torch.where(mask, new, momentum)
        return torch.where(counts > 0, losses * counts, 0.0)

    def step(self, inputs: Tensor, targets: Tensor, members: Tensor | None) -> Tensor:
        """Make a step of some of the models (None: all); return their losses."""
        if members is not None:
            members = members.to(inputs.device)

        def chosen(tensor: Tensor) -> Tensor:
            return tensor if members is None else tensor[members]

        state = {name: chosen(tensor) for name, tensor in self.state.items()}
        with self.sgd.autocast():
            gradients, losses = self.objective.gradients(
                state,
                list(self.learning),
                (inputs, targets),
                [chosen(constant) for constant in self.constants],
                self.key,
            )
        for name, gradient in zip(self.learning, gradients, strict=True):
            if gradient is not None:
                if name in self.correction:
                    gradient = gradient + chosen(self.correction[name])
                self._move(name, state[name], gradient, members)
        if members is not None:
            # Statistics of batch norms.
            for name in self.state.keys() - self.learning.keys():
                self.state[name][members] = state[name]
        return losses

    def step_unless_refused(
        self, inputs: Tensor, targets: Tensor, members: Tensor | None
    ) -> Tensor | None:
        """Make a `step`; None, and nothing moves, where norms refuse one example."""
        if not targets.shape[1] == 1 < self.sgd.batch_size:
            return self.step(inputs, targets, members)
        kept = self.state.keys() - self.learning.keys()
        before = {name: self.state[name].clone() for name in kept}
        try:
            return self.step(inputs, targets, members)
        except ValueError as error:
            if not refuses_one(error):
                raise
        self.state |= before
        return None

    def _move(
        self, name: str, value: Tensor, gradient: Tensor, members: Tensor | None
    ) -> None:
        sgd = self.sgd
        if sgd.weight_decay and not sgd.is_bias(name):
            gradient = gradient.add(value, alpha=sgd.weight_decay)
        if sgd.momentum:
            old = self.momentum[name]
            moved = (old if members is None else old[members]).mul(sgd.momentum)
            gradient = moved.add_(gradient)
            if members is None:
                self.momentum[name] = gradient
            else:
                old[members] = gradient
        if members is None:
            self.learning[name].sub_(gradient, alpha=sgd.learning_rate)
        else:
            new = value.sub(gradient, alpha=sgd.learning_rate)
            self.learning[name][members] = new

    @torch.no_grad()
    def write_back(self) -> None:
        """Give each model what it has learned."""
        for i, model in enumerate(self.models):
            for name, own in model.tensors.items():
                own.copy_(self.state[name][i])
