"""FLUTE (Liu et al., ICML 2024): the server keeps every client's head.

In the under-parameterised regime, where the representation is narrower than the rank of
the clients' true models, averaging locally optimal representations is not globally
optimal; so the server improves all heads together.
"""

from logging import WARNING
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from strategies.heads import HEAD, HeadsOnServer
from strategies.server.replies import Arrays, check_arrays, mean, to_record
from task.settings import SettingsError, require

if TYPE_CHECKING:
    from task.neural_collapse import HeadRegularizer

Matrix = npt.NDArray[np.float64]
WEIGHT = "head.weight"


class FLUTE(HeadsOnServer):
    """Algorithm 2: mean of the representations, one step on Σ NC_i of the heads.

    Parameters
    ----------
    server_learning_rate : float, default 0.5
        Step size on 1/n Σ_i NC_i(H_i) over the n sampled clients (the authors' code
        divides by n and uses 0.5).
    regularizer : HeadRegularizer, optional
        What the server lowers; `task.neural_collapse.neural_collapse` by default. The
        clients' is `FLUTEClient.regularizer`.
    **base
        As for `BaseStrategy`.

    Raises
    ------
    SettingsError
        If the step size is negative.
    """

    def __init__(
        self,
        *,
        server_learning_rate: float = 0.5,
        regularizer: "HeadRegularizer | None" = None,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        require(
            server_learning_rate >= 0,
            "server-learning-rate",
            server_learning_rate,
            "at least 0",
        )
        self.server_learning_rate = server_learning_rate
        self.regularizer = regularizer
        self.initial_head: Arrays = {}
        self._classes: dict[str, npt.NDArray[np.bool_]] = {}
        self._refused: set[str] = set()

    def identify(self, grid: Grid) -> list[int]:
        """Ask who is there; refuse clients that do not tell their classes.

        Parameters
        ----------
        grid : Grid
            The grid.

        Returns
        -------
        list of int
            As `BaseStrategy.identify`.
        """
        return [node for node in super().identify(grid) if self._knows_classes(node)]

    def _knows_classes(self, node: int) -> bool:
        name = self.name_of(node)
        if name in self._classes:
            return True
        told = self.participants[node].properties.get("classes", "")
        mask = str(told)
        right_length = len(mask) == len(self.initial_head.get(WEIGHT, mask))
        if mask and set(mask) <= {"0", "1"} and "1" in mask and right_length:
            self._classes[name] = np.array([c == "1" for c in mask])
            return True
        if name not in self._refused:
            self._refused.add(name)
            log(
                WARNING,
                "client %s takes no part: its classes are %r; they must be a 0 or 1 "
                "for each class of the head, with a 1",
                name,
                told,
            )
        return False

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return the initial representation, and keep the initial head.

        Parameters
        ----------
        grid : Grid
            The grid.

        Returns
        -------
        ArrayRecord
            The representation.

        Raises
        ------
        SettingsError
            If no client answers, or the model has no linear head.
        """
        whole = super().initialize(grid)
        names = [name for name in whole if name.startswith("head.")]
        if WEIGHT not in names or whole[WEIGHT].numpy().ndim != 2:
            raise SettingsError("FLUTE needs a model whose head is one linear layer")
        self.initial_head = {name: whole[name].numpy() for name in names}
        self._classes.clear()
        return ArrayRecord({n: a for n, a in whole.items() if n not in names})

    def head(self, name: str) -> Arrays:
        """Return a client's current head.

        Parameters
        ----------
        name : str
            The client.

        Returns
        -------
        dict of str to ndarray
            The initial head for a client that has not trained yet.
        """
        return self.heads.get(name, self.initial_head)

    def aggregate(
        self, server_round: int, replies: list[Message]
    ) -> ArrayRecord | None:
        """Average the representations and make one step on the returned heads.

        Parameters
        ----------
        server_round : int
            The round.
        replies : list of Message
            Checked replies.

        Returns
        -------
        ArrayRecord or None
            The new representation.
        """
        arrays = mean(self.weighted(replies, self.arrayrecord_key))
        if arrays is None:
            return None
        names = [self.name_of(reply.metadata.src_node_id) for reply in replies]
        heads = [check_arrays(reply, HEAD, self._expected[HEAD]) for reply in replies]
        weights = self.improve(
            np.stack([head[WEIGHT] for head in heads]),
            np.stack([self._classes[name] for name in names]),
        )
        for name, head, weight in zip(names, heads, weights, strict=True):
            # Copies: the received arrays are views of whole messages.
            self.heads[name] = {n: a.copy() for n, a in head.items()} | {WEIGHT: weight}
        return to_record(arrays)

    def improve(
        self, heads: npt.NDArray[Any], classes: npt.NDArray[np.bool_]
    ) -> npt.NDArray[Any]:
        """Return heads after one step on the regularizer, all at once.

        Parameters
        ----------
        heads : ndarray, shape (n, m, k)
            Weights of the sampled clients' heads.
        classes : ndarray of bool, shape (n, m)
            Which classes each client has.

        Returns
        -------
        ndarray, shape (n, m, k)
            The new weights.
        """
        # Here alone the server computes with a model, so here alone it needs torch.
        import torch

        from task.neural_collapse import neural_collapse, step

        improved = step(
            torch.from_numpy(heads),
            torch.from_numpy(classes),
            self.regularizer or neural_collapse,
            self.server_learning_rate,
        )
        return improved.numpy()

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the state, with the initial and all other heads.

        Returns
        -------
        arrays, values
            As `BaseStrategy.state_dict`.
        """
        arrays, values = super().state_dict()
        arrays |= {
            f"initial/{name}": array for name, array in self.initial_head.items()
        }
        return arrays, values

    def load_state_dict(self, arrays: Arrays, values: dict[str, Any]) -> None:
        """Go back to a saved state.

        Parameters
        ----------
        arrays, values
            As `state_dict` returned them.
        """
        super().load_state_dict(arrays, values)
        self.initial_head = {
            key.removeprefix("initial/"): array
            for key, array in arrays.items()
            if key.startswith("initial/")
        }


class FLUTEStar(FLUTE):
    """FLUTE with clients that train their heads for more epochs."""


class FLUTELinear(HeadsOnServer):
    """Algorithm 1: a linear representation B and the heads W = [w_1 … w_M].

    B ← B − η [Σ_i ∇_B L_i + 2 B (2 γ2 BᵀB − γ1 WWᵀ)],
    w_i ← w_i − η [∇_{w_i} L_i + 2 (2 γ2 WWᵀ − γ1 BᵀB) w_i]  (equations 5 and 6),
    all gradients at the old (B, W), and sums over the clients, not means.

    Parameters
    ----------
    dimension : int, default 10
        Input dimension d.
    rank : int, default 2
        Width k of the representation.
    learning_rate : float, default 0.01
        Step size η.
    gamma1 : float, default 0.25
        Weight γ1 of −‖BW‖_F².
    gamma2 : float, default 0.125
        Weight γ2 of ‖BᵀB‖_F² + ‖WWᵀ‖_F².
    initial_scale : float, default 0
        Standard deviation α of all entries of B⁰ and W⁰; 0 means 1/(10 d), the largest
        of theorem 5.1.
    **base
        As for `BaseStrategy`.

    Raises
    ------
    SettingsError
        If a value is out of its range; γ1 > 2 γ2 makes the loss unbounded below.
    """

    def __init__(
        self,
        *,
        dimension: int = 10,
        rank: int = 2,
        learning_rate: float = 0.01,
        gamma1: float = 0.25,
        gamma2: float = 0.125,
        initial_scale: float = 0.0,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        require(learning_rate > 0, "learning-rate", learning_rate, "above 0")
        require(initial_scale >= 0, "initial-scale", initial_scale, "at least 0")
        if not 0 <= gamma1 <= 2 * gamma2:
            raise SettingsError(
                f"gamma1 is {gamma1} and gamma2 is {gamma2}; gamma1 must be from 0 to "
                "2 gamma2: beyond, the loss has no lower bound and FLUTE diverges"
            )
        self.dimension, self.rank = dimension, rank
        self.learning_rate = learning_rate
        self.gamma1, self.gamma2 = gamma1, gamma2
        self.scale = initial_scale or 1 / (10 * dimension)

    def _random(self, shape: tuple[int, int], name: str) -> Matrix:
        key = int.from_bytes(name.encode(), "little")
        rng = np.random.default_rng([self.seed, 0xF1, key])
        return self.scale * rng.standard_normal(shape)

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return B⁰ᵀ with entries from N(0, α²).

        Parameters
        ----------
        grid : Grid
            Ignored.

        Returns
        -------
        ArrayRecord
            ``representation.weight`` of shape (k, d).
        """
        start = self._random((self.rank, self.dimension), "representation")
        return to_record({"representation.weight": start})

    def head(self, name: str) -> Arrays:
        """Return a client's current head w_i.

        Parameters
        ----------
        name : str
            The client.

        Returns
        -------
        dict of str to ndarray
            ``head.weight`` of shape (1, k); from N(0, α²) before its first round.
        """
        return self.heads.get(name) or {WEIGHT: self._random((1, self.rank), name)}

    def aggregate(
        self, server_round: int, replies: list[Message]
    ) -> ArrayRecord | None:
        """Make the step of equations 5 and 6, over the clients that replied.

        Parameters
        ----------
        server_round : int
            The round.
        replies : list of Message
            Checked replies with the gradients.

        Returns
        -------
        ArrayRecord
            The new Bᵀ.
        """
        key = self.arrayrecord_key
        names = [self.name_of(reply.metadata.src_node_id) for reply in replies]
        b: Matrix = self._expected[key]["representation.weight"].numpy().T
        w: Matrix = np.stack([self.head(name)[WEIGHT][0] for name in names], axis=1)
        grad_b, grad_w = np.zeros_like(b), np.zeros_like(w)
        for i, reply in enumerate(replies):
            arrays = check_arrays(reply, key, self._expected[key])
            grad_b += np.asarray(arrays["representation.weight"].T, np.float64)
            own = check_arrays(reply, HEAD, self._expected[HEAD])
            grad_w[:, i] = own[WEIGHT][0]
        bb, ww = b.T @ b, w @ w.T
        new_b = b - self.learning_rate * (
            grad_b + 2 * b @ (2 * self.gamma2 * bb - self.gamma1 * ww)
        )
        new_w = w - self.learning_rate * (
            grad_w + 2 * (2 * self.gamma2 * ww - self.gamma1 * bb) @ w
        )
        for i, name in enumerate(names):
            self.heads[name] = {WEIGHT: new_w[:, i][None].copy()}
        return to_record({"representation.weight": new_b.T})
