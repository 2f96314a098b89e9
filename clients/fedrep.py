"""FedRep (Collins et al., ICML 2021): head first, then the representation."""

from typing import Any, cast

import numpy as np
from flwr.common import NDArrays

from flwr_frl.clients.base import Client, TaskOf
from flwr_frl.clients.device.groups import Arrays, Config, EvaluateResult, FitResult
from flwr_frl.common.messages import SERVER_ROUND
from flwr_frl.common.settings import Checked, setting
from flwr_frl.task.models import SplitModel
from flwr_frl.task.tasks.linear import Matrix, RegressionTask
from flwr_frl.task.training.sgd import SGD


class FedRepClient(Client, supports_example_dp=True):
    """Algorithm 1: many head updates, then the representation; the head is personal.

    Parameters
    ----------
    head_epochs : int, default 10
        Epochs τ_h of the head, with the representation frozen (algorithm 1).
    """

    shared = "representation"
    personal = "head"
    head_epochs: int = setting(10, ge=0)

    def update(self) -> float:
        """Train the head for ``head-epochs``, then φ for ``representation-epochs``."""
        self.train("head", self.settings.head_epochs)
        return self.train("representation", self.settings.representation_epochs)


class FedRepLinearClient(Client, requires=(TaskOf(RegressionTask),)):
    """Algorithm 2: linear representation B (d × k), head w, squared loss.

    f_i(w, B) = 1/(2m) Σ_j (y_j − wᵀ Bᵀ x_j)².

    Parameters
    ----------
    learning_rate : float, default 0.01
        Step size η of B, and of w if ``head_steps`` is above 0.
    fresh_samples : bool, default True
        Whether each round draws a fresh batch of m examples.
    head_steps : int, default 0
        Gradient steps of the head; 0 solves for it exactly, 1 and 10 are the paper's
        GD-GD and 10GD-GD (section 5.1).
    """

    shared: Any = "representation"
    personal: Any = "head"
    task: RegressionTask
    _settings_type = Checked
    learning_rate: float = setting(SGD.learning_rate, gt=0)
    fresh_samples: bool = setting(True)
    head_steps: int = setting(0, ge=0)

    def get_parameters(self, config: Config) -> NDArrays:
        """Return a random Bᵀ of shape (k, d) with orthonormal rows."""
        rng = np.random.default_rng([self.task.seed, 0x1417])
        start = rng.standard_normal((self.task.dimension, self.task.rank))
        return [np.linalg.qr(start).Q.T]

    def statistics(self, config: Config) -> Arrays:
        """Return ``moments``: Z_i = 1/m Σ_j y_j² x_j x_jᵀ, of shape (d, d)."""
        x, y = self.task.draw(self._index)
        return {"moments": (x * y[:, None] ** 2).T @ x / len(y)}

    def fit(self, parameters: NDArrays, config: Config) -> FitResult:
        """Fit the head, make one gradient step on B, and send Bᵀ, of shape (k, d).

        ``server-round`` selects the fresh batch of m examples. The loss is that of the
        new head w_i and the received B.
        """
        b = parameters[0].T
        fresh = int(config[SERVER_ROUND]) if self.settings.fresh_samples else 0
        x, y = self.task.draw(self._index, fresh)
        w = self._head(b, x, y)
        residual = x @ (b @ w) - y
        gradient = np.outer(x.T @ residual, w) / len(y)
        b = b - self.settings.learning_rate * gradient
        self._state.save({"head.weight": w[None]}, int(config[SERVER_ROUND]))
        loss = float(residual @ residual) / (2 * len(y))
        return [np.ascontiguousarray(b.T)], len(y), {"train-loss": loss}

    def _head(self, b: Matrix, x: Matrix, y: Matrix) -> Matrix:
        if self.settings.head_steps == 0:
            return solve_head(b, x, y)
        w, features = self._saved_head(), x @ b
        for _ in range(self.settings.head_steps):
            gradient = features.T @ (features @ w - y) / len(y)
            w = w - self.settings.learning_rate * gradient
        return w

    def _saved_head(self) -> Matrix:
        saved = self._state.load()
        if saved is None:
            return np.zeros(self.task.rank)
        return cast(Matrix, saved["head.weight"][0])

    def _receive(self, parameters: NDArrays, config: Config) -> None:
        """Receive B, of shape (d, k), and load the saved head w, of shape (k,)."""
        super()._receive(parameters, config)
        self.b, self.w = parameters[0].T, self._saved_head()

    def personalize(self) -> None:
        """Solve for the head on B with as many examples as the task has."""
        x, y = self.task.draw(self._index)
        few = len(self.task.train_examples(self._index))
        self.w = solve_head(self.b, x[:few], y[:few])

    def _test(self, model: SplitModel) -> EvaluateResult:
        """Compare B w with the true model, as `RegressionTask.compare`."""
        return self.task.compare(self._index, self.b, self.w)


def solve_head(b: Matrix, x: Matrix, y: Matrix) -> Matrix:
    """Return argmin_w ‖y − X B w‖, the exact head for a representation B.

    Parameters
    ----------
    b : ndarray, shape (d, k)
        Representation B.
    x : ndarray, shape (m, d)
        Inputs X.
    y : ndarray, shape (m,)
        Outputs.

    Returns
    -------
    ndarray, shape (k,)
        The head w; of least norm if m < k.
    """
    return np.asarray(np.linalg.lstsq(x @ b, y, rcond=None)[0])
