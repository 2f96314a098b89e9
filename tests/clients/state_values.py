"""Personal states with a single value: write, read and list their versions."""

import contextlib
import logging

import numpy as np
from flwr.app import Context

from flwr_frl.clients.device.state import PersonalState


@contextlib.contextmanager
def flower_log(caplog):
    """Let caplog capture Flower's logger, which does not propagate."""
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


def head(value: float) -> dict[str, np.ndarray]:
    return {"head.weight": np.full((2, 3), value, np.float32)}


def value_of(state: PersonalState) -> float | None:
    arrays = state.load()
    return None if arrays is None else float(arrays["head.weight"][0, 0])


def rounds_in(context: Context) -> list[int]:
    return sorted(int(name.split("-")[1]) for name in context.state)


def rounds_on(directory) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("*.safetensors"))


def run_rounds(context, rounds, directory=None, checkpointed=0):
    """Train in the given rounds and acknowledge each; the value is the round number."""
    acknowledged = 0
    for r in rounds:
        state = PersonalState(context, directory, acknowledged, checkpointed)
        state.save(head(r), r)
        acknowledged = r


def files_in(directory):
    return sorted(path.name for path in directory.iterdir())
