"""Privacy accounting on a device: a record of all steps of private training."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from flwr.app import ConfigRecord, RecordDict

from flwr_frl.common.errors import SettingsError
from flwr_frl.common.files import ACCOUNT_FILE as FILE
from flwr_frl.common.files import PRIVATE, write_atomically
from flwr_frl.task.models import SplitModel
from flwr_frl.task.training.local_training import TrainCall
from flwr_frl.task.training.privacy import (
    ExamplePrivacy,
    check_model,
    epsilon,
    sampling,
    train_privately,
)

RECORD = "privacy"


@dataclass(frozen=True)
class PrivateTraining:
    """Train with differential privacy; steps are recorded before they are made.

    Unlike a personal state, the account is never rolled back, since a reply that the
    server did not use has still disclosed information.

    Parameters
    ----------
    privacy : ExamplePrivacy
        Noise, clipping norm and δ.
    records : RecordDict
        The client's state in memory.
    directory : Path, optional
        Directory of a copy that outlives the process.
    """

    privacy: ExamplePrivacy
    records: RecordDict
    directory: Path | None

    def check(self, model: SplitModel) -> None:
        """Raise `SettingsError` if the model or the account does not permit it."""
        check_model(model, self.privacy)
        self._steps()

    def train(self, call: TrainCall) -> float:
        """Record the steps, and train by `train_privately`."""
        rate, steps = sampling(len(call.examples), call.sgd.batch_size)
        self._count((self.privacy.dp_noise, rate), call.epochs * steps)
        return train_privately(call, self.privacy)

    def epsilon(self) -> float:
        """Return ε of all steps so far."""
        steps = tuple((*kind, count) for kind, count in self._steps().items())
        return epsilon(steps, self.privacy.dp_delta)

    def _count(self, kind: tuple[float, float], more: int) -> None:
        steps = self._steps()
        steps[kind] = steps.get(kind, 0) + more
        noise, rate = map(list, zip(*steps, strict=True))
        values: Any = {"noise": noise, "rate": rate, "steps": list(steps.values())}
        self.records[RECORD] = ConfigRecord(values)
        self.write()

    def write(self) -> None:
        """Write the account to disk, if there is a directory."""
        record = self.records.get(RECORD)
        if self.directory is None or record is None:
            return
        text = json.dumps(dict(cast(ConfigRecord, record))) + "\n"
        path = self.directory / FILE
        try:
            write_atomically(path, text.encode(), mode=PRIVATE)
        except OSError as error:
            raise SettingsError(
                f"{path} cannot be written: {error}; private training needs its account"
            ) from None

    def _steps(self) -> dict[tuple[float, float], int]:
        """Return the steps so far by noise and sampling probability."""
        account: Any = self.records.get(RECORD, {})
        try:
            if self.directory is not None:
                with contextlib.suppress(FileNotFoundError):
                    account = json.loads((self.directory / FILE).read_bytes())
            columns = [account.get(name, []) for name in ("noise", "rate", "steps")]
            rows = zip(*columns, strict=True)
            return {(float(z), float(q)): int(n) for z, q, n in rows}
        except (ValueError, OSError, TypeError, AttributeError) as error:
            raise SettingsError(
                f"the account {FILE!r} of private training cannot be read: {error}"
            ) from None


def check_account(private: PrivateTraining | None, directory: Path | None) -> None:
    """Raise `SettingsError` if private training would continue without noise.

    The run may have been private by ``dp-noise`` in a node config, which is not stored
    with the run.
    """
    if private is None and directory is not None and (directory / FILE).is_file():
        raise SettingsError(
            f"{str(directory / FILE)!r} counts private training, and the run has no "
            "dp-noise: what is trained here would have none"
        )
