"""Nodes of a graph, which train their whole model and exchange vectors with neighbours.

The server only relays messages: in each round, a node receives the messages that its
neighbours sent since its last accepted reply, and sends one message. After an absence,
a node replays the missed exchanges in order, as if it had taken part without training
or sending (except in D-PSGD). This preserves the mean of the nodes' models.

The equations are written once, on matrices with a row for each node: a device has one
row, and nodes of one process have a row each (`flwr_frl.clients.gossip.together`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from logging import WARNING
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.common import NDArrays, log
from torch import Tensor

from flwr_frl.clients.base import Client, Config, EvaluateResult, FitResult
from flwr_frl.clients.device.groups import WHOLE, Tensors
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.gossip.flat import SMALLEST_SKETCHED, FlatParameters, sketch
from flwr_frl.clients.gossip.settings import CompressedGossipSettings, GossipSettings
from flwr_frl.common import compression
from flwr_frl.common import messages as keys
from flwr_frl.common.errors import TrainingDivergedError
from flwr_frl.task.base import Task
from flwr_frl.task.training.local_training import gradient
from flwr_frl.task.training.sgd import trainable_examples

# Messages to a node: the sender, its weight w_ij, and the encoded vector.
Relayed = Sequence[tuple[str, float, bytes]]
# Gradients, shape (nodes, d), and losses, shape (nodes,).
Gradients = tuple[Tensor, Tensor]
# Larger entries do not occur in successful training, and one of 1e30 would ruin the
# neighbours' models.
LARGEST_ENTRY = 1e6
VECTORS = "gossip."
# Threshold of a vector that is sent regardless of its norm.
ALWAYS = -1.0
COLUMNS = ("relayed-senders", "relayed-weights", "relayed-data")


class LostStateError(RuntimeError):
    """A node has lost the state on which its neighbours' estimates rely."""


def relayed(config: Mapping[str, Any]) -> Relayed:
    """Return all messages in the server's config, in its order."""
    return list(zip(*(config.get(name, ()) for name in COLUMNS), strict=True))


def exchanges(config: Config, last_round: int) -> list[Relayed]:
    """Return the neighbours' messages of each round, in order and without gaps.

    Parameters
    ----------
    config : dict
        The server's config, written by `flwr_frl.strategies.gossip.base.Gossip`.
    last_round : int
        The round of this node's state, which is the first one.
    """
    rounds: Any = config.get("relayed-rounds", ())
    by_round = defaultdict[int, list[tuple[str, float, bytes]]](list)
    for round_, message in zip(rounds, relayed(config), strict=True):
        by_round[round_].append(message)
    last = int(config[keys.EXCHANGED_ROUND])
    return [by_round[round_] for round_ in range(last_round, last + 1)]


