"""FLUTE for regression: the linear case's regularizer, with any representation.

FLUTE (Liu et al., ICML 2024) gives its regularizer for classification as one example.
The one below is that of its linear case, in which BᵀB is the second moment of the
features Bᵀx of whitened inputs. Any other representation uses the second moment of its
features instead.
"""

from typing import Any

import numpy as np

from flwr_frl.common.messages import COUPLING
from flwr_frl.common.settings import setting
from flwr_frl.strategies.flute import (
    HEAD_WEIGHT,
    Matrix,
    TrainedHeads,
    warn_if_unbounded,
)
from flwr_frl.strategies.server.replies import Arrays
from flwr_frl.strategies.server.round import Round


class FLUTERegression(
    TrainedHeads, client="flwr_frl.clients.flute_regression:FLUTERegressionClient"
):
    """Average the representations; balance the heads with the features.

    R = γ2 (‖S‖_F² + ‖G‖_F²) − γ1 tr(S G), where S = mean E[ψ(x) ψ(x)ᵀ] over the
    clients' features and G = mean_i H_i H_iᵀ over all heads H_i of shape (k, m). With
    a linear representation and whitened inputs this is the linear case's R, in which
    the mean over the clients takes the place of the sum. For γ1 = 2 γ2, it is
    γ2 ‖S − G‖_F².

    Clients train representation and head with the loss plus mean_x ψ(x)ᵀ A ψ(x) for
    A = 2 γ2 S − γ1 G. Its gradient is that of R at the last round's S and G, as in
    equation 5. The server then makes a step on the returned heads (equation 6):
    H_i ← H_i − 2 η_r (2 γ2 G − γ1 S) H_i. A is sent as ``coupling.matrix``, and clients
    return the second moment of their features in its place. It is 0 in the first round.

    Parameters
    ----------
    learning_rate : float, default 0.01
        Step size η_l of the clients.
    regularizer_learning_rate : float, default 0
        Step size η_r of R; 0 means ``learning-rate``. A is multiplied by η_r / η_l.
        Features with a large second moment need a small one, such as 0.0005; otherwise
        training may diverge.
    gamma1 : float, default 0.25
        Weight γ1 of −tr(S G).
    gamma2 : float, default 0.125
        Weight γ2 of ‖S‖_F² + ‖G‖_F².
    **base
        Arguments of `Strategy`.
    """

    learning_rate: float = setting(0.01, gt=0)
    regularizer_learning_rate: float = setting(0.0, ge=0)
    gamma1: float = setting(0.25, ge=0)
    gamma2: float = setting(0.125, ge=0)

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        warn_if_unbounded(self.gamma1, self.gamma2)

    def begin(self, round: Round) -> None:
        """Require the coupling matrix among the shared arrays."""
        round.need(COUPLING)

    def aggregate(self, round: Round) -> Arrays | None:
        """Average the representations, and make one step on the returned heads."""
        arrays = round.mean()
        if arrays is None:
            return None
        like = arrays[COUPLING]
        moment = np.asarray(like, np.float64)
        heads = self.returned_weights(round)
        self.save_weights(round, heads)
        towards = 2 * self.gamma2 * self.gram() - self.gamma1 * moment
        rate = self.regularizer_learning_rate or self.learning_rate
        # Heads are Hᵀ, of shape (m, k), and the matrix is symmetric.
        improved = heads - 2 * rate * heads @ towards
        self.save_weights(round, improved.astype(heads.dtype))
        coupling = 2 * self.gamma2 * moment - self.gamma1 * self.gram()
        ratio = rate / self.learning_rate
        return {**arrays, COUPLING: (ratio * coupling).astype(like.dtype)}

    def gram(self) -> Matrix:
        """Return G, of shape (k, k): the mean of H_i H_iᵀ over all heads so far."""
        weights = [h[HEAD_WEIGHT].astype(np.float64) for h in self.heads.values()]
        return np.asarray(sum(h.T @ h for h in weights) / len(weights))
