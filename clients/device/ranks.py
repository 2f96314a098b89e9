"""Clients that train LoRA matrices of their own ranks, or add products to weights."""

import torch
from flwr.common import NDArrays
from torch import nn

from flwr_frl.clients.base import Client, Config
from flwr_frl.clients.device.groups import WHOLE, Groups, Shape, Tensors, array_names
from flwr_frl.common.low_rank import adapters_in, first_ranks, padded
from flwr_frl.common.messages import MERGED, RANK
from flwr_frl.common.settings import require, setting
from flwr_frl.task.base import Task
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.adapters import is_lora, lora_layers, needs_trained_a
from flwr_frl.task.models.frozen import copy_sharing_frozen


def needs_products(task: Task) -> None:
    """Refuse adapters that are no products of two matrices, or too wide ones."""
    needs_trained_a(task)
    state = task.initial_state
    for layer, a, b in adapters_in(state):
        rank, (outputs, columns, *_) = len(state[a]), state[b].shape
        allowed = "layers whose adapters are products B A, not grouped convolutions"
        require(rank == columns, "lora-targets", layer, allowed)
        most = min(outputs, state[a][0].numel())
        allowed = f"at most {most}, the smaller width of {layer!r}"
        require(rank <= most, "lora-rank", rank, allowed)


class RankClient(Client, requires=(needs_products,)):
    """A client that trains the first r rows of A and columns of B.

    The others are 0, so that they have no gradient and stay 0. The model has matrices
    of ``lora-rank``, so that all clients have the same factor α/``lora-rank``; messages
    have those of rank r.

    Parameters
    ----------
    client_ranks : str, default ""
        Ranks r of the simulated clients, assigned in turn, each at most ``lora-rank``:
        with ``"2 8"``, every second client has the rank 8. By default, all have
        ``lora-rank``. A device sets ``lora-rank`` in its node config.
    lora_rank : int, default 8
        As of the task: the rank of the shared matrices.
    """

    client_ranks: str = setting("", form="ranks", safe=True)
    lora_rank: int = setting(8, ge=1, per_device=True)

    @property
    def rank(self) -> int:
        """Rank r of this client."""
        state = self.task.initial_state
        most = max(len(state[each.a]) for each in adapters_in(state))
        ranks = self.settings.client_ranks.split()
        valid = all(r.isdecimal() and 1 <= int(r) <= most for r in ranks)
        allowed = f"ranks from 1 to {most}, the rank of the shared matrices"
        require(valid, "client-ranks", self.settings.client_ranks, allowed)
        return int(ranks[self._index % len(ranks)]) if ranks else most

    def get_properties(self, config: Config) -> Config:
        """Add the rank."""
        return {**super().get_properties(config), RANK: self.rank}

    def _takes(self, name: str, shape: Shape, initial: Shape) -> bool:
        """Return whether an array is a LoRA matrix of at most the expected rank."""
        if not (is_lora(name, "A") or is_lora(name, "B")):
            return False
        axis = 0 if is_lora(name, "A") else 1
        others = (*shape[:axis], *initial[axis : axis + 1], *shape[axis + 1 :])
        return others == initial and shape[axis] <= initial[axis]

    def _receive(self, parameters: NDArrays, config: Config) -> None:
        """Load the arrays; the matrices are 0 beyond the client's rank."""
        names, state = array_names(self, self.shared), self.task.initial_state
        named = zip(names, parameters, strict=True)
        full = [padded(a, tuple(state[n].shape)) if n in state else a for n, a in named]
        super()._receive(full, config)
        self.cut(self.rank)

    @torch.no_grad()
    def cut(self, rank: int) -> None:
        """Set the matrices of the model to 0 beyond a rank."""
        tensors = self.model.tensors
        for _, a, b in adapters_in(tensors):
            tensors[a][rank:] = 0
            tensors[b][:, rank:] = 0

    def of_rank(self, rank: int) -> Tensors:
        """Return the model's arrays, with matrices of a rank."""
        return {**self.model.tensors, **first_ranks(self.model.tensors, rank)}


class MergingClient(Client, requires=(needs_products,)):
    """A client that adds received products to the frozen weights of its layers."""

    shared: Groups = (*WHOLE, MERGED)
    sent: Groups = WHOLE

    def initial_group(self, group: str) -> Tensors:
        """Return products of 0."""
        state = self.task.initial_state
        return {
            layer: torch.zeros(len(state[b]), state[a][0].numel())
            for layer, a, b in adapters_in(state)
        }

    def _receive(self, parameters: NDArrays, config: Config) -> None:
        """Load the arrays into a copy of the model with other frozen weights."""
        super()._receive(parameters, config)
        self.model = merged(self.model, self.received)


def merged(model: SplitModel, arrays: Tensors) -> SplitModel:
    """Return a copy of a model with products added to the weights of its layers.

    Parameters
    ----------
    model : SplitModel
        A model with LoRA adapters.
    arrays : dict of str to Tensor
        Under ``merged.LAYER``, a product B A without LoRA's factor, of shape (outputs,
        inputs); of a convolution, with a column for each weight of a kernel.
    """
    model = copy_sharing_frozen(model)
    names = {module: name for name, module in model.named_modules()}
    for layer in lora_layers(model):
        base, factor = layer.get_base_layer(), next(iter(layer.scaling.values()))
        product = factor * arrays[MERGED + names[layer]].to(base.weight.dtype)
        # Their weights have a row for each input.
        if isinstance(base, nn.Embedding) or getattr(layer, "fan_in_fan_out", False):
            product = product.T
        base.weight = base.weight + product.reshape(base.weight.shape)
    return model
