"""FLUTE (Liu et al., ICML 2024): the client trains, the server keeps the heads."""

from collections.abc import Callable
from functools import cached_property
from typing import cast

import numpy as np
from flwr.common import NDArrays, Scalar
from torch import Tensor, nn

from clients.base import Client, Evaluation, Reply, class_mask
from clients.device.state import PersonalState
from task.base import Matrix
from task.models import SplitModel
from task.neural_collapse import HeadRegularizer, neural_collapse
from task.settings import Settings, SettingsError, require
from task.tasks.image import Task
from task.tasks.linear import LinearTask
from task.training import TrainingDivergedError


class FLUTEClient(Client):
    """Algorithm 2, client side: head and representation come from the server.

    The loss is CE + λ1 ‖ψ(x)‖² + λ2 ‖H‖_F² + λ3 NC_i(H) (equation 10), with λ1 on the
    squared norm of the whole batch's features, as in the authors' code.
    """

    regularizer: HeadRegularizer = staticmethod(neural_collapse)

    @cached_property
    def classes(self) -> Tensor:
        """Which classes this client has, bool of shape (1, m)."""
        return class_mask(self.task, self.index, self.linear_head())

    def linear_head(self) -> nn.Linear:
        """Return the head.

        Returns
        -------
        nn.Linear
            The head.

        Raises
        ------
        SettingsError
            If the model's head is not one linear layer.
        """
        if not isinstance(self.model.head, nn.Linear):
            raise SettingsError(
                f"FLUTE needs a head that is one linear layer; this model's is a "
                f"{type(self.model.head).__name__} (head-layers is "
                f"{self.settings['head-layers']})"
            )
        return self.model.head

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        """Return what the server needs to know, with the classes of this client.

        Parameters
        ----------
        config : dict
            Ignored.

        Returns
        -------
        dict
            As `Client.get_properties`, and ``classes``: for each class 1 or 0.
        """
        mask = "".join(str(int(has)) for has in self.classes[0])
        return {**super().get_properties(config), "classes": mask}

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> Reply:
        """Train head and representation together for ``representation-epochs``.

        Parameters
        ----------
        parameters : list of ndarray
            The shared representation and this client's head from the server.
        config : dict
            ``server-round``.

        Returns
        -------
        tuple
            As `Client.send`: representation and head.
        """
        self.receive(parameters)
        return self.send(self.train_jointly())

    def train_jointly(self) -> float:
        """Train all with the regularised loss.

        Returns
        -------
        float
            Mean cross-entropy over the last epoch.
        """
        feature_weight = float(self.settings["feature-weight"])

        def penalty(features: Tensor, model: SplitModel) -> Tensor:
            return feature_weight * features.square().sum() + self.head_penalty(
                features, model
            )

        epochs = int(self.settings["representation-epochs"])
        return self._explained(lambda: self.train("all", epochs, penalty))

    def head_penalty(self, features: Tensor, model: SplitModel) -> Tensor:
        """Return λ2 ‖H‖_F² + λ3 NC_i(H).

        Parameters
        ----------
        features : Tensor
            Ignored.
        model : SplitModel
            The model.

        Returns
        -------
        Tensor
            A scalar.
        """
        head = cast(nn.Linear, model.head).weight
        collapse = self.regularizer(head[None], self.classes)[0]
        return (
            float(self.settings["head-weight"]) * head.square().sum()
            + float(self.settings["nc-weight"]) * collapse
        )

    def _explained(self, training: Callable[[], float]) -> float:
        try:
            return training()
        except TrainingDivergedError as error:
            weights = ", ".join(
                f"{name} {self.settings[name]}"
                for name in ("feature-weight", "head-weight", "nc-weight")
            )
            raise TrainingDivergedError(f"{error}; so may {weights}") from None


class FLUTEStarClient(FLUTEClient):
    """FLUTE*: ``head-epochs`` more epochs of the head alone.

    The paper has them after the joint epochs, the authors' code before them
    (``head-epochs-order``), which is better: see ``benchmarks/flute_table.py``.
    """

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Settings
    ) -> None:
        super().__init__(task, index, state, settings)
        if isinstance(task, LinearTask):
            raise SettingsError("flute-star has no linear case; task linear has flute")
        order = settings["head-epochs-order"]
        require(
            order in ("before", "after"), "head-epochs-order", order, "before or after"
        )

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> Reply:
        """Train head and representation together, and the head alone.

        Parameters
        ----------
        parameters : list of ndarray
            The shared representation and this client's head from the server.
        config : dict
            ``server-round``.

        Returns
        -------
        tuple
            As `Client.send`: representation and head.
        """
        order = self.settings["head-epochs-order"]
        self.receive(parameters)
        if order == "before":
            self._train_head()
        loss = self.train_jointly()
        if order == "after":
            self._train_head()
        return self.send(loss)

    def _train_head(self) -> None:
        epochs = int(self.settings["head-epochs"])
        self._explained(lambda: self.train("head", epochs, self.head_penalty))


class FLUTELinearClient(Client):
    """Algorithm 1, client side: both gradients of the squared loss.

    L_i = 1/(2N) Σ (xᵀ B w_i − y)², over the same N examples in every round; the ½ is
    the convention with which γ1 = 1/4 and γ2 = 1/8 balance B and W.
    """

    @property
    def linear(self) -> LinearTask:
        """The task."""
        return cast(LinearTask, self.task)

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> Reply:
        """Return ∇_B L_i and ∇_{w_i} L_i in the places of B and w_i.

        Parameters
        ----------
        parameters : list of ndarray
            Bᵀ of shape (k, d) and w_iᵀ of shape (1, k).
        config : dict
            Ignored.

        Returns
        -------
        tuple
            Gradients in the same shapes, N and the loss.
        """
        b, w = parameters[0].T, parameters[1][0]
        x, y = self.linear.draw(self.index)
        residual = x @ (b @ w) - y
        towards = x.T @ residual / len(y)
        gradients: list[Matrix] = [np.outer(w, towards), (b.T @ towards)[None]]
        loss = float(residual @ residual) / (2 * len(y))
        return list(gradients), len(y), {"train-loss": loss}

    def evaluate(self, parameters: NDArrays, config: dict[str, Scalar]) -> Evaluation:
        """Compare B w_i with the truth.

        Parameters
        ----------
        parameters : list of ndarray
            Bᵀ and w_iᵀ.
        config : dict
            Ignored.

        Returns
        -------
        tuple
            As `LinearTask.judge`.
        """
        return self.linear.judge(self.index, parameters[0].T, parameters[1][0])
