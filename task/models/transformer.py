"""Transformers of Hugging Face as representations of texts."""

import json
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flwr_frl.common.settings import SettingsError, error_line, need, require

ALLOWED = (
    "hf-text:NAME with a folder that holds a transformer, an installed package that "
    "contains one, or owner/name on the Hugging Face hub"
)


class TextEncoder(nn.Module):
    """The mean of a transformer's last hidden states over the tokens of a text.

    Maps tokens (n, length), padded on the right, to features (n, hidden size).

    Parameters
    ----------
    transformer : nn.Module
        A model of ``transformers`` without a head.
    padding : int
        The padding token, which is ignored.
    """

    def __init__(self, transformer: nn.Module, padding: int) -> None:
        super().__init__()
        self.transformer = transformer
        self.padding = padding

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the features."""
        mask = tokens != self.padding
        if not torch.compiler.is_compiling():
            # Leave out columns that contain only padding.
            length = max(1, int(mask.sum(1).max()))
            tokens, mask = tokens[:, :length], mask[:, :length]
        outputs = self.transformer(tokens, attention_mask=mask.long())
        weights = mask.unsqueeze(-1).to(outputs.last_hidden_state.dtype)
        total = (outputs.last_hidden_state * weights).sum(1)
        features: Tensor = total / weights.sum(1).clamp(min=1)
        return features


def locate(name: str) -> str:
    """Return the folder of a transformer, or its name on the hub.

    Parameters
    ----------
    name : str
        A folder, an installed package, or ``owner/name`` on the hub.

    Raises
    ------
    SettingsError
        If there is no transformer of this name.
    """
    # os.path, unlike Path, also accepts names that are too long or have a null byte.
    folder = os.path.expanduser(name)
    roots = [Path(folder)] if os.path.isdir(folder) else _package_folders(name)
    for root in roots:
        if models := [f for f in (root, *sorted(root.glob("*/"))) if _is_model(f)]:
            return str(models[0].resolve())
    owner, _, rest = name.partition("/")
    is_owner = owner and owner[0] not in ".~"
    on_hub = not roots and is_owner and rest and "/" not in rest
    require(bool(on_hub), "task", f"hf-text:{name}", ALLOWED)
    return name


def load_transformer(place: str, frozen_layers: int) -> nn.Module:
    """Return a pretrained transformer without a head.

    Parameters
    ----------
    place : str
        As `locate` returns it. Only a name on the hub contacts the network. Code in
        the folder or on the hub is not executed.
    frozen_layers : int
        Number of first layers that are frozen, with the embeddings; -1 freezes all.

    Raises
    ------
    SettingsError
        If it cannot be loaded, or has fewer layers.
    """
    transformers, local = _library(), os.path.isdir(place)
    try:
        if torch.get_default_device().type == "meta":
            config = transformers.AutoConfig.from_pretrained(
                place, local_files_only=local, trust_remote_code=False
            )
            model = transformers.AutoModel.from_config(config, trust_remote_code=False)
        else:
            model = transformers.AutoModel.from_pretrained(
                place,
                local_files_only=local,
                dtype=torch.float32,
                trust_remote_code=False,
            )
    # A damaged folder and a missing network raise exceptions of many types.
    except Exception as error:
        raise _unreadable(place, error) from None
    if getattr(model, "pooler", None) is not None:
        # The pooler is not used, and would be sent in every round.
        model.pooler = None
    _freeze(model, frozen_layers)
    module: nn.Module = model
    return module


def load_tokenizer(place: str) -> Any:
    """Return the tokenizer of a transformer; it pads on the right."""
    local = Path(place).is_dir()
    try:
        tokenizer = _library().AutoTokenizer.from_pretrained(
            place,
            local_files_only=local,
            padding_side="right",
            trust_remote_code=False,
        )
    except Exception as error:
        raise _unreadable(place, error) from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def _library() -> Any:
    need("transformers", "transformers", "task 'hf-text'")
    transformers: Any = import_module("transformers")
    # Progress bars of each client's model would fill the terminal.
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _unreadable(place: str, error: Exception) -> SettingsError:
    where = "in the folder" if Path(place).is_dir() else "on the hub"
    reason = error_line(error)
    if "trust_remote_code" in reason:
        # The advice of `transformers` is to run the code.
        reason = "it requires its own code, which is not run; expected a model that "
        reason += "transformers contains"
    line = f"task: the transformer {where} {place!r} cannot be loaded: {reason}"
    return SettingsError(line, "task")


def _freeze(model: nn.Module, layers: int) -> None:
    """Freeze the first layers of a transformer, and the modules before them."""
    if layers == 0:
        return
    if layers == -1:
        model.requires_grad_(False)
        return
    count = int(getattr(model.config, "num_hidden_layers", 0))
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    stack = next((n for n in lists if len(model.get_submodule(n)) == count), None)  # type: ignore[arg-type]
    allowed = f"at most {count}, the number of layers, or -1 for all"
    require(stack is not None and layers <= count, "frozen-layers", layers, allowed)
    trained = [f"{stack}.{i}." for i in range(layers, count)]
    inside = False
    for name, parameter in model.named_parameters():
        # Modules are listed in the order in which they are applied.
        inside = inside or name.startswith(f"{stack}.")
        behind = inside and not name.startswith(f"{stack}.")
        if behind or name.startswith(tuple(trained)):
            return
        parameter.requires_grad_(False)


def _package_folders(name: str) -> list[Path]:
    """Return the folders of an installed package, which is not imported."""
    package = name.replace("-", "_")
    if not package.isidentifier() or (spec := find_spec(package)) is None:
        return []
    return [Path(place) for place in spec.submodule_search_locations or ()]


def _is_model(folder: Path) -> bool:
    """Return whether a folder has the configuration of a transformer."""
    try:
        text = (folder / "config.json").read_text(encoding="utf-8")
        return "model_type" in json.loads(text)
    except (OSError, ValueError):
        return False
