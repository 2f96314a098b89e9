"""Transformers of Hugging Face as representations of texts."""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flwr_frl.common.errors import need, reading, require

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
        for place in (root, *sorted(root.glob("*/"))):
            config = place / "config.json"
            # Other models have files of this name, too.
            if config.is_file() and b'"model_type"' in config.read_bytes():
                return str(place.resolve())
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
    if torch.get_default_device().type == "meta":
        config = _read("AutoConfig", place)
        kind: Any = import_module("transformers").AutoModel
        model = kind.from_config(config, trust_remote_code=False)
    else:
        model = _read("AutoModel", place, dtype=torch.float32)
    if getattr(model, "pooler", None) is not None:
        # The pooler is not used, and would be sent in every round.
        model.pooler = None
    _freeze(model, frozen_layers)
    module: nn.Module = model
    return module


def load_tokenizer(place: str) -> Any:
    """Return the tokenizer of a transformer; it pads on the right."""
    tokenizer = _read("AutoTokenizer", place, padding_side="right")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def _read(kind: str, place: str, **options: Any) -> Any:
    """Return an object of a class of ``transformers`` that is read without any code."""
    need("transformers", "transformers", "task 'hf-text'")
    transformers: Any = import_module("transformers")
    # Progress bars of each client's model would fill the terminal.
    transformers.utils.logging.disable_progress_bar()
    # A folder needs no network.
    options |= {"trust_remote_code": False, "local_files_only": os.path.isdir(place)}
    allowed = "a transformer that requires no code of its own, which is not run"
    with reading(place, "task", allowed):
        return getattr(transformers, kind).from_pretrained(place, **options)


def _freeze(model: nn.Module, layers: int) -> None:
    """Freeze the first layers of a transformer, and the modules before them."""
    if layers == -1:
        model.requires_grad_(False)
    if layers <= 0:
        return
    count = int(getattr(model.config, "num_hidden_layers", 0))
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    stack = next((m for m in lists if len(m) == count), nn.ModuleList())
    allowed = f"at most {count}, the number of layers, or -1 for all"
    require(layers <= len(stack), "frozen-layers", layers, allowed)
    # Parameters are listed in the order in which their modules are applied.
    parameters, inside = [*model.parameters()], {*stack[:layers].parameters()}
    last = max(i for i, parameter in enumerate(parameters) if parameter in inside)
    for parameter in parameters[: last + 1]:
        parameter.requires_grad_(False)


def _package_folders(name: str) -> list[Path]:
    """Return the folders of an installed package, which is not imported."""
    package = name.replace("-", "_")
    if not package.isidentifier() or (spec := find_spec(package)) is None:
        return []
    return [Path(place) for place in spec.submodule_search_locations or ()]
