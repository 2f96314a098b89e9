"""Representation transfer (Singh, UCLA 2024, ch. 5): sources and targets."""

from collections.abc import Mapping
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from flwr.common import NDArrays, Scalar
from torch import Tensor, nn

from clients.base import Client, Evaluation, Reply
from clients.device.state import PersonalState
from task.examples import ExampleSet
from task.models import SplitModel
from task.settings import Settings, require
from task.tasks.image import Task
from task.tasks.transfer import TransferTask
from task.training import EVALUATION_BATCH, evaluate, train
from task.transfer import basis, halves, phase_one, phase_two, phase_two_descent


class RepresentationTransferClient(Client):
    """A source fits y ≈ X B w and sends B; a target learns its model in two phases.

    Source, equation 5.3: least squares determine only the product θ = B w, and any B
    whose span holds θ attains the minimum. Here B is the smallest one, k = 1: the
    direction θ / ‖θ‖; the head w = ‖θ‖ stays. With fewer samples than dimensions θ is
    the solution of least norm.

    Target, section 5.3: a head on V from the first half of the samples (phase 1), all
    parameters from the second half (phase 2). The model stays. ``descent-steps`` 0
    solves phase 2 in closed form; otherwise gradient descent makes at most so many
    steps.

    For any task but ``transfer`` the client is a `FeatureTransferClient`.
    """

    shared = ("representation.",)
    personal = ("head.",)

    def __new__(cls, task: Task, *_: Any) -> Self:
        """Return the client for the kind of the task."""
        kind = cls if isinstance(task, TransferTask) else FeatureTransferClient
        return super().__new__(cast(type[Self], kind))

    def __init__(
        self, task: Task, index: int, state: PersonalState, settings: Settings
    ) -> None:
        super().__init__(task, index, state, settings)
        for name in ("num-sources", "descent-steps", "source-epochs"):
            value = int(settings[name])
            require(value >= 0, name, value, "at least 0")
        self.is_source = index < int(settings["num-sources"])

    @property
    def linear(self) -> TransferTask:
        """The task, with its true models."""
        return cast(TransferTask, self.task)

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        """Return what the server needs to know about this client.

        Parameters
        ----------
        config : dict
            Ignored.

        Returns
        -------
        dict
            As `Client.get_properties`, and ``role``: ``source`` or ``target``.
        """
        role = "source" if self.is_source else "target"
        return {**super().get_properties(config), "role": role}

    def get_parameters(self, config: dict[str, Scalar]) -> NDArrays:
        """Return a representation of the shape that sources send.

        Parameters
        ----------
        config : dict
            Ignored.

        Returns
        -------
        list of ndarray
            Zeros of shape (1, d).
        """
        return [np.zeros((1, self.linear.dimension))]

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> Reply:
        """Fit a source's or a target's model.

        Parameters
        ----------
        parameters : list of ndarray
            For a target Vᵀ of shape (q, d).
        config : dict
            ``server-round``.

        Returns
        -------
        parameters : list of ndarray
            A source's Bᵀ of shape (1, d); arrays without values from a target.
        num_examples : int
            Number of training examples.
        metrics : dict
            ``train-loss``: mean squared error on the training examples.
        """
        if self.is_source:
            return self.fit_source(parameters, config)
        kept, loss = self.fit_target(parameters)
        self.state.save(kept, int(config["server-round"]))
        n = len(self.task.train_examples(self.index))
        nothing = [np.empty(0, array.dtype) for array in parameters]
        return nothing, n, {"train-loss": loss}

    def fit_source(self, parameters: NDArrays, config: dict[str, Scalar]) -> Reply:
        """Fit y ≈ X B w and keep w.

        Parameters
        ----------
        parameters, config
            As for `fit`.

        Returns
        -------
        tuple
            As `fit`.
        """
        x, y = self.linear.draw(self.index)
        theta = phase_two(np.zeros(x.shape[1]), x, y)
        norm = float(np.linalg.norm(theta))
        head = {"head.weight": np.array([[norm]])}
        self.state.save(head, int(config["server-round"]))
        loss = float(np.mean((y - x @ theta) ** 2))
        # A model of zeros has no direction.
        return [theta[None] / (norm or 1.0)], len(y), {"train-loss": loss}

    def fit_target(
        self, parameters: NDArrays
    ) -> tuple[dict[str, npt.NDArray[np.generic]], float]:
        """Learn θ₁ from the first half of the samples and θ₂ from the second.

        Parameters
        ----------
        parameters : list of ndarray
            Vᵀ of shape (q, d).

        Returns
        -------
        kept : dict of str to ndarray
            ``phase-1`` and ``phase-2``, of shape (d,).
        loss : float
            Mean squared error of θ₂ on all samples.
        """
        x, y = self.linear.draw(self.index)
        x1, y1, x2, y2 = halves(x, y)
        first = phase_one(parameters[0].T, x1, y1)
        steps = int(self.settings["descent-steps"])
        if steps == 0:
            second = phase_two(first, x2, y2)
        else:
            second = phase_two_descent(first, x2, y2, max_steps=steps)
        loss = float(np.mean((y - x @ second) ** 2))
        return {"phase-1": first, "phase-2": second}, loss

    def evaluate(self, parameters: NDArrays, config: dict[str, Scalar]) -> Evaluation:
        """Test the own model.

        Parameters
        ----------
        parameters : list of ndarray
            What the sources gave.
        config : dict
            Ignored.

        Returns
        -------
        loss : float
            Mean squared error of θ₂ on the test examples.
        num_examples : int
            Number of test examples; 0 without a model.
        metrics : dict
            Errors relative to that of θ* (Table 5.1): ``error`` (phase 2),
            ``error-phase-1``, and ``error-scratch`` of the model of least norm that
            fits all samples without V.
        """
        kept = self.state.load()
        if kept is None:
            return 0.0, 0, {}
        return self.test_target(parameters, kept)

    def test_target(
        self, parameters: NDArrays, kept: Mapping[str, npt.NDArray[Any]]
    ) -> Evaluation:
        """Test what `fit_target` has returned.

        Parameters
        ----------
        parameters : list of ndarray
            What the sources gave.
        kept : mapping of str to ndarray
            The own model.

        Returns
        -------
        tuple
            As `evaluate`.
        """
        x, y = self.linear.draw(self.index)
        scratch = phase_two(np.zeros(x.shape[1]), x, y)
        models = (kept["phase-1"], kept["phase-2"], scratch)
        best, first, second, alone = self.linear.errors(self.index, *models)
        errors: dict[str, Scalar] = {
            "error": second,
            "error-phase-1": first,
            "error-scratch": alone,
        }
        return second * best, len(self.task.test_examples(self.index)), errors


