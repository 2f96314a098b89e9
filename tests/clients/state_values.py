"""Personal states with a single value: write, read and list their versions."""

import numpy as np
from client_messages import new_context

from flwr_frl.clients.device.state import PersonalState


def head(value: float) -> dict[str, np.ndarray]:
    return {"head.weight": np.full((2, 3), value, np.float32)}


def value_of(state: PersonalState) -> float | None:
    arrays = state.load()
    return None if arrays is None else float(arrays["head.weight"][0, 0])


def rounds_on(directory) -> list[int]:
    return sorted(int(path.stem[-8:]) for path in directory.glob("*.safetensors"))


def run_rounds(context, rounds, directory=None, checkpointed=0):
    """Train in the given rounds and acknowledge each; the value is the round number."""
    acknowledged = 0
    for r in rounds:
        state = PersonalState(context, directory, acknowledged, checkpointed)
        state.save(head(r), r)
        acknowledged = r


def on_disk(directory, acknowledged=None, checkpointed=0, **more) -> PersonalState:
    """Return the state that a new process has."""
    return PersonalState(new_context(), directory, acknowledged, checkpointed, **more)


def file_of(directory, round_: int, run: str = ""):
    """Return the file of a run's version."""
    (path,) = directory.glob(f"*-{run}-{round_:08d}.safetensors")
    return path
