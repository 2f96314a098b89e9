"""FedRep (Collins et al., ICML 2021): head first, then the representation."""

from typing import cast

import numpy as np
from flwr.common import NDArrays, Scalar

from clients.base import Client, Evaluation, Reply
from clients.device.state import PersonalState
from task.base import Matrix
from task.settings import Settings, require
from task.tasks.image import Task
from task.tasks.linear import LinearTask


class FedRepClient(Client):
    """Algorithm 1: many head updates, then the representation; the head stays here."""

    shared = ("representation.",)
    personal = ("head.",)

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> Reply:
        """Train the own head for ``head-epochs``, then φ for ``representation-epochs``.

        Parameters
        ----------
        parameters : list of ndarray
            The shared representation φ.
        config : dict
            ``server-round``.

        Returns
        -------
        tuple
            As `Client.send`; the representation only.
        """
        self.receive(parameters)
        self.train("head", int(self.settings["head-epochs"]))
        loss = self.train("representation", int(self.settings["representation-epochs"]))
        self.keep(config)
        return self.send(loss)


class FedRepLinearClient(Client):
    """Algorithm 2: linear representation B (d × k), head w, squared loss.

    f_i(w, B) = 1/(2m) Σ_j (y_j − wᵀ Bᵀ x_j)². Every round has a fresh batch of m
    examples, or with ``fresh-samples`` false the same one. ``head-steps`` 0 solves for
    the head exactly; 1 and 10 gradient steps are the paper's GD-GD and 10GD-GD.
    """

    shared = ("representation.",)
    personal = ("head.",)

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Settings
    ) -> None:
        super().__init__(task, index, state, settings)
        steps = int(settings["head-steps"])
        require(steps >= 0, "head-steps", steps, "at least 0")

    @property
    def linear(self) -> LinearTask:
        """The task, with its true representation."""
        return cast(LinearTask, self.task)

    def get_parameters(self, config: dict[str, Scalar]) -> NDArrays:
        """Return a random Bᵀ with orthonormal rows, or this client's moments.

        Parameters
        ----------
        config : dict
            ``moments`` (default false): whether the server asks for
            Z_i = 1/m Σ_j y_j² x_j x_jᵀ.

        Returns
        -------
        list of ndarray
            Bᵀ of shape (k, d), or Z_i of shape (d, d).
        """
        if config.get("moments", False):
            x, y = self.linear.draw(self.index)
            return [(x * y[:, None] ** 2).T @ x / len(y)]
        rng = np.random.default_rng([self.linear.seed, 0x1417])
        start = rng.standard_normal((self.linear.dimension, self.linear.rank))
        return [np.linalg.qr(start).Q.T]

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> Reply:
        """Solve for the head, then make one gradient step on B.

        Parameters
        ----------
        parameters : list of ndarray
            Bᵀ, of shape (k, d).
        config : dict
            ``server-round``: which fresh batch, from 1.

        Returns
        -------
        tuple
            B_iᵀ, m and the loss at (w_i, B).
        """
        b = parameters[0].T
        fresh = int(config["server-round"]) if self.settings["fresh-samples"] else 0
        x, y = self.linear.draw(self.index, fresh)
        w = self._head(b, x, y)
        residual = x @ (b @ w) - y
        gradient = np.outer(x.T @ residual, w) / len(y)
        b = b - self.sgd.learning_rate * gradient
        self.state.save({"head.weight": w[None]}, int(config["server-round"]))
        loss = float(residual @ residual) / (2 * len(y))
        return [np.ascontiguousarray(b.T)], len(y), {"train-loss": loss}

    def _head(self, b: Matrix, x: Matrix, y: Matrix) -> Matrix:
        steps = int(self.settings["head-steps"])
        if steps == 0:
            return solve_head(b, x, y)
        w = self._own_head()
        features = x @ b
        for _ in range(steps):
            w = w - self.sgd.learning_rate * features.T @ (features @ w - y) / len(y)
        return w

    def _own_head(self) -> Matrix:
        kept = self.state.load()
        if kept is None:
            return np.zeros(self.linear.rank)
        return cast(Matrix, kept["head.weight"][0])

    def evaluate(self, parameters: NDArrays, config: dict[str, Scalar]) -> Evaluation:
        """Compare B and the own head with the truth.

        Parameters
        ----------
        parameters : list of ndarray
            Bᵀ, of shape (k, d).
        config : dict
            Ignored.

        Returns
        -------
        tuple
            As `LinearTask.judge`.
        """
        return self.linear.judge(self.index, parameters[0].T, self._own_head())


def solve_head(b: Matrix, x: Matrix, y: Matrix) -> Matrix:
    """Return argmin_w ‖y − X B w‖, what a new client fits on a learned B.

    Parameters
    ----------
    b : ndarray, shape (d, k)
        The representation.
    x : ndarray, shape (m, d)
        Inputs.
    y : ndarray, shape (m,)
        Outputs.

    Returns
    -------
    ndarray, shape (k,)
        The head; the one of least norm where m < k.
    """
    return np.asarray(np.linalg.lstsq(x @ b, y, rcond=None)[0])
