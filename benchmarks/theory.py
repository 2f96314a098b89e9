"""Step sizes, sample sizes and rates of the theorems on linear representations.

Each function computes a theorem's quantity from the true models, so it applies to
synthetic tasks such as `flwr_frl.task.tasks.linear.LinearTask`. FedRep: Collins et al.,
ICML 2021, theorem 1. SRPFL: Tziotis et al., TMLR 2023, theorem 4.7 and equations (9)
and (12). FLUTE: Liu et al., ICML 2024, theorems 5.1 and 5.5 and equation (16).
Representation transfer: Singh, UCLA 2024, theorem 6.
Absolute constants that the theorems leave open are arguments, 1 by default.
"""

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

# Largest number of subsets of clients whose singular values are all computed.
SUBSETS = 10_000


def subset_singular_values(heads: Matrix, size: int) -> tuple[float, float]:
    """Return σ̄_min,* and σ̄_max,*: extremes over all subsets of n clients.

    They are the smallest σ_min and the largest σ_max of W_I / √n (FedRep, theorem 1;
    SRPFL, equation 9).

    Parameters
    ----------
    heads : ndarray, shape (clients, k)
        The true heads W*.
    size : int
        Number of participating clients n, from 1 to the number of clients.

    Returns
    -------
    tuple of float
        σ̄_min,* and σ̄_max,*: exact for at most 10,000 subsets; otherwise an estimate
        from that many random subsets. σ̄_min,* is 0 if n < k.
    """
    clients, k = heads.shape
    if math.comb(clients, size) <= SUBSETS:
        subsets = np.array(list(combinations(range(clients), size)))
    else:
        rng = np.random.default_rng([clients, size])
        order = rng.random((SUBSETS, clients)).argpartition(size - 1, axis=1)
        subsets = order[:, :size]
    chosen = heads[subsets]
    # The eigenvalues of W_Iᵀ W_I / n are the squares of the singular values.
    squares = np.linalg.eigvalsh(np.einsum("sik,sil->skl", chosen, chosen) / size)
    smallest = math.sqrt(max(float(squares.min()), 0.0)) if size >= k else 0.0
    return smallest, math.sqrt(float(squares.max()))


@dataclass(frozen=True)
class FedRepTheory:
    """Quantities of theorem 1 of FedRep and of theorem 4.7 of SRPFL.

    Parameters
    ----------
    heads : ndarray, shape (clients, k)
        The true heads W*, with rows of norm √k.
    size : int
        Number of participating clients: r n for FedRep, the n of a stage for SRPFL.
    initial_distance : float
        dist(B⁰, B*) in [0, 1); E_0 = 1 − dist².
    """

    heads: Matrix
    size: int
    initial_distance: float

    @property
    def e0(self) -> float:
        """E_0 = 1 − dist²(B⁰, B*)."""
        return 1 - self.initial_distance**2

    @property
    def sigmas(self) -> tuple[float, float]:
        """σ̄_min,* and σ̄_max,* (`subset_singular_values`)."""
        return subset_singular_values(self.heads, self.size)

    @property
    def step_size(self) -> float:
        """The largest η of FedRep's theorem 1, 1 / (4 σ̄²_max,*)."""
        return 1 / (4 * self.sigmas[1] ** 2)

    @property
    def srpfl_step_size(self) -> float:
        """The largest η of SRPFL's theorem 4.7, 1 / (8 σ̄²_max,*)."""
        return 1 / (8 * self.sigmas[1] ** 2)

    def samples(self, dimension: int, constant: float = 1.0) -> float:
        """Return m of theorem 1: c (κ⁴ k³ log(rn) / E_0² + κ⁴ k² d / (E_0² rn)).

        κ = σ̄_max,* / σ̄_min,*; the paper divides σ̄_max,* by itself, a misprint. The
        result is infinite if σ̄_min,* is 0.
        """
        smallest, largest = self.sigmas
        if smallest == 0:
            return math.inf
        kappa4: float = (largest / smallest) ** 4
        k, n = int(self.heads.shape[1]), self.size
        terms = k**3 * math.log(n) + k**2 * dimension / n
        return float(constant * kappa4 * terms / self.e0**2)

    def srpfl_samples(
        self, dimension: int, noise_variance: float = 0.0, constant: float = 1.0
    ) -> float:
        """Return m of SRPFL's theorem 4.7, where ``size`` is n_0.

        m = c_0 (1 + σ²) k³ κ⁴ / E_0² · max(log N, d / n_0).
        """
        smallest, largest = self.sigmas
        if smallest == 0:
            return math.inf
        clients, k = map(int, self.heads.shape)
        kappa4: float = (largest / smallest) ** 4
        factor = (1 + noise_variance) * k**3 * kappa4 / self.e0**2
        return float(constant * factor) * max(math.log(clients), dimension / self.size)

    def distance(self, rounds: int, step_size: float | None = None) -> float:
        """Return the bound (10) on dist(B^T, B*) after T rounds.

        (1 − η E_0 σ̄²_min,* / 2)^{T/2} dist(B⁰, B*).
        """
        eta = self.step_size if step_size is None else step_size
        rate = 1 - eta * self.e0 * self.sigmas[0] ** 2 / 2
        return float(rate ** (rounds / 2) * self.initial_distance)

    def contraction(self, step_size: float | None = None) -> float:
        """Return a of SRPFL's theorem 4.7, ½ η E_0 σ̄²_min,*.

        `flwr_frl.strategies.srpfl.theory_stages` derives stage lengths from it.
        """
        eta = self.srpfl_step_size if step_size is None else step_size
        return eta * self.e0 * self.sigmas[0] ** 2 / 2


