"""Client-level differential privacy: clipping, noise and accounting.

The Gaussian mechanism on the sum of clipped changes (McMahan et al., ICLR 2018), with
the accountant of dp-accounting. Two federations are neighbours if they differ in the
contributions of one client: all of them, in all rounds, or none (the client takes part
and sends a change of 0).
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from logging import ERROR
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.common import log

from flwr_frl.common.errors import SettingsError, need, require
from flwr_frl.common.files import ACCOUNT_FILE, PRIVATE, write_atomically
from flwr_frl.common.messages import COLUMNS, INCOMPATIBLE_WITH_NOISE
from flwr_frl.common.text import one_line
from flwr_frl.strategies.server.aggregation import Sent, norm
from flwr_frl.strategies.server.replies import Arrays, rounded_to


class ClientPrivacy:
    """Makes the means of a run private, and accounts for the privacy loss.

    A client that is asked in K rounds takes part in K Gaussian mechanisms; the ε of a
    run is that of the client that was asked most often. No amplification by sampling
    is claimed: the sample follows from the seed, which is not secret.

    Parameters
    ----------
    noise : float
        Noise multiplier z: the sum's noise has the standard deviation z C.
    clip : float
        Clipping norm C of one client's change, over all shared arrays.
    delta : float
        δ at which ε is computed.

    Attributes
    ----------
    by_clients : bool
        True if clients clip their changes and add the noise, with secure aggregation
        (`flwr_frl.common.secure.fixed_point.Plan`).
    asked : Counter
        Number of means to which each client may have contributed, by name.
    directory : Path, optional
        Folder of the account; by default it is in memory only.
    run_token : str
        Identifies the run; written into the account.
    """

    def __init__(self, noise: float, clip: float, delta: float) -> None:
        need("dp_accounting", "privacy", "server-dp-noise")
        self.noise, self.clip, self.delta = noise, clip, delta
        self.by_clients = False
        self.asked = Counter[str]()
        self.directory: Path | None = None
        self.run_token = ""
        # Not seeded: noise that follows from the seed could be subtracted.
        self.rng = np.random.default_rng()

    def mean(
        self, asked: Sequence[str], replies: Sequence[Arrays], sent: Sent
    ) -> Arrays | None:
        """Return the sent arrays plus the noisy mean of the clients' clipped changes.

        The sum is divided by the number of clients that were asked: one client then
        moves the mean by at most C/n, and not at all if it does not reply.

        Parameters
        ----------
        asked : sequence of str
            The clients that were asked.
        replies : sequence of dict
            The arrays of valid replies.
        sent : mapping of str to ndarray
            Arrays from which the changes are measured.

        Returns
        -------
        dict of str to ndarray or None
            The mean; None if it could not be entered in the account.
        """
        self.asked.update(asked)
        if not self._written():
            return None
        if self.by_clients:
            # All replies have the mean of secure aggregation.
            return dict(replies[0])
        centre = {name: value.astype(np.float64) for name, value in sent.items()}
        total = {name: np.zeros(value.shape) for name, value in centre.items()}
        for reply in replies:
            change = {n: np.subtract(v, centre[n]) for n, v in reply.items()}
            factor = min(1.0, self.clip / length) if (length := norm(change)) else 1.0
            for name, value in change.items():
                total[name] += factor * value
        means: Arrays = {}
        for name, value in total.items():
            value += self.rng.normal(0, self.noise * self.clip, value.shape)
            mean = centre[name] + value / len(asked)
            means[name] = rounded_to(replies[0][name].dtype, mean)
        return means

    def check_compatible(self, properties: Mapping[str, Any]) -> None:
        """Raise `SettingsError` if a client reports that noise cannot be added."""
        what = one_line(properties.get(INCOMPATIBLE_WITH_NOISE, ""))
        require(not what, "server-dp-noise", self.noise, f"0 with a model with {what}")
        allowed = "client or none with server-dp-noise: its sums have no noise"
        require(COLUMNS not in properties, "standardize", "global", allowed)

    def spent(self) -> dict[str, float]:
        """Return ``epsilon`` so far, at ``delta``."""
        most = max(self.asked.values(), default=0)
        return {"epsilon": epsilon(self.noise, most, self.delta), "delta": self.delta}

    # The account survives a crash of the run.

    def keep_in(self, directory: Path, resumed: bool = False) -> None:
        """Keep the account in a folder, and continue an earlier one there.

        A mean that has been computed before, such as the initial arrays, is added. An
        account that a resumed run has left already includes it. Raises `SettingsError`
        if the account cannot be read or written.
        """
        before = self.asked
        if (directory / ACCOUNT_FILE).is_file():
            is_own = self.read(directory) == self.run_token and resumed
            # The larger number of each client, or the sum.
            self.asked = self.asked | before if is_own else self.asked + before
        self.directory = directory
        if before and not self._written():
            place = str(directory)
            raise SettingsError(f"{ACCOUNT_FILE} cannot be written to {place!r}")

    def read(self, directory: Path) -> str:
        """Continue the account that a run has left in a folder; return its token.

        It counts every mean that may have left the server, including rounds after the
        last checkpoint, which are repeated with other noise. Raises `SettingsError` if
        it cannot be read or has another noise multiplier.
        """
        path = directory / ACCOUNT_FILE
        try:
            account = json.loads(path.read_bytes())
            noise, asked = float(account["noise"]), account["asked"]
            run_token = str(account["run"])
            self.asked = Counter({str(n): int(count) for n, count in asked.items()})
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise SettingsError(
                f"the account {str(path)!r} of what the run has told so far cannot be "
                f"read: {error}"
            ) from None
        allowed = f"{noise}, of which there are means in {str(path)!r}; or set another "
        require(noise == self.noise, "server-dp-noise", self.noise, allowed + "output")
        return run_token

    def _written(self) -> bool:
        """Enter a mean in the account before it is sent."""
        if self.directory is None:
            return True
        about: dict[str, Any] = {**self.spent(), "noise": self.noise}
        about |= {"mechanism": "skellam" if self.by_clients else "gaussian"}
        about |= {"clip": self.clip, "run": self.run_token, "asked": self.asked}
        try:
            text = json.dumps(about, indent=2) + "\n"
            write_atomically(self.directory / ACCOUNT_FILE, text.encode(), mode=PRIVATE)
        except OSError as error:
            text = "%s not written, so the old arrays stay: %s"
            log(ERROR, text, ACCOUNT_FILE, error)
            return False
        return True


def epsilon(noise: float, releases: int, delta: float) -> float:
    """Return ε at δ of a number of Gaussian mechanisms, by Google's accountant."""
    if releases == 0:
        return 0.0
    # Imported here, as it loads SciPy.
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    # It assumes neighbours that differ by one client.
    accountant = RdpAccountant().compose(GaussianDpEvent(noise), releases)
    return float(accountant.get_epsilon(delta))


def check_no_counters(arrays: ArrayRecord, noise: float) -> None:
    """Raise `SettingsError` if an array has integers, as counters of batch norms."""
    for name, array in arrays.items():
        allowed = f"0 with {name!r} of {array.dtype}: there must be no batch norms in "
        allowed += "what is shared, as their statistics bear no noise"
        require(array.dtype.startswith("float"), "server-dp-noise", noise, allowed)
