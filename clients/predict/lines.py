"""Predictions from lines of text files, for tasks that are not about image folders."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flwr_frl.clients.device.task_card import TaskCard
from flwr_frl.task.data.images import IMAGE_SUFFIXES
from flwr_frl.task.models import SplitModel
from flwr_frl.task.settings import SettingsError, reason_of


def predict(
    model: SplitModel, card: TaskCard, files: Sequence[Path]
) -> Iterator[tuple[str, ...]]:
    """Predict from every line of some files that is not empty.

    Parameters
    ----------
    model : SplitModel
        The model, in evaluation mode.
    card : TaskCard
        Whose task reads a line: a row of a table, a text; of an image file it gets the
        path.
    files : sequence of Path
        The files; one that is empty or cannot be read, or a line that the task or
        the model refuses or makes no number of, is a `SettingsError`.

    Yields
    ------
    place, class name, probability
        Of one line after the other. Where the task has no classes, the outputs follow
        the place.
    """
    for path in files:
        if path.suffix.lower() in IMAGE_SUFFIXES:
            yield str(path), *_answer(model, card, str(path), str(path))
            continue
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, ValueError) as error:
            raise SettingsError(f"{str(path)!r} cannot be read: {error}") from None
        if not any(map(str.strip, lines)):
            raise SettingsError(f"{str(path)!r} has nothing to predict from")
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{path}:{number}"
                yield place, *_answer(model, card, line, place)


def _answer(
    model: SplitModel, card: TaskCard, text: str, place: str
) -> tuple[str, ...]:
    try:
        with torch.no_grad():
            outputs: Tensor = model(card.task.read(text)[None])[0]
    # An outsider's reader or model can raise anything.
    except Exception as error:
        reason = reason_of(error)
        raise SettingsError(f"{place} cannot be predicted from: {reason}") from None
    if not outputs.isfinite().all():
        raise SettingsError(
            f"{place} cannot be predicted from: the model's output is not finite"
        )
    if not card.classes:
        return tuple(f"{value:.6g}" for value in outputs.flatten().tolist())
    # Of a sequence the last place counts.
    scores = outputs if outputs.ndim == 1 else outputs[:, -1]
    probability, label = scores.softmax(0).max(0)
    # A class may be a line break.
    name = card.classes[int(label)].encode("unicode_escape").decode("ascii")
    return name, f"{float(probability):.4f}"