def srpfl_target_error(
    clients: int, initial_nodes: int, contraction: float, c_hat: float
) -> float:
    """Return the target error ε of equation (12) of SRPFL, for ĉ in (1, 2).

    ε = ĉ a / (√(N / n_0 (1 − a)) (1 − √(1 − a))): ĉ times the distance to which the
    last stage, with all N clients, converges. The text of the paper lost the formula's
    numerator; this one is the limit of contraction (11), times ĉ.
    """
    a = contraction
    spread = math.sqrt(clients / initial_nodes * (1 - a))
    return c_hat * a / (spread * (1 - math.sqrt(1 - a)))


@dataclass(frozen=True)
class FLUTETheory:
    """Quantities of theorems 5.1 and 5.5 of FLUTE.

    Parameters
    ----------
    models : ndarray, shape (d, M)
        The true models Φ, with singular values λ_1 ≥ λ_2 ≥ ….
    rank : int
        Width k of the representation, with λ_k > λ_{k+1}.
    """

    models: Matrix
    rank: int

    @property
    def singular_values(self) -> Matrix:
        """All λ_i and a final 0."""
        values = np.linalg.svd(self.models, compute_uv=False)
        return np.append(values, 0.0)

    @property
    def gap(self) -> float:
        """Δ = 2 (λ_k − λ_{k+1})."""
        values = self.singular_values
        return float(2 * (values[self.rank - 1] - values[self.rank]))

    @property
    def step_size(self) -> float:
        """The largest η = η_l = η_r of theorem 5.1, Δ² / (228 λ_1³).

        The proof's lemmas (A.10) need Δ² / (36 (2 λ_1)³) = Δ² / (288 λ_1³), because
        their λ* are twice the singular values of Φ; 228 is the number in the theorem.
        """
        return float(self.gap**2 / (228 * self.singular_values[0] ** 3))

    @property
    def initial_scale(self) -> float:
        """The largest α of theorem 5.1, 1 / (10 d)."""
        return 1 / (10 * len(self.models))

    def first_rounds(self, b: Matrix, w: Matrix, step_size: float | None = None) -> int:
        """Return T_R (equation 16), the rounds to the region of fast convergence.

        T_R = log(Δ / (4 σ_k²(Θ_k))) / (2 log(1 + η/2 (2 λ_k − Δ/2))), rounded up, where
        Θ_k = (U_kᵀ B + (W V_k)ᵀ) / √2 for the k leading singular vectors of Φ.

        Parameters
        ----------
        b : ndarray, shape (d, k)
            B⁰.
        w : ndarray, shape (k, M)
            W⁰.
        step_size : float, optional
            η, by default `step_size`.
        """
        eta = self.step_size if step_size is None else step_size
        u, values, vt = np.linalg.svd(self.models, full_matrices=False)
        k = self.rank
        theta = (u[:, :k].T @ b + (w @ vt[:k].T).T) / math.sqrt(2)
        smallest = float(np.linalg.svd(theta, compute_uv=False)[-1])
        growth = math.log(1 + eta / 2 * (2 * float(values[k - 1]) - self.gap / 2))
        rounds = math.log(self.gap / (4 * smallest**2)) / (2 * growth)
        return max(0, math.ceil(rounds))

    def error(
        self, rounds: int, step_size: float | None = None, constant: float = 1.0
    ) -> float:
        """Return the bound (8) on the mean of ‖B w_i − B* w_i*‖ after t > T_R rounds.

        c_2 λ_1² √k / (√M η Δ²) · (1 − η Δ / 16)^t.
        """
        eta = self.step_size if step_size is None else step_size
        rate = 1 - eta * self.gap / 16
        return constant * self._scale(eta) * float(rate**rounds)

    def rounds(
        self, error: float, step_size: float | None = None, constant: float = 1.0
    ) -> int:
        """Return the rounds of theorem 5.1 after which the error is at most ε.

        log(ε √M η Δ² / (c' λ_1² √k)) / log(1 − η Δ / 16), rounded up.
        """
        eta = self.step_size if step_size is None else step_size
        rate = 1 - eta * self.gap / 16
        ratio = error / (constant * self._scale(eta))
        return max(0, math.ceil(math.log(ratio) / math.log(rate)))

    def _scale(self, eta: float) -> float:
        """Return λ_1² √k / (√M η Δ²)."""
        largest, clients = self.singular_values[0], self.models.shape[1]
        above = largest**2 * math.sqrt(self.rank)
        return float(above / (math.sqrt(clients) * eta * self.gap**2))


def effective_ranks(eigenvalues: Matrix, k: int) -> tuple[float, float]:
    """Return r_k(Σ) and R_k(Σ) of a covariance matrix (theorem 6).

    r_k = Σ_{i>k} λ_i / λ_{k+1} and R_k = (Σ_{i>k} λ_i)² / Σ_{i>k} λ_i², with the
    eigenvalues λ_1 ≥ … ≥ λ_d and 0 ≤ k < d.
    """
    tail = np.sort(eigenvalues)[::-1][k:]
    total = float(tail.sum())
    return total / float(tail[0]), total**2 / float(tail @ tail)


def benign_index(eigenvalues: Matrix, samples: int, b: float = 1.0) -> int | None:
    """Return k* = min {k ≥ 0: r_k(Σ) ≥ b n} (theorem 6); None if there is no such k.

    ``samples`` is the n of phase 2. The theorem leaves its constant b > 1 open.
    """
    for k in range(len(eigenvalues)):
        if effective_ranks(eigenvalues, k)[0] >= b * samples:
            return k
    return None
