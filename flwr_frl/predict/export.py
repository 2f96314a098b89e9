"""Export a trained model to one file."""

import copy
import hashlib
import io
import json
import os
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim

from flwr_frl.clients.device.card import Classifier, ModelCard
from flwr_frl.common.files import write_atomically
from flwr_frl.common.settings import SettingsError, need, reason_of, require
from flwr_frl.predict.loading import Model
from flwr_frl.task.models.frozen import frozen_tensors
from flwr_frl.task.models.weights import FORMAT, pack_model


def export(model: Model, card: ModelCard, path: Path) -> None:
    """Write a model to one file, atomically.

    Parameters
    ----------
    model : Classifier or SplitModel
        The model.
    card : ModelCard
        Its card, which becomes metadata of the file.
    path : Path
        The file. ``.safetensors`` is for `load_model`, and contains a checksum.
        ``.pt2`` is a program for ``torch.export.load``, from uint8 pixels or the task's
        inputs to the outputs, with ``card.json`` as an extra file. ``.onnx`` is the
        same program from ``inputs`` to ``outputs``. The checksum of these two is
        written to a file beside them with ``.sha256`` appended to the name, as
        ``sha256sum --check`` reads it.

    Raises
    ------
    SettingsError
        If the suffix is unknown, the file cannot be written, the model cannot be
        traced, or the suffix is ``.safetensors`` and the model has more parts than
        the card describes.
    """
    about = {"format": FORMAT, **card.metadata()}
    if path.suffix == ".safetensors":
        split_model = model.model if isinstance(model, Classifier) else model
        tensors = split_model.state_dict()
        if tensors.keys() != card.skeleton().keys():
            raise SettingsError(
                f"export is {str(path)!r}; it must end with .pt2, as this algorithm's "
                "model has more parts than the task's"
            )
        # Unlike state files and checkpoints, a model file contains the frozen part.
        copies = {
            # Tied parameters and frozen tensors may share memory.
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in {**tensors, **frozen_tensors(split_model)}.items()
        }
        data = pack_model(copies, about)
    elif path.suffix in (".pt2", ".onnx"):
        data = _traced(model, card, about, path.suffix)
    else:
        raise SettingsError(
            f"export is {str(path)!r}; it must end with .safetensors, .pt2 or .onnx"
        )
    try:
        write_atomically(path, data)
        if path.suffix != ".safetensors":
            # Nothing that loads these formats would notice damage.
            line = f"{hashlib.sha256(data).hexdigest()}  {path.name}\n"
            checksum = path.with_name(f"{path.name}.sha256")
            write_atomically(checksum, os.fsencode(line))
    except OSError as error:
        raise SettingsError(f"export {str(path)!r}: {error}") from None


def _traced(model: Model, card: ModelCard, about: dict[str, str], suffix: str) -> bytes:
    """Trace a model; return the content of a ``.pt2`` or ``.onnx`` file."""
    for package in ("onnx", "onnxscript") if suffix == ".onnx" else ():
        need(package, "onnx", "an export as .onnx")
    inputs = _example_inputs(card)
    # A traced program keeps the memory format, and ours is channels last.
    plain = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    try:
        return (_program if suffix == ".pt2" else _onnx)(plain, inputs, about)
    # A custom model may use operations that torch.export or ONNX does not support.
    except Exception as error:
        cause: BaseException = error
        # The outer exceptions only list the strategies that torch has tried.
        while isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        reason = reason_of(cause)
    raise SettingsError(
        f"the model cannot be exported as {suffix}, but as .safetensors: {reason}"
    )


def _example_inputs(card: ModelCard) -> Tensor:
    """Return two inputs to trace the model with."""
    if card.images is not None:
        channels, height, width = card.images.shape
        return torch.zeros(2, height, width, channels, dtype=torch.uint8)
    examples = card.task.train_examples(0)
    require(
        *(len(examples) > 0, "data-dir", card.settings.get("data-dir", "")),
        "a folder with training examples, which determine the shape of an input",
    )
    inputs, _ = next(examples.batches(2))
    return inputs


def _program(model: Model, inputs: Tensor, about: dict[str, str]) -> bytes:
    program = torch.export.export(
        model, (inputs,), dynamic_shapes=({0: Dim("n", min=1)},)
    )
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"card.json": json.dumps(about)})
    return buffer.getvalue()


def _onnx(model: Model, inputs: Tensor, about: dict[str, str]) -> bytes:
    program = torch.onnx.export(
        model,
        (inputs,),
        input_names=["inputs"],
        output_names=["outputs"],
        dynamic_shapes=({0: Dim("n", min=1)},),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    proto = program.model_proto
    for name, value in about.items():
        proto.metadata_props.add(key=name, value=value)
    return bytes(proto.SerializeToString())
