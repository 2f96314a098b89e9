"""Base of nodes that train their whole model and exchange vectors with neighbours.

The server only relays messages: in each round, a node receives the messages that its
neighbours sent since its last accepted reply, and sends one message. After an absence,
a node replays the missed exchanges in order, as if it had taken part without training
or sending (except in D-PSGD). This preserves the mean of the nodes' models.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import Message
from flwr.common import NDArrays
from torch import Tensor

from flwr_frl.clients.base import Config, Evaluation, Reply
from flwr_frl.clients.device.conversions import Tensors
from flwr_frl.clients.device.parameter_groups import WHOLE
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.gossip.relayed import (
    LARGEST_ENTRY,
    GraphClient,
    Relayed,
    exchanges,
)
from flwr_frl.clients.gossip.settings import CompressedGossipSettings, GossipSettings
from flwr_frl.common.messages import SERVER_ROUND
from flwr_frl.common.settings import TrainingDivergedError
from flwr_frl.task.base import Task
from flwr_frl.task.compression import Identity
from flwr_frl.task.models import SplitModel
from flwr_frl.task.resident import train_examples
from flwr_frl.task.training.local_training import gradient
from flwr_frl.task.training.sgd import trainable_examples

VECTORS = "gossip."
# Vector with the mean of ``x`` over the iterations.
AVERAGE = "average"
# Threshold of a vector that is sent regardless of its norm.
ALWAYS = -1.0
# For compressors that draw no random numbers.
NO_RANDOMNESS = np.random.default_rng(0)


@dataclass(frozen=True)
class Exchange:
    """The valid messages of one round at a node, or at several nodes, a row for each.

    Parameters
    ----------
    weighted_sum : Tensor, shape (d,) or (nodes, d)
        Σ_j w_ij q_j over the senders of valid messages q_j.
    weight : float or Tensor of shape (nodes, 1)
        Σ_j w_ij over the same senders.
    neighbour_weight : float or Tensor of shape (nodes, 1)
        Σ_j w_ij over all neighbours.
    consensus_step : float
        γ.
    """

    weighted_sum: Tensor
    weight: float | Tensor
    neighbour_weight: float | Tensor
    consensus_step: float


class Node(GraphClient):
    """A node: trains its whole model and exchanges vectors with its neighbours.

    Subclasses implement `mix` and `outgoing`, may override `apply_sent`, and declare
    their ``vectors``. The equations hold for one node and for several nodes of one
    process, whose models and vectors are then matrices with a row for each node.

    Attributes
    ----------
    x : Tensor, shape (d,) or (nodes, d)
        The parameters of the model, or of several nodes' models.
    """

    personal = (*WHOLE, VECTORS)
    _settings_type: type = CompressedGossipSettings
    settings: GossipSettings
    # Personal vectors beside the model, each with d entries, initially 0.
    vectors: tuple[str, ...] = ("momentum",)
    # Whether a node that was absent mixes the messages of the rounds that it missed.
    replays_missed_rounds: ClassVar[bool] = True

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Any
    ) -> None:
        super().__init__(task, index, state, settings)
        self.x = self.flat.vector
        self.rate = self.settings.rate()
        if self.settings.averaged_output:
            self.vectors = (*self.vectors, AVERAGE)

    @property
    def _exchanged_groups(self) -> tuple[str, ...]:
        return WHOLE

    @staticmethod
    def fit_nodes(*arguments: Any) -> dict[int, Message]:
        """Answer training messages of several nodes, as `together.fit_nodes`."""
        from flwr_frl.clients.gossip.together import fit_nodes

        return fit_nodes(*arguments)

    # Methods that an algorithm defines.

    def mix(self, exchange: Exchange) -> None:
        """Apply the consensus step of one exchange to ``x`` and the ``vectors``."""
        raise NotImplementedError

    def outgoing(self, server_round: int) -> tuple[Tensor, float]:
        """Return the vector that a node sends to its neighbours, before compression.

        Parameters
        ----------
        server_round : int
            The round, from 1.

        Returns
        -------
        vector : Tensor
            The vector, of the shape of ``x``.
        threshold : float
            The vector is sent if its squared norm is above the threshold.
        """
        raise NotImplementedError

    def apply_sent(self, q: Tensor) -> None:
        """Update the vectors with the message q that the neighbours will decode.

        q has the shape of ``x``; rows of nodes that send nothing are 0.
        """

    # One round.

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Mix with the neighbours, run H iterations, and send one message.

        The reply has the attachment ``message``, empty if there is nothing to send, and
        the metric ``refused``, the number of malformed messages received.
        """
        self.catch_up(parameters, config)
        server_round = int(config[SERVER_ROUND])
        loss = self.iterate(server_round)
        (data,), _ = self.messages(server_round, [torch.initial_seed()])
        self._attachments["message"] = data
        self.metrics["refused"] = self.refused
        self._save()
        return self._send(loss)

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Test this node's model after the exchange; save nothing."""
        self.catch_up(parameters, config)
        self.attach_sketch()
        return self._test(self.deployed_model())

    def deployed_model(self) -> SplitModel:
        """Return the model, or its mean over the iterations (``averaged-output``)."""
        if self.settings.averaged_output and self._state.round:
            with torch.no_grad():
                self.x.copy_(self.vector(AVERAGE))
        return self.model

    def catch_up(self, parameters: NDArrays, config: Config) -> None:
        """Load this node's state and replay the exchanges since its round.

        Without `replays_missed_rounds`, only the exchange of its round is made.
        """
        self._receive(parameters, config)
        self.check_state(config)
        for round_, messages in exchanges(config, self._state.round):
            if round_ == self._state.round or self.replays_missed_rounds:
                self.mix(self.exchange(messages, config))

    def exchange(self, messages: Iterable[Relayed], config: Config) -> Exchange:
        """Decode and sum the neighbours' messages of one round."""
        weighted_sum, weight = torch.zeros(self.dimension, device=self._device), 0.0
        for message in messages:
            try:
                vector = self.decode(message.data).to(self._device)
            except ValueError as error:
                self.refuse(message.sender, error)
                continue
            weighted_sum.add_(vector, alpha=message.weight)
            weight += message.weight
        step, neighbour_weight = config["consensus-step"], config["neighbour-weight"]
        return Exchange(weighted_sum, weight, float(neighbour_weight), float(step))

    def messages(
        self, server_round: int, seeds: Sequence[int]
    ) -> tuple[list[bytes], dict[bytes, Tensor]]:
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
        decoded : dict of bytes to Tensor
            The messages that are sent, with their vectors; empty if receivers refuse
            one of them.
        """
        vectors, threshold = self.outgoing(server_round)
        rows = vectors.view(-1, self.dimension)
        squares = rows.square().sum(1).tolist()
        # A vector with NaN is not sent; saving the state reports it.
        sent = [i for i, square in enumerate(squares) if square > threshold]
        chosen = rows if len(sent) == len(rows) else rows[sent]
        generators = [NO_RANDOMNESS] * len(sent)
        if self.compressor.is_random:
            generators = [np.random.default_rng([seeds[i], 0x60551]) for i in sent]
        encoded = self.compressor.compress_rows(chosen, generators)
        by_node = dict(zip(sent, encoded, strict=True))
        messages = [by_node.get(i, b"") for i in range(len(rows))]
        if not sent:
            return messages, {}
        decoded = chosen
        if not isinstance(self.compressor, Identity):
            vs = [self.compressor.decompress(m, self.dimension) for m in encoded]
            decoded = torch.stack(vs).to(rows.device)
        q = decoded
        if len(sent) < len(rows):
            q = torch.zeros_like(rows)
            q[sent] = decoded
        self.apply_sent(q.view(vectors.shape))
        if not decoded.abs().max() <= LARGEST_ENTRY:
            return messages, {}
        return messages, dict(zip(encoded, decoded.unbind(), strict=True))

    def iterate(self, server_round: int) -> float:
        """Run H iterations of SGD with Nesterov momentum (Algorithm 1, lines 3 to 5).

        v ← β v + g;  x ← x − η_t (β v + g). The batch of an iteration is drawn from all
        of the node's examples; batches whose targets are all ignored are skipped. A
        node without examples makes no step.

        Parameters
        ----------
        server_round : int
            The round, from 1.

        Returns
        -------
        float
            Mean loss over the batches, or 0 if all were skipped.

        Raises
        ------
        TrainingDivergedError
            If the loss is not finite.
        """
        self.model.train()
        total, steps = torch.zeros((), device=self._device), 0
        given = train_examples(self.task, self._index)
        examples = trainable_examples(self.model, given, self.settings)
        for t in self.iterations(server_round):
            self.average(t)
            if (batch := examples.draw(self.settings.batch_size)) is None:
                continue
            self.flat.gradient.zero_()
            total += gradient(self.model, *batch, self.task.loss, self.settings)
            steps += 1
            self.step(t, self.flat.gradient)
        if not torch.isfinite(total):
            raise TrainingDivergedError(
                f"the loss is {total.item()} in round {server_round} with "
                f"learning-rate {self.settings.learning_rate}; try a smaller one"
            )
        return total.item() / max(1, steps)

    def iterations(self, server_round: int) -> range:
        """Return the iterations (r − 1) H, ..., r H − 1 of round r ≥ 1."""
        steps = self.settings.local_steps
        return range((server_round - 1) * steps, server_round * steps)

    def average(self, t: int) -> None:
        """Include x before iteration t in its mean (``averaged-output``)."""
        if self.settings.averaged_output:
            # Iterations that this node has missed enter the mean with the current x.
            first = t % self.settings.local_steps == 0
            counted = self._state.round * self.settings.local_steps if first else t
            self.vector(AVERAGE).lerp_(self.x, 1 - counted / (t + 1))

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
        """Return one of the ``vectors``; in-place changes are saved."""
        return self.saved[VECTORS + name]

    def _receive(self, parameters: NDArrays, config: Config) -> None:
        """Load this node's model and vectors."""
        with torch.no_grad():
            super()._receive(parameters, config)
        if self._state.round == 0:
            # Only the model is reused from an earlier run, as neighbours also restart.
            for name in self.vectors:
                self.saved[VECTORS + name] = torch.zeros_like(self.x)
