"""What nodes of a graph have in common: messages to and from their neighbours.

A node keeps its whole model. The server only relays: it sends a node what its
neighbours sent since the node's last reply that counted, and takes one message of its
own. Rounds that a node has missed it makes up for in their order, as if it had been
there and had neither trained nor sent anything, so the nodes' mean moves as it should.
"""

from dataclasses import dataclass
from functools import lru_cache
from logging import WARNING
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import torch
from flwr.common import NDArrays, log
from torch import Tensor

from flwr_frl.clients.base import Client, Config, Evaluation, Reply
from flwr_frl.clients.device.parameter_groups import WHOLE, Tensors, to_numpy, within
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.gossip.flat import FlatParameters
from flwr_frl.clients.gossip.relayed import Relayed, check_state, exchanges
from flwr_frl.clients.gossip.schedules import learning_rate
from flwr_frl.clients.gossip.sketch import SMALLEST_SKETCHED, sketch
from flwr_frl.task.base import Task
from flwr_frl.task.compression.per_tensor import (
    CompressionSettings,
    Compressor,
    from_settings,
)
from flwr_frl.task.layers import how_many_count
from flwr_frl.task.messages import SERVER_ROUND
from flwr_frl.task.settings import Free
from flwr_frl.task.training import (
    SGD,
    TrainingDivergedError,
    gradient,
    has_ignored,
    told_of_one_example,
)

VECTORS = "gossip."
# No training that goes well exchanges a larger number; one of 1e30 would be the end of
# every neighbour's model.
LARGEST_ENTRY = 1e6


@dataclass(frozen=True)
class GossipSettings(SGD):
    """Local SGD of a node.

    Parameters
    ----------
    learning_rate_schedule : str, default "constant"
        ``constant``, ``inverse:A`` or ``steps:WARMUP:T1,T2,...:FACTOR``, in iterations:
        base / (t + A), or a rise over WARMUP iterations and a division by FACTOR at
        each of T1, T2, ….
    """

    learning_rate_schedule: Annotated[
        str, Free("constant, inverse:A or steps:WARMUP:T1,T2,...:FACTOR")
    ] = "constant"


@dataclass(frozen=True)
class CompressedGossipSettings(GossipSettings, CompressionSettings):
    """Local SGD of a node, and what its messages are."""


