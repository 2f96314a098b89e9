"""FLUTE (Liu et al., ICML 2024): the server keeps every client's head.

In the under-parameterised regime, where the representation is narrower than the rank of
the clients' true models, averaging locally optimal representations is not globally
optimal; therefore the server also updates the heads, all of them together.
"""

from collections.abc import Mapping
from logging import WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from flwr_frl.common.arrays import is_finite
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.messages import NUM_EXAMPLES
from flwr_frl.common.settings import setting
from flwr_frl.common.text import one_line
from flwr_frl.strategies.base import Arrays, Round, Strategy, stored
from flwr_frl.strategies.fedrep import REPRESENTATION_WEIGHT, gaussian_start
from flwr_frl.strategies.server.clients import ClientInfo
from flwr_frl.strategies.server.replies import Floats, to_record

HEAD_WEIGHT = "head.weight"


class HeadsOnServer(Strategy):
    """Send each client its head with the shared arrays, and store the returned one.

    Heads belong to clients by name. A client that has not trained yet has the initial
    head, which is stored once, so memory is one head for each client that has trained:
    4 k m + 4 m bytes of float32 for k features and m classes.
    """

    heads: dict[str, Arrays] = stored("heads")
    initial_head: Arrays = stored("initial")

    def save_heads(self, round: Round, stacked: Mapping[str, npt.NDArray[Any]]) -> None:
        """Store new heads of the round's clients; one that is not finite is dropped.

        ``stacked`` has the arrays of all heads, in the order of the replies.
        """
        for i, reply in enumerate(round.replies):
            head = {name: array[i].copy() for name, array in stacked.items()}
            if is_finite(*head.values()):
                self.heads[reply.client] = head
            else:
                label = self._run.clients.label(reply.client)
                log(WARNING, "the step on client %s's head is not finite", label)


class TrainedHeads(HeadsOnServer):
    """Heads that start as the head of the initial model, which is one linear layer."""

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return the initial representation, and keep the initial head."""
        return self._split(super().initialize(grid))

    def _open_round(self, round: Round, grid: Grid) -> list[Message]:
        """Split the head from a whole model, with which Flower's ``start`` begins."""
        if any(name.startswith("head.") for name in round.record):
            round.record = self._split(round.record)
        return super()._open_round(round, grid)

    def _split(self, whole: ArrayRecord) -> ArrayRecord:
        """Store a model's head as the initial one, and return the rest."""
        names = [name for name in whole if name.startswith("head.")]
        if HEAD_WEIGHT not in names:
            line = "needs a head that is one linear layer; this one has"
            raise SettingsError(f"{type(self).__name__} {line} {names}")
        self.initial_head = {name: whole[name].numpy() for name in names}
        return ArrayRecord({n: a for n, a in whole.items() if n not in names})

    def per_client(self, client: str) -> Arrays:
        """Return a client's head, the initial one if it has not trained yet."""
        return self.heads.get(client, self.initial_head)


class FLUTE(
    TrainedHeads,
    client="flwr_frl.clients.flute:FLUTEClient",
    # A head returns to its own client only.
    uses_mean="only",
):
    """Algorithm 2: mean of the representations, one step on Σ NC_i of the heads.

    Parameters
    ----------
    server_learning_rate : float, default 0.5
        Step size on 1/n Σ_i NC_i(H_i) over the n sampled clients (the authors' code
        divides by n and uses 0.5).
    **base
        Arguments of `Strategy`.
    """

    server_learning_rate: float = setting(0.5, ge=0)

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        # Masks of the clients' classes, as last reported, by name.
        self._classes: dict[str, str] = {}
        self._run.clients.refusal_of = self._refusal_of

    def _refusal_of(self, client: ClientInfo) -> str:
        """Return "" if a client reports its classes, or else why it is refused.

        Without training examples it has no class, and is only tested.
        """
        reported = client.properties.get("classes", "")
        mask, trains = str(reported), client.properties.get(NUM_EXAMPLES) != 0
        right_length = len(mask) == len(self.initial_head.get(HEAD_WEIGHT, mask))
        if set(mask) <= {"0", "1"} and ("1" in mask or not trains) and right_length:
            self._classes[client.name] = mask
            return ""
        return (
            f"its classes are {one_line(repr(reported))}; they must be a 0 or 1 for "
            "each class of the head, with a 1: 'classes' in the record 'properties'"
        )

    def aggregate(self, round: Round) -> Arrays:
        """Average the representations and make one step on the returned heads."""
        arrays = round.mean()
        heads = {name: round.stack(name) for name in self.initial_head}
        masks = [list(self._classes[reply.client]) for reply in round.replies]
        weights = self.improve(heads[HEAD_WEIGHT], np.array(masks) == "1")
        self.save_heads(round, {**heads, HEAD_WEIGHT: weights})
        return arrays

    def improve(
        self, heads: npt.NDArray[Any], classes: npt.NDArray[np.bool_]
    ) -> npt.NDArray[Any]:
        """Return the heads, of shape (n, m, k), after one step on Σ NC_i.

        ``classes``, bool of shape (n, m), is True for the classes that a client has.
        """
        # Imported here: no other server code needs torch.
        import torch

        from flwr_frl.task.models.neural_collapse import step

        stacked = torch.from_numpy(heads), torch.from_numpy(classes)
        return step(*stacked, self.server_learning_rate).numpy()


