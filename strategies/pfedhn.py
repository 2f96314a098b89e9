"""pFedHN (Shamsian et al., ICML 2021): a hypernetwork generates all models."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from logging import WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Message, MessageType
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.arrays import is_finite
from flwr_frl.common.messages import ARRAYS
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Reply, Round, Strategy, stored
from flwr_frl.strategies.grids.inbox import GridDecorator
from flwr_frl.strategies.server.replies import to_record

Floats = npt.NDArray[np.floating[Any]]
Network = dict[str, Floats]
# Distinguish the draws of initial values and of the clients' order from others of the
# same seed.
START, ORDER = 0x44E7, 0x44E8
# Largest norm of a gradient of φ and v_i together, as in the authors' code.
LARGEST_NORM = 50.0
EMBEDDING = "embedding"


class PFedHN(
    Strategy,
    client="flwr_frl.clients.pfedhn:PFedHNClient",
    uses_mean="never",
    replies_are_changes=True,
    takes_newcomers=False,
):
    """Algorithm 1: θ_i = h(v_i; φ) with a hypernetwork h and an embedding v_i a client.

    The server sends client i its θ_i, and the client returns the change
    Δθ_i = θ̃_i − θ_i of its local training. The server then makes a step of SGD with
    momentum on φ and v_i along (∂θ_i/∂(φ, v_i))ᵀ Δθ_i, a vector-Jacobian
    product by the chain rule.

    As in the paper, each step is that of one client, which has trained the θ_i of the
    current φ: the server serves a round's clients one after another, in random order.
    A round then takes the sum of their times, and each may take ``round-timeout``.

    h is a multilayer perceptron with ReLU and, for each parameter of the model, a
    linear output, with PyTorch's initial distributions. Each client's gradient is
    clipped to a norm of 50, as in the authors' code. There weight decay and momentum
    also move the v_i of clients that are not sampled; here these do not move. All
    arithmetic is in NumPy, so a server needs no torch.

    A client that is not sampled still gets a new model, since φ has changed; one that
    has never trained gets that of its random v_i. A client that joins later would need
    rounds in which only its v_i trains, so newcomers are not supported. A
    checkpoint holds φ, all v_i, both momenta, and the models of clients that have
    trained.

    Parameters
    ----------
    hypernetwork_width : int, default 100
        Width of h's hidden layers (the authors' code).
    hypernetwork_layers : int, default 3
        Number of h's hidden layers after the first one (the authors' code).
    embedding_width : int, default 0
        Width of v_i; 0 means ⌊1 + n/4⌋ for n clients (the authors' code).
    hypernetwork_learning_rate : float, default 0.01
        Step size of φ and v_i (the authors' code).
    hypernetwork_momentum : float, default 0.9
        Their momentum (the authors' code).
    hypernetwork_weight_decay : float, default 0.001
        Their weight decay (the authors' code).
    **base
        Arguments of `Strategy`.
    """

    hypernetwork_width: int = setting(100, ge=1)
    hypernetwork_layers: int = setting(3, ge=0)
    embedding_width: int = setting(0, ge=0)
    hypernetwork_learning_rate: float = setting(0.01, gt=0)
    hypernetwork_momentum: float = setting(0.9, ge=0, lt=1)
    hypernetwork_weight_decay: float = setting(0.001, ge=0)
    # φ with its momentum, and v_i with its momentum by client
    network: dict[str, Network] = stored("network")
    embeddings: dict[str, Network] = stored("embeddings")
    # Under this key `flwr_frl.predict` finds each client's model.
    models: dict[str, Arrays] = stored("heads")
    # Arrays with the names, shapes and dtypes of the model's
    _like: Arrays

    def _adapt_grid(self, grid: Grid) -> Grid:
        """Return a grid that serves one client after another."""
        return OneByOne(grid, self)

    def _open_round(self, round: Round, grid: Grid) -> list[Message]:
        """Initialise h before the first round."""
        self._like = {name: array.numpy() for name, array in round.record.items()}
        if not self.network:
            width = self.embedding_width or 1 + len(self._run.clients.known) // 4
            hidden = [self.hypernetwork_width] * (self.hypernetwork_layers + 1)
            size = sum(array.size for array in self._like.values())
            rng = np.random.default_rng([self.settings.seed, START])
            values = initial_network([width, *hidden, size], rng)
            self.network["values"] = values
            self.network["momentum"] = {n: np.zeros_like(v) for n, v in values.items()}
        return super()._open_round(round, grid)

    def per_client(self, client: str) -> Arrays:
        """Return θ_i."""
        return self.models.get(client) or self._model(self._embedding(client))

    def _embedding(self, client: str) -> Network:
        """Return a client's v_i and its momentum; v_i is random before it trains."""
        if client in self.embeddings:
            return self.embeddings[client]
        width = int(self.network["values"]["0.weight"].shape[1])
        key = int.from_bytes(client.encode(), "little")
        rng = np.random.default_rng([self.settings.seed, START, key])
        values = rng.standard_normal(width).astype(np.float32)
        return {"values": values, "momentum": np.zeros_like(values)}

    def _model(self, embedding: Network) -> Arrays:
        """Return h(v; φ) as the arrays of a model."""
        flat = outputs(self.network["values"], embedding["values"])[-1]
        ends = np.cumsum([like.size for like in self._like.values()])
        parts = np.split(flat, ends[:-1])
        return {
            name: part.reshape(like.shape).astype(like.dtype)
            for (name, like), part in zip(self._like.items(), parts, strict=True)
        }

    def aggregate(self, round: Round) -> Arrays:
        """Generate the models of trained clients; the shared arrays do not change."""
        for name, embedding in self.embeddings.items():
            self.models[name] = self._model(embedding)
        return round.arrays

    def _make_step(self, reply: Reply) -> None:
        """Make a step of SGD on φ and v_i, unless the result is not finite."""
        network, own = self.network, self._embedding(reply.client)
        flat = np.concatenate([change.ravel() for change in reply.read().values()])
        direction = -flat.astype(np.float32)
        gradients = clipped(pulled_back(network["values"], own["values"], direction))
        rate = np.float32(self.hypernetwork_learning_rate)
        beta = np.float32(self.hypernetwork_momentum)
        decay = np.float32(self.hypernetwork_weight_decay)
        values = {**network["values"], EMBEDDING: own["values"]}
        momentum = {**network["momentum"], EMBEDDING: own["momentum"]}
        for name, gradient in gradients.items():
            slope = gradient + decay * values[name]
            momentum[name] = beta * momentum[name] + slope
            values[name] = values[name] - rate * momentum[name]
        new = {"values": values, "momentum": momentum}
        if all(is_finite(*arrays.values()) for arrays in new.values()):
            own = {name: arrays.pop(EMBEDDING) for name, arrays in new.items()}
            self.embeddings[reply.client], self.network = own, new
        else:
            text = "round %d: the hypernetwork is not finite; the former one stays"
            log(WARNING, text, self._run.round.number)


@dataclass(eq=False, repr=False)
class OneByOne(GridDecorator):
    """A grid that sends a round's training messages one after another.

    The strategy makes a step after each reply, and each client gets the θ_i of the
    current φ.

    Parameters
    ----------
    grid : Grid
        The decorated grid.
    strategy : PFedHN
        The strategy.
    """

    strategy: PFedHN

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies; training messages are sent in random order."""
        messages, strategy, replies = list(messages), self.strategy, list[Message]()
        if any(m.metadata.message_type != MessageType.TRAIN for m in messages):
            return self.grid.send_and_receive(messages, timeout=timeout)
        round, clients = strategy._run.round, strategy._run.clients
        key = strategy.settings.seed, ORDER, round.number
        for i in np.random.default_rng(key).permutation(len(messages)):
            name = clients.name_of(messages[i].metadata.dst_node_id)
            model = to_record(strategy._model(strategy._embedding(name)))
            messages[i].content[ARRAYS] = model
            came = list(self.grid.send_and_receive([messages[i]], timeout=timeout))
            replies += came
            with np.errstate(over="ignore", invalid="ignore"):
                for reply in filter(round.is_valid, came):
                    strategy._make_step(round.accept(reply))
        return replies


def initial_network(widths: Sequence[int], rng: np.random.Generator) -> Network:
    """Return the layers of h, with entries uniform in ±1/√(inputs of the layer).

    Parameters
    ----------
    widths : sequence of int
        Widths of v, of the hidden layers, and of θ.
    rng : numpy.random.Generator
        Draws the entries.

    Returns
    -------
    dict of str to ndarray
        ``0.weight``, of shape (outputs, inputs), ``0.bias``, and so on; float32.
    """
    network = {}
    for i, (inputs, width) in enumerate(pairwise(widths)):
        bound = 1 / np.sqrt(inputs)
        for name, shape in (("weight", (width, inputs)), ("bias", (width,))):
            drawn = rng.uniform(-bound, bound, shape)
            network[f"{i}.{name}"] = drawn.astype(np.float32)
    return network


def outputs(network: Mapping[str, Floats], embedding: Floats) -> list[Floats]:
    """Return v and the output of each layer, the last of which is θ = h(v; φ).

    All layers but the last two are followed by ReLU.
    """
    values, depth = [embedding], len(network) // 2
    for i in range(depth):
        value = network[f"{i}.weight"] @ values[-1] + network[f"{i}.bias"]
        values.append(np.maximum(value, 0) if i < depth - 2 else value)
    return values


def pulled_back(
    network: Mapping[str, Floats], embedding: Floats, direction: Floats
) -> Network:
    """Return (∂θ/∂φ)ᵀ d by layer, and (∂θ/∂v)ᵀ d as ``embedding``."""
    values, depth = outputs(network, embedding), len(network) // 2
    gradients = {}
    for i in reversed(range(depth)):
        if i < depth - 2:
            direction = direction * (values[i + 1] > 0)
        gradients[f"{i}.weight"] = np.outer(direction, values[i])
        gradients[f"{i}.bias"] = direction
        direction = network[f"{i}.weight"].T @ direction
    return {**gradients, EMBEDDING: direction}


def clipped(gradients: Network) -> Network:
    """Return gradients scaled to a joint norm of at most `LARGEST_NORM`."""
    squares = [np.square(g, dtype=np.float64).sum() for g in gradients.values()]
    factor = min(1.0, LARGEST_NORM / (float(np.sqrt(sum(squares))) + 1e-6))
    return {name: g * g.dtype.type(factor) for name, g in gradients.items()}
