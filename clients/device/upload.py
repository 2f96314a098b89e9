"""Compressed uploads with error feedback, under every algorithm that averages models.

A client sends C(v) with v = change + error, and keeps v − C(v) as its next error
(Singh, UCLA 2024, section 2.4, has the operators C).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flwr_frl.clients.device.groups import Arrays, Tensors
from flwr_frl.common.arrays import is_parameter
from flwr_frl.common.compression import UploadSettings, from_settings
from flwr_frl.common.messages import MESSAGE

if TYPE_CHECKING:
    from flwr_frl.clients.base import Client

# Group and name of the error, which is saved with the personal arrays.
GROUP, VECTOR = "upload-error.", "vector"


@dataclass(frozen=True)
class Upload:
    """Compresses the changes of the parameters that a client sends.

    Parameters
    ----------
    settings : UploadSettings
        The operator C.
    seed : int
        Seed of operators that draw random numbers.
    """

    settings: UploadSettings
    seed: int

    def names(self, client: "Client") -> list[str]:
        """Return the names of the parameters, which server and client sort."""
        sent = client._initial_arrays(client.sent).items()
        parameters = (n for n, v in sent if is_parameter(n, v.numpy(force=True)))
        return sorted(name for name in parameters if name in client.received)

    def initial_error(self, client: "Client") -> Tensors:
        """Return the error of a client that has not trained, 0."""
        sizes = (client.received[name].numel() for name in self.names(client))
        return {GROUP + VECTOR: torch.zeros(sum(sizes))}

    def compress(self, client: "Client", arrays: Mapping[str, Tensor]) -> Arrays:
        """Attach C(v) to a client's reply, and return its next error, v − C(v)."""
        error, received = client._counted(GROUP)[VECTOR], client.received
        if not len(error):
            return {}
        changes = [arrays[n] - received[n] for n in self.names(client)]
        v = torch.cat([change.float().flatten() for change in changes]) + error
        sizes = tuple(change.numel() for change in changes)
        operator = from_settings(self.settings, sizes)
        rng = np.random.default_rng([self.seed, 0xC04E])
        rows = v.numpy(force=True)[None]
        (message,), sent = operator.compress_rows(rows, [lambda: rng])
        client._attachments[MESSAGE] = message
        return {GROUP + VECTOR: (rows - sent)[0]}
