"""Pretrained weights from a file."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from flwr_frl.common.errors import SettingsError, reading
from flwr_frl.common.sealed import SHA256, Arrays, check, digest
from flwr_frl.common.text import one_line
from flwr_frl.task.models.split_model import SplitModel

# Metadata "format" of files that `pack_model` has written.
FORMAT = "flwr-frl model 1"


def load_weights(model: SplitModel, weights: str, name: str) -> None:
    """Load weights into a model; a head of another shape keeps its initial values.

    The arrays may be named as in the split model or as in the module that was split.

    Parameters
    ----------
    model : SplitModel
        Modified in place.
    weights : str
        A ``.pth`` or ``.safetensors`` file with a state dict.
    name : str
        Name of the model, for error messages.

    Raises
    ------
    SettingsError
        If the file is missing or damaged, or belongs to another model.
    """
    path = Path(weights).expanduser()
    with reading(path, "weights", "a state dict, names with tensors"):
        arrays = _split(_read(path), model)
    try:
        model.load_state_dict(arrays)
    except RuntimeError as error:
        reason = one_line(error, 300)
        line = f"weights {weights!r} do not fit model {name!r}: {reason}"
        raise SettingsError(line) from None


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return read_safetensors(path)[1]
    # Not as a pickle, which could run arbitrary code.
    return dict(torch.load(path, map_location="cpu", weights_only=True))


def _split(arrays: dict[str, Tensor], model: SplitModel) -> dict[str, Tensor]:
    """Return arrays with the names in a model, and its own head if theirs differs."""
    # The file of a module that was split has other names.
    if not all(key.startswith(("representation.", "head.")) for key in arrays):
        arrays = {_split_name(k, model.head_name): v for k, v in arrays.items()}
    state = model.state_dict()
    head = [key for key in state if key.startswith("head.")]
    if any(k not in arrays or arrays[k].shape != state[k].shape for k in head):
        arrays = {k: v for k, v in arrays.items() if not k.startswith("head.")}
        arrays |= {key: state[key] for key in head}
    return arrays


def _split_name(key: str, head: str) -> str:
    if head and key.startswith(f"{head}."):
        return f"head.{key.removeprefix(f'{head}.')}"
    return f"representation.{key}"


def pack_model(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    """Return a safetensors file with a checksum; ``about`` names the `FORMAT`."""
    checksum = {SHA256: digest(bytes_of(tensors), about)}
    return save(dict(tensors), metadata={**about, **checksum})


def read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a safetensors file.

    Raises
    ------
    ChecksumError
        If `pack_model` has written the file, and it has changed since.
    OSError, SafetensorError
        If the file cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata.get("format") == FORMAT:
        check(metadata, bytes_of(tensors))
    return metadata, tensors


def bytes_of(tensors: Mapping[str, Tensor]) -> Arrays:
    """Return the bytes of tensors, by name, dtype and shape; NumPy lacks bfloat16."""
    return {
        f"{name} {t.dtype} {tuple(t.shape)}": t.flatten().view(torch.uint8).numpy()
        for name, t in tensors.items()
    }