class GraphClient(Client):
    """A node of a graph, which exchanges compressed vectors with its neighbours.

    Attributes
    ----------
    flat : FlatParameters
        The parameters of the model.
    compressor : Compressor
        The operator C.
    refused : int
        Number of malformed messages received.
    """

    shared = ()

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Any
    ) -> None:
        super().__init__(task, index, state, settings)
        self.flat = FlatParameters.of(self.model)
        self.compressor: compression.Compressor = compression.Identity()
        if isinstance(settings, compression.CompressionSettings):
            self.compressor = compression.from_settings(settings, self.message_sizes)
        self.refused = 0

    @property
    def message_sizes(self) -> tuple[int, ...]:
        """Number of entries of each parameter that a message contains."""
        return self.flat.sizes

    @property
    def dimension(self) -> int:
        """Number of entries d of a message."""
        return sum(self.message_sizes)

    @property
    def message_lengths(self) -> list[int]:
        """The possible lengths of a message in bytes."""
        return [self.compressor.num_bytes(self.dimension)]

    def _structure(self) -> list[object]:
        """Return parameters, classes and C, which must be the same for all nodes."""
        named = self.model.named_parameters()
        shapes: list[object] = [(name, tuple(p.shape)) for name, p in named]
        return [*shapes, self.task.classes, self.dimension, repr(self.compressor)]

    def get_properties(self, config: Config) -> Config:
        """Add ``message-bytes``, the possible lengths of a message, and C's ω."""
        compressor, dimension = self.compressor, self.dimension
        properties: dict[str, Any] = {
            **super().get_properties(config),
            "message-bytes": self.message_lengths,
            "omega": compressor.omega(dimension),
            "typical-omega": compressor.typical_omega(dimension),
        }
        return properties

    def check_state(self, config: Config) -> None:
        """Raise `LostStateError` if the state is not of the ``acknowledged-round``.

        Saved runs are used without a server, and so without this round.
        """
        kept = self._state.round
        acknowledged = int(config.get(keys.ACKNOWLEDGED_ROUND, kept))
        if kept != acknowledged:
            text = f"the state is of round {kept}, not that of round {acknowledged}"
            raise LostStateError(text)

    def decode(
        self, sender: str, data: bytes, compressor: compression.Compressor
    ) -> Tensor | None:
        """Return the vector of a neighbour's message, on the CPU.

        Invalid messages, for which None is returned, are counted and logged. Vectors
        with an entry above `LARGEST_ENTRY` are invalid.
        """
        try:
            vector = torch.from_numpy(compressor.decompress(data, self.dimension))
            largest = vector.abs().max().item()
            if not largest <= LARGEST_ENTRY:
                raise ValueError(f"an entry is {largest:.3g}, above {LARGEST_ENTRY:g}")
        except ValueError as error:
            log(WARNING, "message of neighbour %s refused: %s", sender, error)
            self.refused += 1
            return None
        return vector

    def attach_sketch(self) -> None:
        """Attach ``sketch`` to the reply: float32 numbers that represent the model.

        From them, the server estimates the distance between the nodes' models. A device
        with private data omits it for small models, which it would reveal.
        """
        vector = self.flat.vector.numpy(force=True)
        if not self._own_data or len(vector) >= SMALLEST_SKETCHED:
            self._attachments["sketch"] = sketch(vector).tobytes()


class Sent(NamedTuple):
    """The messages of a round as rows: the row of each message, and all vectors."""

    rows: Mapping[bytes, int]
    q: Tensor


class Exchange(NamedTuple):
    """The valid messages of one round, with a row for each receiving node.

    Parameters
    ----------
    weighted_sum : Tensor, shape (nodes, d)
        Σ_j w_ij q_j over the senders of valid messages q_j.
    weight : Tensor, shape (nodes, 1)
        Σ_j w_ij over the same senders.
    neighbour_weight : Tensor, shape (nodes, 1)
        Σ_j w_ij over all neighbours.
    consensus_step : float
        γ.
    """

    weighted_sum: Tensor
    weight: Tensor
    neighbour_weight: Tensor
    consensus_step: float


