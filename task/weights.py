"""Weights to begin with: from a file, or those that torchvision has for a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flwr_frl.task.models import SplitModel
from flwr_frl.task.settings import SettingsError, reason_of, unknown

SUFFIXES = (".pth", ".pt", ".safetensors")
# Outputs beside the last, which help training from scratch and are left out here.
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")


def load_weights(model: SplitModel, weights: str, name: str) -> None:
    """Load weights into a model; its head stays new where theirs has another shape.

    The arrays may be named as in the split model, or as in the module that was split.

    Parameters
    ----------
    model : SplitModel
        Changed in place.
    weights : str
        A ``.pth`` or ``.safetensors`` file with a state dict, or the name of
        torchvision's weights for the model, ``"DEFAULT"`` say.
    name : str
        Of the model.

    Raises
    ------
    SettingsError
        If the file is missing or damaged, there are no such weights, or they are
        another model's.
    """
    if weights.endswith(SUFFIXES):
        given = _read(Path(weights).expanduser())
    else:
        given = _from_torchvision(name, weights)
    own = model.state_dict()
    parts = [
        {key: value for key, value in own.items() if key.startswith(f"{part}.")}
        for part in ("representation", "head")
    ]
    given = _named(given, parts[0], model.head_name)
    _compare(parts[0], given, f"weights {weights!r} do not fit model {name!r}")
    fits = all(k in given and given[k].shape == v.shape for k, v in parts[1].items())
    taken = own.keys() if fits else parts[0].keys()
    # Those of old files lack the counters of batch norms.
    model.load_state_dict({key: given.get(key, own[key]) for key in taken}, False)


def _named(
    given: dict[str, Tensor], wanted: Mapping[str, Tensor], head: str
) -> dict[str, Tensor]:
    """Return arrays by the split model's names.

    A module may have parts of its own that are called as those of a split model: what
    gives more of the wanted names is right.
    """
    split = {_split_name(key, head): value for key, value in given.items()}
    ours, theirs = (len(wanted.keys() & named.keys()) for named in (given, split))
    if ours == theirs:
        ours += any(key.startswith(("representation.", "head.")) for key in given)
    return given if ours > theirs else split


def _split_name(key: str, head: str) -> str:
    if head and key.startswith(f"{head}."):
        return f"head.{key.removeprefix(f'{head}.')}"
    return f"representation.{key}"


def _compare(
    wanted: Mapping[str, Tensor], given: Mapping[str, Tensor], line: str
) -> None:
    """Raise `SettingsError` unless the representations have the same arrays."""
    for key, value in wanted.items():
        if key not in given:
            if key.endswith("num_batches_tracked"):
                continue
            raise SettingsError(f"{line}: they have no {_plain(key)!r}")
        if given[key].shape != value.shape:
            raise SettingsError(
                f"{line}: their {_plain(key)!r} is of shape {tuple(given[key].shape)}, "
                f"the model's of {tuple(value.shape)}"
            )
    for key in given:
        extra = key.startswith("representation.") and key not in wanted
        if extra and not _plain(key).startswith(AUXILIARY):
            raise SettingsError(f"{line}: it has no {_plain(key)!r}")


def _plain(key: str) -> str:
    return key.removeprefix("representation.")


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise SettingsError(f"weights is {str(path)!r}; there is no such file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(path)
        else:
            # Never a pickle: it would run whatever its writer wanted.
            found = torch.load(path, map_location="cpu", weights_only=True)
    # A damaged file can raise nearly anything.
    except Exception as error:
        reason = reason_of(error)
        raise SettingsError(f"weights {str(path)!r} cannot be read: {reason}") from None
    if not isinstance(found, Mapping) or not found:
        raise SettingsError(
            f"weights {str(path)!r} hold a {type(found).__name__}; they must be a "
            "state dict"
        )
    odd = next((k for k, v in found.items() if not isinstance(v, Tensor)), None)
    if odd is not None:
        raise SettingsError(
            f"weights {str(path)!r} hold {odd!r}, which is no tensor; they must be a "
            "state dict"
        )
    return dict(found)


def _from_torchvision(name: str, weights: str) -> dict[str, Tensor]:
    from torchvision.models import get_model_weights, list_models

    if name not in list_models():
        raise SettingsError(
            f"weights is {weights!r}; for model {name!r} it must be a file that ends "
            f"with {', '.join(SUFFIXES)}"
        )
    known = get_model_weights(name)
    if weights not in known.__members__:
        raise unknown(f"weights of {name}", weights, known.__members__)
    try:
        return dict(known[weights].get_state_dict(progress=False, check_hash=True))
    # No network, a full disk, a damaged download.
    except Exception as error:
        reason = reason_of(error)
        raise SettingsError(
            f"weights {weights!r} of {name} cannot be downloaded ({reason}); a file "
            "can be given instead"
        ) from None
