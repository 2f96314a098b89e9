"""Where this process trains: the setting ``device``."""

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from flwr_frl.task.settings import ResourceError, require

CPU = torch.device("cpu")
# What there is to choose from, in words.
NAMES = "auto, cpu, cuda, cuda:N or mps"
_used: list[tuple[str, torch.device]] = [("cpu", CPU)]
_AMOUNT = r"[\d.]+ (?:bytes|[KMGT]i?B)"


def current() -> torch.device:
    """Return the device of this process: models, data and optimisers are there."""
    return _used[0][1]


def use(name: str) -> None:
    """Train on a device from now on; raises as `find`.

    On CUDA the same seed then gives the same numbers, as far as torch has deterministic
    operations, and float32 is float32 and not TF32.
    """
    former, device = _used[0]
    if name == former:
        return
    found = find(name)
    if found.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(found)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = False
    if "cuda" in (found.type, device.type):
        torch.use_deterministic_algorithms(found.type == "cuda", warn_only=True)
        # Costs time, and nothing here reads what was never written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _used[0] = name, found


def find(name: str) -> torch.device:
    """Return the device that the setting names.

    ``auto`` is the first CUDA device where there is one, and the CPU elsewhere.

    Raises
    ------
    SettingsError
        If there is no such name, or this machine has no such device.
    """
    match = re.fullmatch(r"auto|cpu|mps|cuda(?::(\d+))?", name)
    require(match is not None, "device", name, NAMES)
    assert match is not None
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not gpus):
        return CPU
    here = ["cpu", *(f"cuda:{i}" for i in range(gpus))]
    if torch.backends.mps.is_available():
        here.append("mps")
    kind = "cuda" if name == "auto" else name.partition(":")[0]
    device = torch.device(kind, int(match[1] or 0))
    known = {torch.device(there) for there in here} | {torch.device("mps", 0)}
    found = device in known and (kind != "mps" or "mps" in here)
    require(found, "device", name, f"auto, or what this machine has: {', '.join(here)}")
    return device


def seed(number: int) -> None:
    """Seed the generators of the CPU and of the device."""
    # Not torch.manual_seed: before CUDA starts, that keeps a stack trace of every call.
    torch.default_generator.manual_seed(number)
    if current() != CPU:
        torch.get_device_module(current()).manual_seed(number)


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Draw as after this seed on the CPU, and afterwards as if nothing had been.

    So do NumPy's global generator and Python's, which a model of one's own may ask.
    """
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def random_state() -> tuple[torch.Tensor, ...]:
    """Return where the random numbers of the CPU, and of the device, have come."""
    own = torch.default_generator.get_state()
    if current() == CPU:
        return (own,)
    return own, torch.get_device_module(current()).get_rng_state()


def set_random_state(state: tuple[torch.Tensor, ...]) -> None:
    """Go on from a `random_state`."""
    torch.default_generator.set_state(state[0])
    for own in state[1:]:
        torch.get_device_module(current()).set_rng_state(own)


def memory() -> int:
    """Return the bytes of the device's memory; those of the CPU are not counted."""
    if current().type == "cuda":
        return torch.cuda.get_device_properties(current()).total_memory
    return torch.mps.recommended_max_memory() if current().type == "mps" else 0


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an exception of torch's says that memory is used up."""
    text = str(error)
    said = "out of memory" in text or "can't allocate memory" in text
    return isinstance(error, RuntimeError) and said


def out_of_memory(error: Exception, advice: str) -> ResourceError:
    """Return the one line about such an exception; ``advice`` is what to lower."""
    text = " ".join(str(error).split())
    wanted = re.search(rf"ried to allocate ({_AMOUNT})", text)
    free = re.search(rf"total capacity of ({_AMOUNT}) of which ({_AMOUNT})", text)
    parts = [f"{wanted[1]} more were wanted" if wanted else text[:200]]
    if free:
        parts.append(f"{free[2]} of {free[1]} are free")
    return ResourceError(
        f"device {str(current())!r} is out of memory: {', and '.join(parts)}; {advice}"
    )