class GossipClient(Client):
    """A node: trains the whole model and exchanges vectors with its neighbours.

    Subclasses say which vectors they keep besides the model, and write `mix` and
    `message`.
    """

    shared = ()
    personal = (*WHOLE, VECTORS)
    settings_type: type = CompressedGossipSettings
    settings: GossipSettings
    # Kept besides the model, each of the parameters' size; all start at 0.
    vectors: ClassVar[tuple[str, ...]] = ("momentum",)

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Any
    ) -> None:
        super().__init__(task, index, state, settings)
        self.flat = FlatParameters.of(self.model)
        self.x = self.flat.vector
        self.rate = learning_rate(
            self.settings.learning_rate_schedule, self.settings.learning_rate
        )
        self.compressor = self.make_compressor()
        self.refused = 0

    @property
    def dimension(self) -> int:
        """Number of parameters d."""
        return len(self.x)

    @property
    def local_steps(self) -> int:
        """Iterations between two exchanges, H."""
        return 1

    def make_compressor(self) -> Compressor:
        """Return the operator C that the settings name."""
        settings = cast(CompressedGossipSettings, self.settings)
        return from_settings(settings, self.flat.sizes)

    def structure(self) -> list[object]:
        """Return what must be the same for all nodes: parameters, classes and C."""
        named = self.model.named_parameters()
        shapes: list[object] = [(name, tuple(p.shape)) for name, p in named]
        return [*shapes, self.task.classes, repr(self.compressor)]

    def get_properties(self, config: Config) -> Config:
        """Return also ``message-bytes``, a message's length, and C's omegas."""
        return {
            **super().get_properties(config),
            "message-bytes": self.compressor.num_bytes(self.dimension),
            "omega": self.compressor.omega(self.dimension),
            "typical-omega": self.compressor.typical_omega(self.dimension),
        }

    # One round.

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Mix with what the neighbours sent, make H iterations, send one message.

        ``message`` is attached, empty where there is nothing to send; the metric
        ``refused`` is how many of the neighbours' messages were malformed.
        """
        self.catch_up(parameters, config)
        server_round = int(config[SERVER_ROUND])
        loss = self.iterate(server_round)
        self.attachments["message"] = self.message(server_round)
        self.save(config)
        arrays, n, metrics = self.send(loss)
        return arrays, n, {**metrics, "refused": self.refused}

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Test the own model as it is after the exchange; nothing is kept.

        ``sketch`` is attached: float32 numbers from which the server estimates the
        distance between the nodes' models. Where the data are the node's own, a model
        that it would reveal has none.
        """
        self.catch_up(parameters, config)
        if not self.own_data or self.dimension >= SMALLEST_SKETCHED:
            self.attachments["sketch"] = sketch(to_numpy(self.x)).tobytes()
        return self.test(self.model)

    def catch_up(self, parameters: NDArrays, config: Config) -> None:
        """Load the own state and make all exchanges since its round."""
        self.receive(parameters, config)
        check_state(self.state, config)
        for round_, messages in exchanges(config, self.state.round):
            self.mix(round_, messages, config)

    def mix(self, round_: int, messages: list[Relayed], config: Config) -> None:
        """Make one exchange's consensus step.

        Parameters
        ----------
        round_ : int
            The round in which the messages were sent.
        messages : list of Relayed
            The neighbours' messages.
        config : dict
            Of the server: ``consensus-step`` and ``neighbour-weight``.
        """
        raise NotImplementedError

    def message(self, server_round: int) -> bytes:
        """Return what the neighbours get, empty for nothing.

        Parameters
        ----------
        server_round : int
            The round, from 1.

        Returns
        -------
        bytes
            The message.
        """
        raise NotImplementedError

    def iterate(self, server_round: int) -> float:
        """Make H iterations with Nesterov's momentum (Algorithm 1, lines 3 to 5).

        v ← β v + g;  x ← x − η_t (β v + g), with one batch an iteration, drawn anew
        from all of the node's examples. Where no target of it counts there is no step.

        Parameters
        ----------
        server_round : int
            The round, from 1: its iterations are (round − 1) H, ..., round H − 1.

        Returns
        -------
        float
            Mean loss over the batches; 0 without steps.

        Raises
        ------
        TrainingDivergedError
            If the loss is no longer finite.
        """
        self.model.train()
        v, g, beta = self.vector("momentum"), self.flat.gradient, self.settings.momentum
        total, made = torch.zeros((), device=self.device), 0
        examples = self.train_examples
        ignoring = has_ignored(examples)
        for t in self.iterations(server_round):
            batch = examples.draw(self.settings.batch_size)
            if ignoring and not how_many_count(batch[1]):
                continue
            with told_of_one_example(examples, self.settings):
                total += self.gradient(*batch)
            made += 1
            v.mul_(beta).add_(g)
            self.x.sub_(g.add_(v, alpha=beta), alpha=self.rate(t))
        if not torch.isfinite(total):
            raise TrainingDivergedError(
                f"the loss is {total.item()} in round {server_round} with "
                f"learning-rate {self.settings.learning_rate}; a smaller one may help"
            )
        return total.item() / max(1, made)

    def iterations(self, server_round: int) -> range:
        """Return the iterations of a round.

        Parameters
        ----------
        server_round : int
            The round, from 1.

        Returns
        -------
        range
            H of them, the first of the run being 0.
        """
        return range(
            (server_round - 1) * self.local_steps, server_round * self.local_steps
        )

    def gradient(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the stochastic gradient g at x, with weight decay.

        Parameters
        ----------
        inputs, targets : Tensor
            A batch of the node's examples.

        Returns
        -------
        Tensor
            The batch's loss; the gradient is in ``flat.gradient``.
        """
        self.flat.gradient.zero_()
        loss = gradient(self.model, inputs, targets, self.task.loss, self.settings)
        if self.settings.weight_decay:
            decay = self.settings.weight_decay
            self.flat.gradient.addcmul_(self.x, self.flat.decayed, value=decay)
        return loss

    def decoded(self, message: Relayed) -> Tensor | None:
        """Return a neighbour's vector, or None for a message that is malformed.

        Parameters
        ----------
        message : Relayed
            What the server relays.

        Returns
        -------
        Tensor of shape (d,), or None
            The vector, on the device; no entry is above `LARGEST_ENTRY`.
        """
        try:
            vector = self.compressor.decompress(message.data, self.dimension)
            largest = vector.abs().max().item()
            if not largest <= LARGEST_ENTRY:
                raise ValueError(
                    f"it has an entry of {largest:.3g}, above {LARGEST_ENTRY:g}"
                )
        except ValueError as error:
            log(WARNING, "message of neighbour %s refused: %s", message.sender, error)
            self.refused += 1
            return None
        return vector.to(self.device)

    # State: the model and the vectors beside it.

    def initial_group(self, slot: str) -> Tensors:
        """Return the vectors that are kept besides the model, all 0."""
        return dict.fromkeys(self.vectors, _zeros(self.dimension))

    def vector(self, name: str) -> Tensor:
        """Return one of ``vectors``; what changes it is kept."""
        return self.saved[VECTORS + name]

    def receive(self, parameters: NDArrays, config: Config) -> None:
        """Load the own model and vectors."""
        with torch.no_grad():
            super().receive(parameters, config)
        if self.state.round == 0:
            # Of an earlier run only the model counts: its neighbours start anew too.
            zeros = {
                name: value.to(self.device, copy=True)
                for name, value in self.initial_group(VECTORS).items()
            }
            self.saved |= within(VECTORS, zeros)


@lru_cache(maxsize=4)
def _zeros(dimension: int) -> Tensor:
    return torch.zeros(dimension)


def randomness() -> np.random.Generator:
    """Return NumPy's generator for this message: of seed, client and round."""
    return np.random.default_rng([torch.initial_seed(), 0x60551])
