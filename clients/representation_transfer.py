"""Representation transfer (Singh, UCLA 2024, ch. 5): sources and targets."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.common import NDArrays

from flwr_frl.clients.base import Arrays, Client, Config, Evaluation, Reply
from flwr_frl.clients.device.parameter_groups import Groups
from flwr_frl.clients.device.traits import TaskOf
from flwr_frl.common.messages import SERVER_ROUND
from flwr_frl.common.settings import Checked, setting
from flwr_frl.task.tasks.transfer import TransferTask
from flwr_frl.task.transfer import (
    Role,
    halves,
    is_source,
    phase_one,
    phase_two,
    phase_two_descent,
)


@dataclass(frozen=True)
class RoleSettings(Checked):
    """Roles of the clients.

    Parameters
    ----------
    num_sources : int, default 10
        Clients below this index are sources.
    role : {"auto", "source", "target"}, default "auto"
        Role of a device, set in its node config. ``auto`` decides by the client's
        index, which is 0 on every device without a ``partition-id``.
    """

    num_sources: int = setting(TransferTask.num_sources, ge=0, per_device=True)
    role: Role = setting(TransferTask.role, per_device=True)


class TransferClient(Client):
    """A source, which sends its representation, or a target, which uses all of them."""

    shared: Any = "representation"

    def _takes(self, shape: tuple[int, ...], initial: tuple[int, ...]) -> bool:
        """Return True: targets receive all representations, stacked or as a basis."""
        return True

    @property
    def is_source(self) -> bool:
        """Whether this client is a source."""
        role, sources = self.settings.role, self.settings.num_sources
        return is_source(role, self._index, sources)

    @property
    def sent(self) -> Groups:
        """The representation for a source; nothing for a target."""
        return self.shared if self.is_source else ()

    def get_properties(self, config: Config) -> Config:
        """Add ``role``: ``source`` or ``target``."""
        role = "source" if self.is_source else "target"
        return {**super().get_properties(config), "role": role}

    def fit(self, parameters: NDArrays, config: Config) -> Reply:
        """Fit a source's model and send its representation, or fit a target's model.

        A source receives the initial representation, a target those of all sources,
        combined.
        """
        if self.is_source:
            return self.fit_source(parameters, config)
        model, loss = self.fit_target(parameters)
        self._state.save(model, int(config[SERVER_ROUND]))
        return [], len(self.task.train_examples(self._index)), {"train-loss": loss}

    def fit_source(self, parameters: NDArrays, config: Config) -> Reply:
        """Fit a source's model and save its head; see `fit`."""
        raise NotImplementedError

    def fit_target(self, parameters: NDArrays) -> tuple[Arrays, float]:
        """Fit a target's model to the sources' arrays; return it and its loss."""
        raise NotImplementedError

    def evaluate(self, parameters: NDArrays, config: Config) -> Evaluation:
        """Test this target's model; report no examples before it has one."""
        model = self._state.load()
        return (0.0, 0, {}) if model is None else self.test_target(parameters, model)

    def test_target(self, parameters: NDArrays, saved: Arrays) -> Evaluation:
        """Test a model returned by `fit_target`; see `Client.evaluate`."""
        raise NotImplementedError


class RepresentationTransferClient(TransferClient, requires=(TaskOf(TransferTask),)):
    """Linear regression: sources fit y ≈ X B w and send B; targets learn in two phases.

    Source (equation 5.3): least squares determine only the product θ = B w, and any B
    whose span contains θ attains the minimum. We use the smallest: the direction
    B = θ / ‖θ‖, while the head w = ‖θ‖ stays on the client. With k outputs
    (``source-outputs``), B has the directions of the k products as columns. With fewer
    samples than dimensions, θ is the least-norm solution.

    Target (section 5.3): phase 1 fits a head on V to the first half of the samples, and
    phase 2 fits all parameters to the second half (see ``descent_steps``). The model
    stays on the client.

    Tasks other than ``transfer`` use the `FeatureTransferClient`.

    Parameters
    ----------
    descent_steps : int, default 0
        Maximum number of gradient steps in phase 2; 0 uses the closed form.
    """

    task: TransferTask
    _settings_type = RoleSettings
    descent_steps: int = setting(0, ge=0)

    def get_parameters(self, config: Config) -> NDArrays:
        """Return zeros in the shape (k, d) of the sources' Bᵀ."""
        return [np.zeros((self.task.source_outputs, self.task.dimension))]

    def fit_source(self, parameters: NDArrays, config: Config) -> Reply:
        """Fit y ≈ X B w, save wᵀ of shape (k, k), and send Bᵀ of shape (k, d)."""
        x, y = self.task.draw(self._index)
        columns = y.reshape(len(y), -1)
        thetas = phase_two(np.zeros((x.shape[1], columns.shape[1])), x, columns).T
        norms = [float(np.linalg.norm(theta)) for theta in thetas]
        head = {"head.weight": np.diag(norms)}
        self._state.save(head, int(config[SERVER_ROUND]))
        loss = float(np.mean((columns - x @ thetas.T) ** 2))
        # θ = 0 has no direction; its column of B is then 0, too.
        scaled = zip(thetas, norms, strict=True)
        directions = np.array([theta / (norm or 1.0) for theta, norm in scaled])
        return [directions], len(y), {"train-loss": loss}

    def fit_target(self, parameters: NDArrays) -> tuple[Arrays, float]:
        """Return θ₁ as ``phase-1`` and θ₂ as ``phase-2``, given Vᵀ of shape (q, d).

        Both have the shape (d,). The loss is the mean squared error of θ₂ on all
        samples.
        """
        x, y = self.task.draw(self._index)
        x1, y1, x2, y2 = halves(x, y)
        first = phase_one(parameters[0].T, x1, y1)
        steps = self.settings.descent_steps
        if steps == 0:
            second = phase_two(first, x2, y2)
        else:
            second = phase_two_descent(first, x2, y2, max_steps=steps)
        loss = float(np.mean((y - x @ second) ** 2))
        return {"phase-1": first, "phase-2": second}, loss

    def test_target(self, parameters: NDArrays, saved: Arrays) -> Evaluation:
        """Compare this target's model with θ*.

        The loss is the mean squared error of θ₂ on the test examples. The metrics are
        errors relative to that of θ* (Table 5.1): ``error`` (phase 2),
        ``error-phase-1``, and ``error-scratch`` of the least-norm model fitted to all
        samples without V.
        """
        x, y = self.task.draw(self._index)
        scratch = phase_two(np.zeros(x.shape[1]), x, y)
        models: Any = saved["phase-2"], saved["phase-1"], scratch
        best, *errors = self.task.errors(self._index, *models)
        names = "error", "error-phase-1", "error-scratch"
        metrics: Config = dict(zip(names, errors, strict=True))
        return errors[0] * best, len(self.task.test_examples(self._index)), metrics