class FLUTEStar(FLUTE, client="flwr_frl.clients.flute:FLUTEStarClient"):
    """FLUTE whose clients train their heads for more epochs; has no linear case."""


class FLUTELinear(
    HeadsOnServer,
    client="flwr_frl.clients.flute:FLUTELinearClient",
    # Replies are gradients, which are summed.
    replies_are_changes=True,
    uses_mean="never",
):
    """Algorithm 1: a linear representation B and the heads W = [w_1 … w_M].

    B ← B − η_l Σ_i ∇_B L_i − 2 η_r B (2 γ2 BᵀB − γ1 WWᵀ),
    w_i ← w_i − η_l ∇_{w_i} L_i − 2 η_r (2 γ2 WWᵀ − γ1 BᵀB) w_i  (equations 5 and 6),
    all gradients at the old (B, W), and sums over the clients, not means. With
    γ1 > 2 γ2 the regularizer has no lower bound and ‖BW‖_F usually diverges (appendix
    C.1).

    Parameters
    ----------
    dimension : int, default 10
        Input dimension d.
    rank : int, default 2
        Width k of the representation.
    learning_rate : float, default 0.01
        Step size η_l = η_r, of the clients' losses and of the regularizer with the
        weights γ1 and γ2, as in the paper's theorems and experiments.
    gamma1 : float, default 0.25
        Weight γ1 of −‖BW‖_F².
    gamma2 : float, default 0.125
        Weight γ2 of ‖BᵀB‖_F² + ‖WWᵀ‖_F².
    initial_scale : float, default 0
        Standard deviation α of all entries of B⁰ and W⁰; 0 means 1/(10 d), the largest
        value in theorem 5.1.
    **base
        Arguments of `Strategy`.
    """

    dimension: int = setting(10, ge=1)
    rank: int = setting(2, ge=1)
    learning_rate: float = setting(0.01, gt=0)
    gamma1: float = setting(0.25, ge=0)
    gamma2: float = setting(0.125, ge=0)
    initial_scale: float = setting(0.0, ge=0)

    def _random(self, shape: tuple[int, int], name: str) -> Floats:
        scale = self.initial_scale or 1 / (10 * self.dimension)
        return gaussian_start(self.settings.seed, name, shape, scale)

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return B⁰ᵀ of shape (k, d) with entries from N(0, α²)."""
        start = self._random((self.rank, self.dimension), "representation")
        return to_record({REPRESENTATION_WEIGHT: start})

    def per_client(self, client: str) -> Arrays:
        """Return w_i of shape (1, k); from N(0, α²) before the client's first round."""
        head = self.heads.get(client)
        return head or {HEAD_WEIGHT: self._random((1, self.rank), client)}

    def begin(self, round: Round) -> None:
        """Expect both gradients, in float64, and no head in return."""
        round.returns_own = False
        like = {**round.arrays, HEAD_WEIGHT: np.zeros((1, self.rank))}
        round.expected = {f"gradient.{name}": array for name, array in like.items()}

    def aggregate(self, round: Round) -> Arrays | None:
        """Make the step of equations 5 and 6, over the clients that replied."""
        b = round.arrays[REPRESENTATION_WEIGHT].T
        heads = [self.per_client(r.client)[HEAD_WEIGHT][0] for r in round.replies]
        w: Floats = np.stack(heads, axis=1)
        grad_b = sum(round.stack(f"gradient.{REPRESENTATION_WEIGHT}")).T
        grad_w = round.stack(f"gradient.{HEAD_WEIGHT}")[:, 0].T
        bb, ww = b.T @ b, w @ w.T
        reg_b = 2 * b @ (2 * self.gamma2 * bb - self.gamma1 * ww)
        reg_w = 2 * (2 * self.gamma2 * ww - self.gamma1 * bb) @ w
        new_b = b - self.learning_rate * (grad_b + reg_b)
        new_w = w - self.learning_rate * (grad_w + reg_w)
        if not is_finite(new_b):
            return None
        self.save_heads(round, {HEAD_WEIGHT: new_w.T[:, None]})
        return {REPRESENTATION_WEIGHT: new_b.T}
