"""The device of this process (setting ``device``) and its random number generators."""

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import numpy as np
import torch
from torch import nn

from flwr_frl.common.errors import ResourceError, require

CPU = torch.device("cpu")
NAMES = "auto, cpu, cuda, cuda:N or mps"
# Setting and device of this process; one element, so that it can be replaced.
_used: list[tuple[str, torch.device]] = [("cpu", CPU)]


def current() -> torch.device:
    """Return the device of this process, where models and optimisers live."""
    return _used[0][1]


def use(name: str) -> None:
    """Train on a device from now on; raises as `find`.

    On CUDA, operations become deterministic as far as torch supports it, and float32
    is computed as float32, not as TF32.

    Parameters
    ----------
    name : str
        Value of the setting ``device``.
    """
    former_name, former = _used[0]
    if name == former_name:
        return
    device = find(name)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = False
    if "cuda" in (device.type, former.type):
        torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)
        # Filling takes time, and nothing here reads uninitialised memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _used[0] = name, device


def find(name: str) -> torch.device:
    """Return the device that the setting names.

    ``auto`` is the first CUDA device if there is one, and the CPU otherwise.

    Raises
    ------
    SettingsError
        If the name is invalid, or this machine has no such device.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    available = ["cpu", *(f"cuda:{i}" for i in range(gpus))]
    if torch.backends.mps.is_available():
        available.append("mps")
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    allowed = f"auto, or what this machine has: {', '.join(available)}"
    exists = name in available or (name == "cuda" and gpus)
    require(bool(exists), "device", name, allowed)
    return torch.device(f"{name}:0" if name in ("cuda", "mps") else name)


def client_seed(seed: int, name: str, server_round: object) -> int:
    """Return a client's seed in a round of a run with a seed, on any machine."""
    text = f"{seed}/{name}/{server_round}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def seed(number: int) -> None:
    """Seed the generators of the CPU and of the device."""
    # Not torch.manual_seed: until CUDA starts, it stores a stack trace of every call.
    torch.default_generator.manual_seed(number)
    if current() != CPU:
        torch.get_device_module(current()).manual_seed(number)


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Seed the CPU's generators within a block, and restore them afterwards.

    NumPy's global generator and Python's are included: a user's model may draw from
    them.
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
    """Return the state of torch's generators of the CPU and of the device."""
    state = torch.default_generator.get_state()
    if current() == CPU:
        return (state,)
    return state, torch.get_device_module(current()).get_rng_state()


def set_random_state(state: tuple[torch.Tensor, ...]) -> None:
    """Restore a `random_state`."""
    torch.default_generator.set_state(state[0])
    for device_state in state[1:]:
        torch.get_device_module(current()).set_rng_state(device_state)


class RngContext:
    """Context in which torch's generators continue one client's random numbers.

    Parameters
    ----------
    first : int, optional
        Seed with which they begin; by default they begin as they are.
    """

    def __init__(self, first: int | None = None) -> None:
        self.first = first
        self.state: tuple[torch.Tensor, ...] | None = None

    def __enter__(self) -> Self:
        """Restore the generators where this client left them."""
        if self.state is not None:
            set_random_state(self.state)
        elif self.first is not None:
            seed(self.first)
        return self

    def __exit__(self, *error: object) -> None:
        """Store the state of the generators."""
        self.state = random_state()


def differentiable(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context for gradients of a model, also in evaluation mode.

    cuDNN, which computes gradients of recurrent layers in training mode only, is off in
    evaluation mode. This holds for the whole process, so no other client may compute
    within the context.
    """
    if model.training:
        return nullcontext()
    return torch.backends.cudnn.flags(enabled=False)


def memory() -> int:
    """Return the size of the device's memory in bytes; 0 for the CPU."""
    if current().type == "cuda":
        return torch.cuda.get_device_properties(current()).total_memory
    return torch.mps.recommended_max_memory() if current().type == "mps" else 0


def is_out_of_memory(error: Exception) -> bool:
    """Return True if torch raised an exception for lack of memory."""
    text = str(error)
    matches = "out of memory" in text or "can't allocate memory" in text
    return isinstance(error, RuntimeError) and matches


def out_of_memory(error: Exception, advice: str) -> ResourceError:
    """Return a one-line error for an exception of `is_out_of_memory`.

    Parameters
    ----------
    error : Exception
        The exception of torch.
    advice : str
        What the user can do about it.
    """
    reason = " ".join(str(error).split())[:200]
    return ResourceError(
        f"device {str(current())!r} is out of memory: {reason}; {advice}"
    )
