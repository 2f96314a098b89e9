"""FedRep (Collins et al., ICML 2021)."""

from collections import Counter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from flwr_frl.common.messages import NUM_EXAMPLES, STATISTICS
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Round, Strategy
from flwr_frl.strategies.server.replies import to_record

REPRESENTATION_WEIGHT = "representation.weight"


def gaussian_start(
    seed: int, name: str, shape: tuple[int, int], scale: float
) -> npt.NDArray[np.float64]:
    """Return a matrix with entries from N(0, scale²), fixed by a seed and a name.

    FLUTE's start (algorithm 1, line 2): the same seed gives FLUTE and FedRep the same
    B⁰, as in FedRep(RI) of its figures 1 and 3.
    """
    key = int.from_bytes(name.encode(), "little")
    return scale * np.random.default_rng([seed, 0xF1, key]).standard_normal(shape)


def mean_statistic(
    strategy: Strategy,
    grid: Grid,
    name: str,
    nodes: list[int] | None = None,
    received: ArrayRecord | None = None,
) -> npt.NDArray[Any]:
    """Return the mean of an array that clients compute before they train.

    These are results of the clients' ``statistics``, combined as models are: with the
    weights and the rule of the run, or privately. Arrays of other shapes or types than
    most are left out.

    Parameters
    ----------
    strategy : Strategy
        The strategy of the run.
    grid : Grid
        Its grid.
    name : str
        Name of the array.
    nodes : list of int, optional
        Nodes to ask, by default all.
    received : ArrayRecord, optional
        Shared arrays that the clients receive first.

    Raises
    ------
    SettingsError
        If no client sends one.
    """
    run, settings = strategy._run, strategy.settings
    nodes = strategy._identify(grid) if nodes is None else nodes
    answers = run.clients.arrays(grid, nodes, STATISTICS, received)
    sent = {client: r[name].numpy() for client, r in answers if name in r}
    kinds = Counter((array.shape, array.dtype) for array in sent.values())
    if not sent:
        raise run.clients.nothing_sent(name)
    usual = max(kinds, key=lambda kind: (kinds[kind], str(kind)))
    sent = {n: a for n, a in sent.items() if (a.shape, a.dtype) == usual}
    arrays: list[Arrays] = [{name: array} for array in sent.values()]
    centre = {name: np.zeros(*usual)}
    if run.privacy:
        names = [run.clients.name_of(node) for node in nodes]
        return (run.privacy.mean(names, arrays, centre) or centre)[name]
    weights = [1.0] * len(sent)
    if settings.weighting == "examples":
        known = {c.name: c.properties for c in run.clients.known.values()}
        weights = [float(known[client].get(NUM_EXAMPLES, 1)) for client in sent]
    return (strategy._apply_rule(weights, arrays, centre) or centre)[name]


class FedRep(Strategy, client="flwr_frl.clients.fedrep:FedRepClient"):
    """Algorithm 1: average the representations; heads stay with the clients."""


class FedRepLinear(
    FedRep, client="flwr_frl.clients.fedrep:FedRepLinearClient", uses_mean="only"
):
    """Algorithm 2: a linear representation B, sent as Bᵀ of shape (k, d).

    Parameters
    ----------
    rank : int, default 2
        Width k of the representation.
    initialization : {"moments", "random", "gaussian"}, default "moments"
        ``moments``: B⁰ = the k leading eigenvectors of mean_i Z_i, where every client
        sends Z_i once. With ``server-dp-noise``, Z_i is clipped to ``server-dp-clip``,
        and the mean is noisy (SRPFL, remark 4.11) and counts as one more release.
        ``random``: an orthonormal B⁰ from the seed. ``gaussian``: entries from
        N(0, 1/(10 d)²), as FLUTE's B⁰ with the same seed; FLUTE's figures call this
        FedRep(RI).
    orthonormalize : bool, default False
        Replace the mean by the Q of its QR decomposition, as in SRPFL.
    **base
        Arguments of `Strategy`.
    """

    rank: int = setting(2, ge=1)
    initialization: Literal["moments", "random", "gaussian"] = setting("moments")
    orthonormalize: bool = setting(False)

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return B⁰ᵀ of shape (k, d)."""
        if self.initialization != "moments":
            start = super().initialize(grid)
            if self.initialization == "random":
                return start
            k, d = start[REPRESENTATION_WEIGHT].numpy().shape
            seed, scale = self.settings.seed, 1 / (10 * d)
            b = gaussian_start(seed, "representation", (k, d), scale)
            return to_record({REPRESENTATION_WEIGHT: b})
        moment = mean_statistic(self, grid, "moments").astype(np.float64)
        # Noise is not symmetric, but `eigh` reads one triangle only.
        moment = (moment + moment.T) / 2 if self._run.privacy else moment
        # `eigh` returns the eigenvalues in ascending order.
        vectors = np.linalg.eigh(moment).eigenvectors[:, ::-1]
        return to_record({REPRESENTATION_WEIGHT: vectors[:, : self.rank].T})

    def aggregate(self, round: Round) -> Arrays:
        """Return the mean of the B_i, orthonormalised with ``orthonormalize``."""
        arrays = round.mean()
        if not self.orthonormalize:
            return arrays
        weight: npt.NDArray[Any] = arrays[REPRESENTATION_WEIGHT]
        q, r = np.linalg.qr(weight.T)
        # Columns of Q keep the signs of B's, on which the clients' heads rely.
        q *= np.where(np.diag(r) < 0, -1, 1).astype(q.dtype)
        return {REPRESENTATION_WEIGHT: q.T}
