"""A simulated device for tests without a GPU: ``gpu:0``, which computes on the CPU.

Its tensors report ``gpu:0`` as their device, and it has its own random generator. As on
a GPU, an operation that mixes its tensors with CPU tensors raises an error, and so does
direct access to their memory.
"""

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map


class Module(backend_registration._DummyBackendModule):
    """The functions that PyTorch requires of a device backend."""

    generator = torch.Generator()

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]

    def manual_seed(self, number):
        self.generator.manual_seed(number)

    def get_rng_state(self):
        return self.generator.get_state()

    def set_rng_state(self, state):
        self.generator.set_state(state)


# Available in PyTorch 2.9 and later.
backend_registration._setup_privateuseone_for_python_backend("gpu", Module())
GPU, CPU = torch.device("gpu", 0), torch.device("cpu")


class MixedDevicesError(RuntimeError):
    """An operation has tensors of both devices."""


class OnDevice(torch.Tensor):
    """A tensor on the device."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=GPU,
            requires_grad=False,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        if inner.dtype == torch.float64:
            raise TypeError("gpu:0 has no float64, as Apple's MPS")
        self.inner = inner

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other):
        self.inner = other.inner
        torch.Tensor.data.__set__(self, other)

    def tolist(self):
        return self.inner.tolist()

    def numpy(self, *, force=False):
        return self.cpu().numpy(force=True) if force else super().numpy()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """Run an operation on the CPU, and wrap its results if they are on the device."""
    leaves, _ = tree_flatten((args, kwargs))
    tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
    mine = any(isinstance(tensor, OnDevice) for tensor in tensors)
    asked = kwargs.get("device")
    copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    # As on a GPU, tensors without dimensions and indices may be on the CPU.
    indexes = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
    foreign = [t for t in tensors if not isinstance(t, OnDevice) and t.dim() > 0]
    if mine and foreign and not copies and not indexes:
        shapes = [tuple(tensor.shape) for tensor in foreign]
        raise MixedDevicesError(f"{func} mixes gpu:0 with tensors {shapes} of the CPU")
    if asked is not None:
        kwargs = {**kwargs, "device": CPU}
    unwrapped = tree_map(lambda v: v.inner if isinstance(v, OnDevice) else v, args)
    named = tree_map(lambda v: v.inner if isinstance(v, OnDevice) else v, kwargs)
    there = mine if asked is None else torch.device(asked).type == "gpu"
    if there and torch.Tag.nondeterministic_seeded in func.tags:
        result = with_own_numbers(func, unwrapped, named)
    else:
        result = func(*unwrapped, **named)
    if not there:
        return result
    wrappers = {id(t.inner): t for t in tensors if isinstance(t, OnDevice)}

    def wrapped(value):
        if not isinstance(value, torch.Tensor) or isinstance(value, OnDevice):
            return value
        return wrappers[id(value)] if id(value) in wrappers else OnDevice(value)

    return tree_map(wrapped, result)


def with_own_numbers(func, args, kwargs):
    """Run an operation with the device's random generator."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(Module.generator.get_state())
    result = func(*args, **kwargs)
    Module.generator.set_state(torch.default_generator.get_state())
    torch.default_generator.set_state(before)
    return result


class Factories(TorchDispatchMode):
    """Passes operations to `run`, so that tensors can be created on the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})
