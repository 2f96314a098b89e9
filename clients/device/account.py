"""What a device has told of its examples: the steps of private training so far."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from flwr.app import ConfigRecord, RecordDict

from flwr_frl.task.files import ACCOUNT_FILE as FILE
from flwr_frl.task.files import PRIVATE, write_atomically
from flwr_frl.task.models import SplitModel
from flwr_frl.task.settings import SettingsError
from flwr_frl.task.training import TrainCall
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
    """Trains privately, and counts the steps before they are made.

    Unlike a personal state, the count never goes back: a reply that did not count has
    been told all the same.

    Parameters
    ----------
    privacy : ExamplePrivacy
        How.
    records : RecordDict
        The client's state in memory.
    directory : Path, optional
        Where a copy outlives the process.
    """

    privacy: ExamplePrivacy
    records: RecordDict
    directory: Path | None

    @classmethod
    def of(
        cls, privacy: ExamplePrivacy, records: RecordDict, directory: Path | None
    ) -> Self | None:
        """Return what the settings ask for; None without noise."""
        return cls(privacy, records, directory) if privacy.dp_noise else None

    def check(self, model: SplitModel) -> None:
        """Raise `SettingsError` if a model cannot be trained so, or nothing counted."""
        check_model(model, self.privacy)
        self._steps()

    def train(self, call: TrainCall) -> float:
        """Train; as `flwr_frl.task.training.privacy.train_privately`."""
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
        self.records[RECORD] = ConfigRecord(
            {
                "noise": [noise for noise, _ in steps],
                "rate": [rate for _, rate in steps],
                "steps": list(steps.values()),
            }
        )
        self.write()

    def write(self) -> None:
        """Write what is in memory, where there is a directory for it."""
        record = self.records.get(RECORD)
        if self.directory is None or record is None:
            return
        text = json.dumps(dict(cast(ConfigRecord, record))) + "\n"
        try:
            write_atomically(self.directory / FILE, text.encode(), mode=PRIVATE)
        except OSError as error:
            raise SettingsError(
                f"{self.directory / FILE} cannot be written, so nothing is trained "
                f"that it would have to count: {error}"
            ) from None

    def _steps(self) -> dict[tuple[float, float], int]:
        """Return the steps so far, by noise and probability of an example."""
        known: Any = self.records.get(RECORD, {})
        if self.directory is not None:
            path = self.directory / FILE
            try:
                known = json.loads(path.read_bytes())
            except FileNotFoundError:
                pass
            except (ValueError, OSError) as error:
                raise self._damaged(error) from None
        try:
            columns = [known.get(name, []) for name in ("noise", "rate", "steps")]
            rows = zip(*columns, strict=True)
            return {(float(z), float(q)): int(n) for z, q, n in rows}
        except (ValueError, TypeError, AttributeError) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> SettingsError:
        return SettingsError(
            f"the account {FILE!r} of what was told of the examples cannot be read: "
            f"{error}"
        )


def check_account(private: PrivateTraining | None, directory: Path | None) -> None:
    """Raise `SettingsError` if a device that has trained privately no longer would.

    Its noise may be of its node config, which what is not a SuperNode does not know.
    """
    if private is None and directory is not None and (directory / FILE).is_file():
        raise SettingsError(
            f"{str(directory / FILE)!r} counts private training, and the run has no "
            "dp-noise: what is trained here would have none"
        )
