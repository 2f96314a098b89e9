"""FedRep (Collins et al., ICML 2021)."""

from collections import Counter
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from strategies.base import BaseStrategy
from strategies.server.replies import to_record
from task.settings import SettingsError, require

INITIALIZATIONS = ("moments", "random")
WEIGHT = "representation.weight"


class FedRep(BaseStrategy):
    """Algorithm 1: average the representations; heads stay with the clients."""


class FedRepLinear(FedRep):
    """Algorithm 2: a linear representation B, sent as Bᵀ of shape (k, d).

    Parameters
    ----------
    rank : int, default 2
        Width k of the representation.
    initialization : {"moments", "random"}, default "moments"
        ``moments``: B⁰ = the k leading eigenvectors of mean_i Z_i, where every client
        sends Z_i once. ``random``: an orthonormal B⁰ from the seed.
    orthonormalize : bool, default False
        Whether the mean is replaced by the Q of its QR decomposition (SRPFL's version).
    **base
        As for `BaseStrategy`.
    """

    def __init__(
        self,
        *,
        rank: int = 2,
        initialization: str = "moments",
        orthonormalize: bool = False,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        require(
            initialization in INITIALIZATIONS,
            "initialization",
            initialization,
            "moments or random",
        )
        self.rank = rank
        self.initialization = initialization
        self.orthonormalize = orthonormalize

    def initialize(self, grid: Grid) -> ArrayRecord:
        """Return B⁰ᵀ.

        Parameters
        ----------
        grid : Grid
            The grid.

        Returns
        -------
        ArrayRecord
            ``representation.weight`` of shape (k, d).

        Raises
        ------
        SettingsError
            If no client answers.
        """
        if self.initialization == "random":
            return super().initialize(grid)
        answers = self.query_arrays(grid, self.identify(grid), {"moments": True})
        shapes = Counter(
            tuple(record[WEIGHT].shape) for _, record in answers if WEIGHT in record
        )
        # What most clients sent; the others' cannot be added to it.
        usual = max(shapes, key=lambda s: (shapes[s], s), default=None)
        moments = [
            record[WEIGHT].numpy()
            for _, record in answers
            if WEIGHT in record and tuple(record[WEIGHT].shape) == usual
        ]
        if not moments:
            raise SettingsError("no client has sent its moments; their logs say why")
        # eigh sorts the eigenvalues upwards.
        leading = np.linalg.eigh(np.mean(moments, axis=0)).eigenvectors[:, ::-1][
            :, : self.rank
        ]
        return to_record({WEIGHT: leading.T})

    def aggregate(
        self, server_round: int, replies: list[Message]
    ) -> ArrayRecord | None:
        """Return the mean of the B_i, orthonormalised if asked for.

        Parameters
        ----------
        server_round : int
            The round.
        replies : list of Message
            Checked replies.

        Returns
        -------
        ArrayRecord or None
            The new Bᵀ.
        """
        arrays = super().aggregate(server_round, replies)
        if arrays is None or not self.orthonormalize:
            return arrays
        return to_record({WEIGHT: np.linalg.qr(arrays[WEIGHT].numpy().T).Q.T})
