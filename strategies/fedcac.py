"""FedCAC (Wu et al., ICCV 2023): critical parameters are shared by similar clients."""

import numpy as np
import numpy.typing as npt

from flwr_frl.common.messages import CRITICAL
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Round, Strategy, stored
from flwr_frl.strategies.server.replies import mean

Bytes = npt.NDArray[np.uint8]
# Number of ones in each byte.
ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1)


class FedCAC(Strategy, client="flwr_frl.clients.fedcac:FedCACClient"):
    """Client i trains M_i ⊙ c_i + (1 − M_i) ⊙ θ, where M_i marks critical parameters.

    θ is the mean of a round's models, and c_i the mean of those of i and of the
    clients j whose critical positions overlap enough: O_ij ≥ Ō + t/β (max O − Ō) in
    round t, with O_ij = 1 − ‖M_i − M_j‖₁ / (2 ‖M_i‖₁), and Ō the mean over pairs. After
    round β, critical parameters are usually not shared.

    The paper sends θ and c_i, which the client combines. Here the server, which knows
    M_i, sends the combined model, in half the bytes. All clients of the paper take part
    in every round. Here, as in PFLlib, only those of a round are compared; others keep
    M_i and c_i, and receive the new θ. Before its first training a client has θ alone.
    A checkpoint holds the combined model of every client that has trained, and its
    mask.

    The equations were compared with the authors' code (Fling), and are the same. PFLlib
    forms no c_i in the first round, so that clients continue with the initial values of
    their critical parameters; afterwards it equals this class.

    Parameters
    ----------
    fedcac_beta : int, default 100
        Round β from which only the most similar clients share critical parameters.
    **base
        Arguments of `Strategy`. ``weighting`` and ``aggregation`` apply to θ only.
    """

    fedcac_beta: int = setting(100, ge=1)

    # Under this key `flwr_frl.predict` finds each client's model.
    models: dict[str, Arrays] = stored("heads")
    masks: dict[str, Bytes] = stored("masks")

    def begin(self, round: Round) -> None:
        """Expect a mask with each model."""
        count = sum(array.size for array in round.arrays.values())
        round.expected = {**round.arrays, CRITICAL: np.zeros(-(-count // 8), np.uint8)}

    def per_client(self, client: str) -> Arrays:
        """Return the combined model; nothing for a client that has not trained."""
        return self.models.get(client, {})

    def aggregate(self, round: Round) -> Arrays:
        """Return θ; combine it with c_i for each client that has trained."""
        shared = round.mean()
        del shared[CRITICAL]
        models = [dict(reply.arrays) for reply in round.replies]
        masks = np.stack([np.asarray(model.pop(CRITICAL)) for model in models])
        collaborators = similar(masks, round.number / self.fedcac_beta)
        critical = dict(self.models)
        for i, reply in enumerate(round.replies):
            near = [(1.0, models[j]) for j in np.flatnonzero(collaborators[i])]
            critical[reply.client] = mean(near) or {}
            self.masks[reply.client] = masks[i]
        for client, own in critical.items():
            self.models[client] = combined(self.masks[client], own, shared)
        return shared


def similar(masks: Bytes, progress: float) -> npt.NDArray[np.bool_]:
    """Return whether client j may share critical parameters with client i.

    Parameters
    ----------
    masks : ndarray of uint8, shape (n, bytes)
        The clients' critical positions, as packed bits.
    progress : float
        t/β.
    """
    different = np.array([ONES[mask ^ masks].sum(1) for mask in masks])
    counts = np.maximum(ONES[masks].sum(1), 1)
    overlap, own = 1 - different / (2 * counts[:, None]), np.eye(len(masks), dtype=bool)
    others = overlap[~own]
    limit = 0.0
    if len(others):
        limit = others.mean() + progress * (others.max() - others.mean())
    # Equal overlaps may differ from their mean by rounding.
    enough: npt.NDArray[np.bool_] = overlap >= limit - 1e-12
    return enough | own


def combined(mask: Bytes, critical: Arrays, shared: Arrays) -> Arrays:
    """Return the critical positions of one model with the other ones of another."""
    names = sorted(shared)
    ends = np.cumsum([shared[name].size for name in names])
    parts = np.split(np.unpackbits(mask)[: ends[-1]].astype(bool), ends[:-1])
    return {
        name: np.where(part.reshape(shared[name].shape), critical[name], shared[name])
        for name, part in zip(names, parts, strict=True)
    }