class Node(GraphClient):
    """A node: trains its whole model and exchanges vectors with its neighbours.

    Subclasses implement `mix` and `outgoing`, may override `apply_sent`, and declare
    their ``vectors``. Models and vectors are matrices with a row for each node: one on
    a device, several if nodes of one process run together.

    Attributes
    ----------
    x : Tensor, shape (nodes, d)
        The parameters of the models.
    """

    personal = (*WHOLE, VECTORS)
    _exchanged_groups = WHOLE
    _settings_type: type = CompressedGossipSettings
    _rows = "flwr_frl.clients.gossip.together:Nodes"
    settings: GossipSettings
    # Personal vectors beside the model, each with d entries, initially 0.
    vectors: tuple[str, ...] = ("momentum",)

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Any
    ) -> None:
        super().__init__(task, index, state, settings)
        self.x = self.flat.vector[None]
        self.rate = self.settings.rate()

    # Methods that an algorithm defines.

    def mix(self, exchange: Exchange) -> None:
        """Apply the consensus step of one exchange to ``x`` and the ``vectors``."""
        raise NotImplementedError

    def outgoing(self, server_round: int) -> tuple[Tensor, float]:
        """Return the vectors that the nodes send, before compression.

        Parameters
        ----------
        server_round : int
            The round, from 1.

        Returns
        -------
        vectors : Tensor, shape (nodes, d)
            A row for each node.
        threshold : float
            A row is sent if its squared norm is above the threshold.
        """
        raise NotImplementedError

    def apply_sent(self, q: Tensor) -> None:
        """Update the vectors with the messages q that the neighbours will decode.

        q has the shape of ``x``; rows of nodes that send nothing are 0.
        """

    # One round.

    def fit(self, parameters: NDArrays, config: Config) -> FitResult:
        """Mix with the neighbours, run H iterations, and send one message.

        The reply has the attachment ``message``, empty if there is nothing to send, and
        the metric ``refused``, the number of malformed messages received.
        """
        self.catch_up(parameters, config)
        server_round = int(config[keys.SERVER_ROUND])
        total, steps = self.iterate(server_round, self.gradients())
        loss = total.item() / max(1, steps)
        (data,), _ = self.messages(server_round, [torch.initial_seed()])
        self._attachments[keys.MESSAGE] = data
        self.metrics["refused"] = self.refused
        return self._reply(loss)

    def evaluate(self, parameters: NDArrays, config: Config) -> EvaluateResult:
        """Test this node's model after the exchange; save nothing."""
        self.catch_up(parameters, config)
        self.attach_sketch()
        return self._test(self.deployed_model())

    def catch_up(self, parameters: NDArrays, config: Config) -> None:
        """Load this node's state and replay the exchanges since its round."""
        self._receive(parameters, config)
        self.check_state(config)
        for messages in exchanges(config, self._state.round):
            self.exchange([messages], [config])

    def exchange(
        self,
        to_nodes: Sequence[Relayed],
        configs: Sequence[Mapping[str, Any]],
        known: Sent | None = None,
    ) -> list[int]:
        """Decode and `mix` the messages of one round.

        Parameters
        ----------
        to_nodes : sequence of Relayed
            The messages to each node.
        configs : sequence of mapping
            The server's config for each node.
        known : Sent, optional
            Messages that need not be decoded.

        Returns
        -------
        list of int
            The number of messages that each node has refused.
        """
        rows, q = known or ({}, torch.zeros(0, self.dimension))
        rows, new, refused = dict(rows), list[Tensor](), [0] * len(to_nodes)
        edges, weights = list[tuple[int, int]](), list[float]()
        for i, messages in enumerate(to_nodes):
            for sender, weight, data in messages:
                if data not in rows:
                    vector = self.decode(sender, data, self.compressor)
                    if vector is None:
                        refused[i] += 1
                        continue
                    rows[data] = len(q) + len(new)
                    new.append(vector)
                edges.append((i, rows[data]))
                weights.append(weight)
        q = torch.cat([q, *(vector[None] for vector in new)])
        # The entries of a row are added in the order of its messages. Not every device
        # has sparse matrices.
        w = torch.sparse_coo_tensor(
            torch.tensor(edges, dtype=torch.int64).view(-1, 2).T,
            torch.tensor(weights),
            (len(to_nodes), len(q)),
            check_invariants=False,
        )
        of_senders = w @ torch.ones(len(q), 1)
        of_all = torch.tensor([[each["neighbour-weight"]] for each in configs])
        total, device = (w @ q).to(self._device), self._device
        step = float(configs[0]["consensus-step"])
        self.mix(Exchange(total, of_senders.to(device), of_all.to(device), step))
        return refused

    def messages(
        self, server_round: int, seeds: Sequence[int]
    ) -> tuple[list[bytes], Tensor]:
        """Return each node's message to its neighbours, and update the vectors.

        Parameters
        ----------
        server_round : int
            The round, from 1.
        seeds : sequence of int
            A seed for each node, for compressors that draw random numbers. It depends
            on the run, the client and the round.

        Returns
        -------
        messages : list of bytes
            Empty if a node has nothing to send.
        q : Tensor, shape (nodes, d)
            Their vectors, on the CPU; 0 if a node has nothing to send.
        """
        vectors, threshold = self.outgoing(server_round)
        squares = vectors.square().sum(1).tolist()
        # A vector with NaN is not sent; saving the state reports it.
        sent = [i for i, square in enumerate(squares) if square > threshold]
        rng = np.random.default_rng
        sources = [cache(partial(rng, [seeds[i], 0x60551])) for i in sent]
        rows = vectors.numpy(force=True)[sent]
        encoded, decoded = self.compressor.compress_rows(rows, sources)
        q = torch.zeros(vectors.shape)
        q[sent] = torch.from_numpy(decoded)
        self.apply_sent(q.to(self._device))
        of_sender = dict(zip(sent, encoded, strict=True))
        return [of_sender.get(i, b"") for i in range(len(q))], q

    def iterate(
        self, server_round: int, gradients: Iterator[Gradients]
    ) -> tuple[Tensor, int]:
        """Run H iterations of SGD with Nesterov momentum (Algorithm 1, lines 3 to 5).

        v ← β v + g;  x ← x − η_t (β v + g). Without gradients there are no steps.

        Parameters
        ----------
        server_round : int
            The round, from 1.
        gradients : iterator
            Yields the gradients g at ``x`` for each iteration.

        Returns
        -------
        total : Tensor, shape (nodes,)
            Sums of the losses.
        steps : int
            Number of steps.

        Raises
        ------
        TrainingDivergedError
            If a loss is not finite.
        """
        self.model.train()
        total, steps = self.x.new_zeros(len(self.x)), 0
        iterations = self.iterations(server_round)
        for t, (g, losses) in zip(iterations, gradients, strict=False):
            total += losses
            steps += 1
            self.step(t, g)
        if not torch.isfinite(total).all():
            raise TrainingDivergedError(
                f"the loss is {total.sum().item()} in round {server_round} with "
                f"learning-rate {self.settings.learning_rate}; try a smaller one"
            )
        return total, steps

    def gradients(self) -> Iterator[Gradients]:
        """Yield this node's gradients on batches drawn from all of its examples.

        Without examples, there are none.
        """
        given = self.task.resident("train", self._index)
        examples = trainable_examples(self.model, given, self.settings)
        while (batch := examples.draw(self.settings.batch_size)) is not None:
            self.flat.gradient.zero_()
            loss = gradient(self.model, *batch, self.task.loss, self.settings)
            yield self.flat.gradient[None], loss

    def iterations(self, server_round: int) -> range:
        """Return the iterations (r − 1) H, ..., r H − 1 of round r ≥ 1."""
        steps = self.settings.local_steps
        return range((server_round - 1) * steps, server_round * steps)

    def step(self, t: int, g: Tensor) -> None:
        """Apply iteration t with the gradient g, of the shape of ``x``.

        Weight decay is added to g, which is modified in place.
        """
        beta, decay = self.settings.momentum, self.settings.weight_decay
        if decay:
            g.addcmul_(self.x, self.flat.decayed, value=decay)
        v = self.vector("momentum").mul_(beta).add_(g)
        self.x.sub_(g.add_(v, alpha=beta), alpha=self.rate(t))

    # State: the model and the vectors.

    def initial_group(self, group: str) -> Tensors:
        """Return the initial ``vectors``, all 0."""
        return dict.fromkeys(self.vectors, torch.zeros(self.dimension))

    def vector(self, name: str) -> Tensor:
        """Return one of the ``vectors``, shape (nodes, d); saved with its changes."""
        return self.saved[VECTORS + name].view(len(self.x), -1)

    @torch.no_grad()
    def _receive(self, parameters: NDArrays, config: Config) -> None:
        """Load this node's model and vectors."""
        super()._receive(parameters, config)
        if self._state.round == 0:
            # Only the model is reused from an earlier run, as neighbours also restart.
            for name in self.vectors:
                self.vector(name).zero_()
