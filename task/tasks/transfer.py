"""The task ``transfer``: sources and targets of Table 5.1 (Singh, UCLA 2024, ch. 5)."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flwr_frl.common.settings import Checked, require, require_drawable, setting
from flwr_frl.task.tasks.linear import Matrix, RegressionTask
from flwr_frl.task.transfer import Role, is_source


@dataclass(frozen=True)
class TransferTask(Checked, RegressionTask):
    """Source and target tasks with a nearly common representation (section 5.5.1).

    V* (d × q) has standard normal entries. Sources have θ*_i = V* w_i with x ~ N(0, I).
    Targets have θ* = u + v with u = V* w, v ~ N(0, σ_T² I) and x ~ N(0, Σ_T), where Σ_T
    has the eigenvalues exp(−j/τ) + 1e-4. Outputs are y = xᵀ θ* + N(0, σ²).

    We made these choices where the dissertation is not specific:

    - Heads are w ~ N(0, I/q), so that E‖u‖² = d.
    - The ratio in dB is the power ratio 10 log₁₀ (E‖u‖² / E‖v‖²), so that
      σ_T² = 10^(−ratio/10).
    - v is not projected out of the span, which contains q/d of its power; the
      dissertation states only "Gaussian with covariance I σ_T²".
    - Σ_T is diagonal, without loss of generality: V*, w and v are rotation invariant.
    - The inputs of sources, which Table 5.1 does not need, are white. Assumption 11
      then holds with r = 1 / λ_max(Σ_T).
    - σ² is a parameter.

    A client's data depend on the seed and its index, and are drawn on demand.

    Parameters
    ----------
    dimension : int, default 10
        Input dimension d.
    rank : int, default 2
        Dimension q of the sources' span.
    num_sources : int, default 10
        Clients below this index are sources, the others are targets.
    source_samples : int, default 100
        Training samples of a source, n_S.
    target_samples : int, default 8
        Training samples of a target for both phases, n_T.
    ratio_db : float, default 20
        In-out mixture ratio in dB.
    tau : float, default 1
        Decay τ of the eigenvalues.
    noise_variance : float, default 1e-3
        σ² > 0, since errors are relative to the error of θ*.
    seed : int, default 0
        Seed of all random values.
    role : {"auto", "source", "target"}, default "auto"
        Role of every client, for a device's own data; ``auto`` decides by the index.

    Raises
    ------
    SettingsError
        If a value is out of range.
    """

    dimension: int = setting(10, ge=1)
    rank: int = setting(2, ge=1)
    num_sources: int = setting(10, ge=0)
    source_samples: int = setting(100, ge=1)
    # At least one per phase.
    target_samples: int = setting(8, ge=2)
    ratio_db: float = setting(20.0)
    tau: float = setting(1.0, gt=0)
    noise_variance: float = setting(1e-3, gt=0)
    seed: int = setting(0, ge=0)
    role: Role = setting("auto")

    test_draw = 1
    test_samples = 500

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        allowed = f"from 1 to {self.dimension}, the dimension"
        require(self.rank <= self.dimension, "rank", self.rank, allowed)
        samples = self.source_samples, self.target_samples, self.test_samples
        longest = max(self.rank, *samples)
        what = "dimension times the largest of rank and samples"
        require_drawable(self.dimension * longest, what)

    @cached_property
    def span(self) -> Matrix:
        """V*, shape (dimension, rank)."""
        rng = np.random.default_rng([self.seed, 0x7A51])
        return rng.standard_normal((self.dimension, self.rank))

    @cached_property
    def eigenvalues(self) -> Matrix:
        """Eigenvalues of Σ_T, shape (dimension,)."""
        decay: Matrix = np.exp(-np.arange(1, self.dimension + 1) / self.tau)
        return decay + 1e-4

    def is_source(self, client: int) -> bool:
        """Return whether a client is a source."""
        return is_source(self.role, client, self.num_sources)

    def model(self, client: int) -> Matrix:
        """Return a client's true model θ*, shape (dimension,)."""
        rng = np.random.default_rng([self.seed, 0x7A52, client])
        u: Matrix = self.span @ (rng.standard_normal(self.rank) / np.sqrt(self.rank))
        if self.is_source(client):
            return u
        return u + rng.standard_normal(self.dimension) * 10 ** (-self.ratio_db / 20)

    def draw(
        self, client: int, draw: int = 0, samples: int | None = None
    ) -> tuple[Matrix, Matrix]:
        """Return samples of a client: draw 0 for training, draw 1 for testing."""
        source = self.is_source(client)
        n = samples or (self.source_samples if source else self.target_samples)
        rng = np.random.default_rng([self.seed, 0x7A53, client, draw])
        x = rng.standard_normal((n, self.dimension))
        if not source:
            x *= np.sqrt(self.eigenvalues)
        outputs = x @ self.model(client)
        noise = rng.standard_normal(outputs.shape) * np.sqrt(self.noise_variance)
        return x, outputs + noise

    def errors(self, client: int, *models: Matrix) -> list[float]:
        """Return the test errors of models relative to that of θ* (Table 5.1).

        The first is the mean squared error of θ* on 500 test samples.
        """
        x, y = self.draw(client, 1, self.test_samples)
        mse = [float(np.mean((y - x @ m) ** 2)) for m in (self.model(client), *models)]
        return [mse[0], *(error / mse[0] for error in mse[1:])]
