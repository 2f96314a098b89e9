"""Unmodified FedRep on devices that pause where they are to be killed.

A device logs each head that it saves or loads, and waits to be killed in the phases
for which there is a file.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import numpy as np

from flwr_frl.clients import client_app
from flwr_frl.clients.device import setup
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.clients.fedrep import FedRepClient
from flwr_frl.strategies import FedRep, server_app

PAUSE = 3600


class Device:
    """The device that this process works for, known from its first message."""

    def __init__(self, context) -> None:
        self.name = str(context.node_config["client-name"])
        self.folder = Path(str(context.node_config["notes"]))

    def note(self, **values) -> None:
        """Append a line that survives a power failure."""
        with (self.folder / f"{self.name}.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def stop(self, phase: str) -> None:
        """Wait to be killed, if there is a file for this phase."""
        if (self.folder / f"{self.name}-{phase}").exists():
            partial = self.folder / f".{self.name}"
            partial.write_text(str(os.getpid()))
            partial.rename(self.folder / f"{self.name}-{phase}-reached")
            time.sleep(PAUSE)


def digest(arrays) -> str:
    """Return a digest that does not depend on the code of the package."""
    content = hashlib.sha256()
    for key in sorted(arrays):
        content.update(key.encode() + np.ascontiguousarray(arrays[key]).tobytes())
    return content.hexdigest()


class WatchedState(PersonalState):
    def __init__(self, context, directory=None, acknowledged=None, *rest, **more):
        super().__init__(context, directory, acknowledged, *rest, **more)
        self.device = Device(context)
        self.acknowledged = acknowledged

    def load(self, shapes=None):
        arrays = super().load(shapes)
        checksum = digest(arrays) if arrays else ""
        self.device.note(kind="loaded", round=self.acknowledged, digest=checksum)
        return arrays

    def save(self, arrays, round_):
        self.device.note(kind="kept", round=round_, digest=digest(arrays))
        rename = os.replace

        def replace(source, target) -> None:
            self.device.stop("saving")
            rename(source, target)

        os.replace = replace
        path = super().save(arrays, round_)
        os.replace = rename
        self.device.stop("saved")
        return path


class WatchedClient(FedRepClient):
    def train(self, part, *arguments):
        loss = super().train(part, *arguments)
        # The first call trains the head; the representation is not trained yet.
        self._state.device.stop("training")
        return loss


class Watched(FedRep, client="chaos_app:WatchedClient"):
    """FedRep under another name, like a third-party algorithm."""


setup.PersonalState = WatchedState
client = client_app.app
server = server_app.app
