"""Export a trained model to one file."""

import copy
import io
import json
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from flwr_frl.clients.device.card import Classifier, ModelCard
from flwr_frl.clients.device.task_card import TaskCard
from flwr_frl.clients.predict.loading import FORMAT
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.files import write_atomically
from flwr_frl.task.models import SplitModel
from flwr_frl.task.settings import SettingsError, need, reason_of, require


def export(
    classifier: Classifier | SplitModel, card: ModelCard | TaskCard, path: Path
) -> None:
    """Write a model to one file, wholly or not at all.

    Another suffix, or a file that cannot be written, is a `SettingsError`; so is
    ``.safetensors`` for a model with more parts than the card's.

    Parameters
    ----------
    classifier : Classifier or SplitModel
        The model.
    card : ModelCard or TaskCard
        Written along.
    path : Path
        ``.safetensors``, for `load_model`; ``.pt2``, for ``torch.export.load``: a
        program from uint8 pixels, or the task's inputs, to the outputs, with
        ``card.json`` as an extra file; or ``.onnx``: the same from ``inputs`` to
        ``outputs``, with the card as its metadata.
    """
    about = {"format": FORMAT, **card.metadata()}
    if path.suffix == ".safetensors":
        model = classifier.model if isinstance(classifier, Classifier) else classifier
        tensors = {n: t.contiguous() for n, t in model.state_dict().items()}
        if tensors.keys() != card.build().state_dict().keys():
            raise SettingsError(
                f"export is {str(path)!r}; it must end with .pt2, as this algorithm's "
                "model has more parts than the task's"
            )
        data = save(tensors, metadata=about)
    elif path.suffix == ".pt2":
        data = _program(classifier, card, about)
    elif path.suffix == ".onnx":
        data = _onnx(classifier, card, about)
    else:
        raise SettingsError(
            f"export is {str(path)!r}; it must end with .safetensors, .pt2 or .onnx"
        )
    try:
        write_atomically(path, data)
    except OSError as error:
        raise SettingsError(f"export {str(path)!r}: {error}") from None


def _traced(
    classifier: Classifier | SplitModel, card: ModelCard | TaskCard
) -> tuple[torch.nn.Module, Tensor]:
    """Return the model as a file keeps it, and inputs by which it is traced."""
    if isinstance(card, ModelCard):
        channels, height, width = card.shape
        example = torch.zeros(2, height, width, channels, dtype=torch.uint8)
    else:
        examples: ExampleSet = card.task.train_examples(0)
        require(
            *(len(examples) > 0, "data-dir", card.settings.get("data-dir", "")),
            "one with training examples, which show what goes in",
        )
        example, _ = next(examples.batches(2))
    # A file keeps memory as it lies, and here convolutions are channels last.
    plain = copy.deepcopy(classifier).to(memory_format=torch.contiguous_format)
    return plain, example


def _program(
    classifier: Classifier | SplitModel,
    card: ModelCard | TaskCard,
    about: dict[str, str],
) -> bytes:
    plain, example = _traced(classifier, card)
    try:
        program = torch.export.export(
            plain, (example,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},)
        )
    # An outsider's model can do what a program cannot.
    except Exception as error:
        raise _refused(".pt2", error) from None
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"card.json": json.dumps(about)})
    return buffer.getvalue()


def _onnx(
    classifier: Classifier | SplitModel,
    card: ModelCard | TaskCard,
    about: dict[str, str],
) -> bytes:
    for package in ("onnx", "onnxscript"):
        need(package, "onnx", "an export as .onnx")
    plain, example = _traced(classifier, card)
    try:
        program = torch.onnx.export(
            plain,
            (example,),
            input_names=["inputs"],
            output_names=["outputs"],
            dynamic_shapes=({0: torch.export.Dim("n", min=1)},),
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        model = program.model_proto
    # Not every operation of torch is one of ONNX.
    except Exception as error:
        raise _refused(".onnx", error) from None
    for name, value in about.items():
        model.metadata_props.add(key=name, value=value)
    return bytes(model.SerializeToString())


def _refused(suffix: str, error: Exception) -> SettingsError:
    # What torch says first of a failed export is which way it took.
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    reason = reason_of(error)
    return SettingsError(
        f"the model cannot be exported as {suffix}, but as .safetensors: {reason}"
    )
