"""Linear regression: on data of one's own, or synthetic with true models φ_i.

Synthetic data: FedRep, section 5.1 (``low-rank``, with φ_i = B* w*_i); FLUTE, section
7.1 (``gaussian``) and appendix C.1 (``decaying``).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from flwr_frl.common.settings import Checked, require, require_drawable, setting
from flwr_frl.task.base import BaseTask
from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.tasks.table import FromTable, TableSettings, TableTask
from flwr_frl.task.types import Loss

Matrix = npt.NDArray[np.float64]


def orthonormal(b: Matrix) -> Matrix:
    """Return an orthonormal basis of the columns of b: Q of its QR decomposition."""
    q: Matrix = np.linalg.qr(b).Q
    return q


def principal_angle_distance(b1: Matrix, b2: Matrix) -> float:
    """Return ‖B̂₁,⊥ᵀ B̂₂‖₂, the distance between two column spaces.

    FedRep, definition 1 (equation 9).

    Parameters
    ----------
    b1, b2 : ndarray, shapes (d, k) and (d, k')
        Two matrices of full column rank.

    Returns
    -------
    float
        From 0 (the first space contains the second) to 1.
    """
    q1, q2 = orthonormal(b1), orthonormal(b2)
    return float(np.linalg.norm(q2 - q1 @ (q1.T @ q2), 2))


class RegressionTask(BaseTask):
    """Linear regression y ≈ wᵀ Bᵀ x, for the linear algorithms and for SGD.

    Subclasses define ``dimension``, ``rank`` and ``seed``, and implement `draw`.
    """

    dimension: int
    rank: int
    seed: int
    # Number of the draw that is the test set, and its size if it is drawn.
    test_draw: int = 2**31
    test_samples: int | None = None

    @abstractmethod
    def draw(
        self, client: int, draw: int = 0, samples: int | None = None
    ) -> tuple[Matrix, Matrix]:
        """Draw examples of a client.

        Parameters
        ----------
        client : int
            Index of the client, from 0.
        draw : int, default 0
            Number of the draw. The same number gives the same examples; 0 is the
            training set.
        samples : int, optional
            Number of examples; that of the client's training set by default.

        Returns
        -------
        x : ndarray, shape (samples, dimension)
            Inputs.
        y : ndarray, shape (samples,)
            Outputs.
        """

    adaptable = False
    classes = ()
    # Outputs and targets have shape (n, 1).
    loss: Loss = staticmethod(nn.functional.mse_loss)

    def initial_model(self) -> SplitModel:
        """Return Bᵀ (rank × dimension) and wᵀ as linear layers without biases."""
        with seeded(self.seed):
            return SplitModel(
                nn.Linear(self.dimension, self.rank, bias=False),
                nn.Linear(self.rank, 1, bias=False),
            )

    def errors(self, client: int, *models: Matrix) -> list[float]:
        """Return the test errors of models, relative to the variance of the targets.

        Parameters
        ----------
        client : int
            The client.
        *models : ndarray, shape (dimension,)
            Learned models.

        Returns
        -------
        list of float
            The variance of the client's test targets, or 1 if it is 0; then the mean
            squared error of each model, divided by it: 1 - R².
        """
        x, y = self.draw(client, self.test_draw, self.test_samples)
        spread = float(y.var()) or 1.0
        return [spread, *(float(np.mean((y - x @ m) ** 2)) / spread for m in models)]

    def compare(
        self, client: int, b: Matrix, w: Matrix
    ) -> tuple[float, int, dict[str, bool | bytes | float | int | str]]:
        """Test a learned model B w on a client's test examples.

        Parameters
        ----------
        client : int
            The client.
        b : ndarray, shape (d, k)
            The representation.
        w : ndarray, shape (k,)
            The client's head.

        Returns
        -------
        loss, num_examples, metrics
            The mean squared error, the number of test examples, and ``r2``.
        """
        _, y = self.draw(client, self.test_draw, self.test_samples)
        if not len(y):
            return 0.0, 0, {}
        spread, error = self.errors(client, b @ w)
        return error * spread, len(y), {"r2": 1 - error}

    def train_examples(self, client: int) -> ExampleSet:
        """Return the examples of a client's draw 0."""
        return _examples(*self.draw(client))

    def test_examples(self, client: int) -> ExampleSet:
        """Return ``test_samples`` examples of a client's draw ``test_draw``."""
        return _examples(*self.draw(client, self.test_draw, self.test_samples))


def _examples(x: Matrix, y: Matrix) -> ExampleSet:
    return ExampleSet(torch.from_numpy(x).float(), torch.from_numpy(y[:, None]).float())


@dataclass(frozen=True)
class LinearTask(Checked, RegressionTask):
    """Linear regression whose true models share a representation, at least nearly.

    Inputs are x ~ N(0, I_d), outputs y = φ_iᵀ x + N(0, noise variance).

    Parameters
    ----------
    dimension : int, default 10
        Input dimension d.
    rank : int, default 2
        Width k of the learned representation, and with ``low-rank`` of the true one.
    samples : int, default 5
        Examples per client: m per round for FedRep, N in total for FLUTE.
    noise_variance : float, default 1e-3
        Variance of the noise on y.
    spectrum : {"low-rank", "gaussian", "decaying"}, default "low-rank"
        ``low-rank``: Φ = B* W* with orthonormal B* (d × k) and standard normal W*
        whose columns are scaled to the norm √k (FedRep, assumption 3). ``gaussian``:
        φ_i ~ N(0, I_d) (FLUTE, figure 1). ``decaying``: Φ = U Λ Vᵀ with the i-th
        singular value 2 min(d, M) / (i + 1) (FLUTE, figure 3).
    num_clients : int, default 20
        Number of clients M; 0, for a single device, counts as one.
    seed : int, default 0
        Seed of Φ and of all examples.

    Raises
    ------
    SettingsError
        If a value is out of range.
    """

    dimension: int = setting(10, ge=1)
    rank: int = setting(2, ge=1)
    samples: int = setting(5, ge=1)
    noise_variance: float = setting(1e-3, ge=0)
    spectrum: Literal["low-rank", "gaussian", "decaying"] = setting("low-rank")
    num_clients: int = 20
    seed: int = setting(0, ge=0)

    # Training draws have the number 0 or that of a round, never `test_draw`.
    test_samples = 200
    defaults: ClassVar[Mapping[str, Any]] = {
        "learning-rate": 0.03,
        "num-server-rounds": 200,
        "fraction-train": 1.0,
    }

    def __post_init__(self) -> None:
        """Validate the settings, and limit the size of the arrays."""
        super().__post_init__()
        allowed = f"from 1 to {self.dimension}, the dimension"
        require(self.rank <= self.dimension, "rank", self.rank, allowed)
        require(self.num_clients >= 0, "num-clients", self.num_clients, "at least 0")
        longest = max(self.rank, self.samples, self.num_clients, self.test_samples)
        product = "dimension times the largest of rank, samples and num-clients"
        require_drawable(self.dimension * longest, product)

    @cached_property
    def _truth(self) -> tuple[Matrix, Matrix]:
        rng = np.random.default_rng([self.seed, 0x7123])
        d, m, k = self.dimension, max(self.num_clients, 1), self.rank
        if self.spectrum == "low-rank":
            basis = orthonormal(rng.standard_normal((d, k)))
            heads = rng.standard_normal((k, m))
            heads *= np.sqrt(k) / np.linalg.norm(heads, axis=0)
            return basis, basis @ heads
        models = rng.standard_normal((d, m))
        u, singular_values, vt = np.linalg.svd(models, full_matrices=False)
        if self.spectrum == "decaying":
            r = min(d, m)
            singular_values = 2 * r / (np.arange(1, r + 1) + 1)
            models = (u * singular_values) @ vt
        return u[:, :k], models

    @property
    def representation(self) -> Matrix:
        """The true representation B*, orthonormal, shape (dimension, rank).

        For spectra of full rank: the optimal one, which consists of the leading left
        singular vectors of Φ.
        """
        return self._truth[0]

    @property
    def models(self) -> Matrix:
        """The true models Φ = [φ_1 … φ_M], shape (dimension, clients)."""
        return self._truth[1]

    @cached_property
    def best_errors(self) -> Matrix:
        """‖φ̂_i - φ_i‖ of each client, for the best rank-k approximation Φ̂ of Φ."""
        u = np.linalg.svd(self.models, full_matrices=False)[0][:, : self.rank]
        residual: Matrix = self.models - u @ (u.T @ self.models)
        return np.asarray(np.linalg.norm(residual, axis=0))

    def draw(
        self, client: int, draw: int = 0, samples: int | None = None
    ) -> tuple[Matrix, Matrix]:
        """Draw x ~ N(0, I_d) and y = φ_iᵀ x + noise."""
        rng = np.random.default_rng([self.seed, 0xD4A3, client, draw])
        n = samples or self.samples
        x = rng.standard_normal((n, self.dimension))
        noise = rng.standard_normal(n) * np.sqrt(self.noise_variance)
        return x, x @ self.models[:, client] + noise

    def compare(
        self, client: int, b: Matrix, w: Matrix
    ) -> tuple[float, int, dict[str, bool | bytes | float | int | str]]:
        """Compare a learned model B w with a client's true one.

        A subclass with another `draw` has no true models; see `RegressionTask.compare`.

        Returns
        -------
        loss : float
            ½ ‖B w − φ_i‖², the expected loss without the noise.
        num_examples : int
            The task's ``samples``.
        metrics : dict
            ``distance``, the principal angle distance from B to B*; ``error``,
            ‖B w − φ_i‖; ``error-best``, that of the best rank-k approximation.
        """
        if type(self).draw is not LinearTask.draw:
            return super().compare(client, b, w)
        error = float(np.linalg.norm(b @ w - self.models[:, client]))
        return (
            error**2 / 2,
            self.samples,
            {
                "distance": principal_angle_distance(b, self.representation),
                "error": error,
                "error-best": float(self.best_errors[client]),
            },
        )


class LinearData(RegressionTask):
    """Linear regression on the data of each client.

    Parameters
    ----------
    train, test : sequence of tuple
        Arrays x (n, dimension) and y (n,) of each client.
    rank : int, default 2
        Width k of the representation.
    seed : int, default 0
        Seed of the initial model.

    Raises
    ------
    SettingsError
        If a value is missing, the widths differ, or the targets are constant.
    """

    def __init__(
        self,
        train: Sequence[tuple[Matrix, Matrix]],
        test: Sequence[tuple[Matrix, Matrix]],
        rank: int = 2,
        seed: int = 0,
    ) -> None:
        self.rank, self.seed, self.dimension = rank, seed, train[0][0].shape[1]
        self._sets = [
            [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in part]
            for part in (train, test)
        ]
        widths = {x.shape[1] for part in self._sets for x, _ in part}
        allowed = "one number for all clients"
        require(len(widths) == 1, "the number of inputs", widths, allowed, "inputs")
        finite = all(
            np.isfinite(a).all() for part in self._sets for xy in part for a in xy
        )
        require(finite, "x or y", "nan", "finite numbers", "missing")
        targets = np.concatenate([y for _, y in self._sets[0]])
        varies = np.ptp(targets) > 0
        require(varies, "y", targets[0], "targets that are not constant", "targets")
        allowed = f"from 1 to {self.dimension}, the number of inputs"
        require(1 <= rank <= self.dimension, "rank", rank, allowed)

    def draw(
        self, client: int, draw: int = 0, samples: int | None = None
    ) -> tuple[Matrix, Matrix]:
        """Return a client's test data for ``test_draw``, else its training data."""
        return self._sets[draw == self.test_draw][client]


@dataclass(frozen=True)
class LinearTableSettings(TableSettings):
    """Columns and standardisation of a table, and width of the representation.

    Parameters
    ----------
    rank : int, default 2
        Width k of the representation.
    """

    rank: int = setting(2, ge=1)


class FromLinearTable(FromTable):
    """Make a `LinearData` task from a table, with a column of ones as last input."""

    _settings_type: ClassVar[type] = LinearTableSettings

    def __call__(self, settings: Any, num_clients: int) -> Any:
        """Return the task; with 0 clients, client 0 has the whole table."""
        table = super().__call__(settings, num_clients)
        is_number = isinstance(table, TableTask) and not table.classes
        is_number = is_number and len(table.shape) == 1
        allowed = 'number for linear regression: set label-type="number", and no window'
        require(is_number, "label-type", settings.label_type, allowed)
        sets = [
            [part(i) for i in range(max(1, num_clients))]
            for part in (table.train_examples, table.test_examples)
        ]
        arrays = [[_with_ones(examples) for examples in part] for part in sets]
        task = LinearData(arrays[0], arrays[1], settings.rank, settings.seed)
        task.client_names, task.notes = table.client_names, table.notes
        return task

    def defaults(self, settings: Any) -> dict[str, Any]:
        """Add the number of inputs, and settings with which the algorithms learn."""
        dataset = self._dataset(settings, False)
        values = {**LinearTask.defaults, **super().defaults(settings)}
        values.pop("max-gradient-norm", None)
        return {**values, "dimension": dataset.train.images.shape[1] + 1}


def _with_ones(examples: ExampleSet) -> tuple[Matrix, Matrix]:
    x, y = examples.inputs.double().numpy(), examples.targets.double().numpy()
    return np.column_stack([x, np.ones(len(x))]), y[:, 0]
