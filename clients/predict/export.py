"""Export a trained model to one file."""

import copy
import io
import json
from pathlib import Path

import torch
from safetensors.torch import save

from clients.device.card import Classifier, ModelCard
from clients.predict.loading import FORMAT
from task.files import write_atomically
from task.settings import SettingsError


def export(classifier: Classifier, card: ModelCard, path: Path) -> None:
    """Write a model to one file, wholly or not at all.

    Another suffix, or a file that cannot be written, is a `SettingsError`.

    Parameters
    ----------
    classifier : Classifier
        The model.
    card : ModelCard
        Written along.
    path : Path
        ``.safetensors``, for `load_model`, or ``.pt2``, for ``torch.export.load``: a
        program from uint8 pixels to logits, with ``card.json`` as an extra file.
    """
    about = {"format": FORMAT, **card.metadata()}
    if path.suffix == ".safetensors":
        tensors = {n: t.contiguous() for n, t in classifier.model.state_dict().items()}
        data = save(tensors, metadata=about)
    elif path.suffix == ".pt2":
        data = _program(classifier, card, about)
    else:
        raise SettingsError(
            f"export is {str(path)!r}; it must end with .safetensors or .pt2"
        )
    try:
        write_atomically(path, data)
    except OSError as error:
        raise SettingsError(f"export {str(path)!r}: {error}") from None


def _program(classifier: Classifier, card: ModelCard, about: dict[str, str]) -> bytes:
    channels, height, width = card.shape
    example = torch.zeros(2, height, width, channels, dtype=torch.uint8)
    # A file keeps memory as it lies, and here convolutions are channels last.
    plain = copy.deepcopy(classifier).to(memory_format=torch.contiguous_format)
    program = torch.export.export(
        plain, (example,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},)
    )
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"card.json": json.dumps(about)})
    return buffer.getvalue()
