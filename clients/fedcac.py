"""FedCAC (Wu et al., ICCV 2023): report which parameters are critical."""

from math import prod

import numpy as np
import torch
from torch import Tensor

from flwr_frl.clients.base import Client, Update
from flwr_frl.clients.device.groups import WHOLE, Tensors
from flwr_frl.common.messages import CRITICAL
from flwr_frl.common.settings import setting


class FedCACClient(Client):
    """Client side: train the received model, and send it with the critical positions.

    The sensitivity of a parameter is |θ (θ − θ⁰)| with the received value θ⁰
    (equation 5). Critical are the ⌊τ n⌋ most sensitive of the n parameters of each
    array (equation 6), and equally sensitive ones, but none that did not change. In the
    authors' code all with a sensitivity above 1e−20 are critical if the limit is below
    1e−10. Statistics of batch norms are never critical.

    The server sends the combined model, so a client keeps no state. One that joins
    later trains the received mean for ``newcomer-epochs``.

    Parameters
    ----------
    fedcac_tau : float, default 0.5
        Share τ of critical parameters; with 0 this is FedAvg.
    """

    sent = (*WHOLE, CRITICAL.partition(".")[0])
    fedcac_tau: float = setting(0.5, ge=0, le=1)

    def initial_group(self, group: str) -> Tensors:
        """Return a mask without critical positions, with a bit for each number."""
        count = sum(prod(value.shape) for value in self.task.initial_state.values())
        return {"mask": torch.zeros(-(-count // 8), dtype=torch.uint8)}

    def update(self) -> Update:
        """Train for ``representation-epochs``; send the model and the mask."""
        loss = self.train("all", self.settings.representation_epochs)
        learned = {name for name, _ in self.model.named_parameters()}
        tau, names = self.settings.fedcac_tau, sorted(self.received)
        shares = {name: tau * (name in learned) for name in names}
        mask = torch.cat([self._critical(n, share) for n, share in shares.items()])
        packed = torch.from_numpy(np.packbits(mask.numpy(force=True)))
        return loss, {**self.model.tensors, CRITICAL: packed}

    def _critical(self, name: str, share: float) -> Tensor:
        new, old = self.model.tensors[name], self.received[name]
        sensitivity = (new * (new - old)).abs().flatten()
        count = int(share * len(sensitivity))
        if not count:
            return torch.zeros_like(sensitivity, dtype=torch.bool)
        least = sensitivity.kthvalue(len(sensitivity) - count + 1).values
        return (sensitivity >= least) & (sensitivity > 0)

    def personalize(self) -> None:
        """Train the received mean for ``newcomer-epochs``."""
        self.train("all", self.settings.newcomer_epochs)