class FeatureTransferClient(RepresentationTransferClient):
    """The same for models that are not linear, which the theory does not cover.

    A source trains its whole model for ``source-epochs`` and sends the representation
    φ_i. A target's features are [φ_1(x) … φ_m(x)], projected onto an orthonormal basis
    of what they span on its own training examples (the principal directions whose
    singular values are above ``rank-tolerance`` times the largest). It trains a linear
    head on them for ``head-epochs`` and keeps basis and head. The representations are
    not trained further: there is no phase 2.
    """

    def get_parameters(self, config: dict[str, Scalar]) -> NDArrays:
        """Return the representation of the common initial model.

        Parameters
        ----------
        config : dict
            Ignored.

        Returns
        -------
        list of ndarray
            In the order of ``names(shared)``.
        """
        return Client.get_parameters(self, config)

    def fit_source(self, parameters: NDArrays, config: dict[str, Scalar]) -> Reply:
        """Train the whole model and keep the head.

        Parameters
        ----------
        parameters : list of ndarray
            The common initial representation.
        config : dict
            ``server-round``.

        Returns
        -------
        tuple
            As `Client.send`; the representation only.
        """
        self.receive(parameters)
        loss = self.train("all", int(self.settings["source-epochs"]))
        self.keep(config)
        return self.send(loss)

    def fit_target(
        self, parameters: NDArrays
    ) -> tuple[dict[str, npt.NDArray[np.generic]], float]:
        """Train a head on the features of all sources.

        Parameters
        ----------
        parameters : list of ndarray
            The m sources' arrays, each of shape (m, …).

        Returns
        -------
        kept : dict of str to ndarray
            ``basis`` of shape (features of all sources, q), ``head.weight`` and
            ``head.bias``.
        loss : float
            Mean loss over the last epoch.
        """
        examples = self.task.train_examples(self.index).without_augmentation()
        features = self.features(parameters, examples)
        tolerance = float(self.settings["rank-tolerance"])
        v = torch.from_numpy(basis([features.double().numpy().T], tolerance)).float()
        outputs = len(self.task.classes) or examples.targets.shape[1]
        model = SplitModel(nn.Identity(), nn.Linear(v.shape[1], outputs))
        epochs = int(self.settings["head-epochs"])
        projected = ExampleSet(features @ v, examples.targets)
        loss = train(model, "head", projected, self.task.loss, epochs, self.sgd)
        head = {name: value.numpy() for name, value in model.state_dict().items()}
        return {"basis": v.numpy(), **head}, loss

    @torch.no_grad()
    def features(self, parameters: NDArrays, examples: ExampleSet) -> Tensor:
        """Return [φ_1(x) … φ_m(x)] of examples.

        Parameters
        ----------
        parameters : list of ndarray
            The m sources' arrays, each of shape (m, …).
        examples : ExampleSet
            The examples.

        Returns
        -------
        Tensor, shape (n, m k)
            A row for each example.
        """
        names = self.names(self.shared)
        columns = []
        for source in zip(*parameters, strict=True):
            state = {
                name: torch.from_numpy(np.array(value))
                for name, value in zip(names, source, strict=True)
            }
            self.model.load_state_dict(state, strict=False)
            self.model.eval()
            batches = examples.batches(EVALUATION_BATCH)
            rows = [self.model.representation(x).flatten(1) for x, _ in batches]
            columns.append(torch.cat(rows))
        # A source whose features are no numbers shall not spoil the others'.
        return torch.nan_to_num(torch.cat(columns, dim=1), 0.0, 0.0, 0.0)

    def test_target(
        self, parameters: NDArrays, kept: Mapping[str, npt.NDArray[Any]]
    ) -> Evaluation:
        """Test the own head on the features of all sources.

        Parameters
        ----------
        parameters : list of ndarray
            The m sources' arrays, each of shape (m, …).
        kept : mapping of str to ndarray
            As `fit_target` returned it.

        Returns
        -------
        loss : float
            Mean loss on the test examples.
        num_examples : int
            Number of test examples.
        metrics : dict
            ``accuracy``, 0 to 1, where targets are classes.
        """
        examples = self.task.test_examples(self.index)
        if len(examples) == 0:
            return 0.0, 0, {}
        own = {name: torch.from_numpy(np.array(value)) for name, value in kept.items()}
        v, weight, bias = own["basis"], own["head.weight"], own["head.bias"]
        model = SplitModel(nn.Identity(), nn.Linear(v.shape[1], len(weight)))
        model.head.load_state_dict({"weight": weight, "bias": bias})
        projected = ExampleSet(
            self.features(parameters, examples) @ v, examples.targets
        )
        loss, accuracy = evaluate(model, projected, self.task.loss)
        classes = not examples.targets.is_floating_point()
        return loss, len(examples), {"accuracy": accuracy} if classes else {}
