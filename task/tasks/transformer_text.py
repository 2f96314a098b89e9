"""Classification of texts by a transformer, with one table of texts per client."""

import csv
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from flwr_frl.common.settings import (
    Checked,
    PathText,
    SettingsError,
    require,
    setting,
    unknown,
)
from flwr_frl.task.data.labels import HELD_OUT_SEED, class_name
from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.transformer import (
    TextEncoder,
    load_tokenizer,
    load_transformer,
    locate,
)
from flwr_frl.task.tasks.text import FileTask
from flwr_frl.task.types import Loss

FORM = "files <client>.csv or <client>.tsv with the columns text and label"
# Tokens of a text by default; longer texts are cut.
LENGTH = 128


@dataclass(frozen=True)
class TransformerSettings(Checked):
    """Tables of texts, and which part of the transformer is trained.

    Parameters
    ----------
    data_dir : str, default ""
        Directory with files ``<client>.csv`` or ``<client>.tsv``, whose first line
        names the columns ``text`` and ``label``. On a device, one file.
    seed : int, default 0
        Seed of the initial head.
    sequence_length : int, default 0
        Tokens per example; 0 stands for 128. Longer texts are cut.
    test_fraction : float, default 0.2
        Fraction of each file that is for testing; the same rows for all seeds.
    classes : str, default ""
        Comma-separated names of the classes, for devices that lack some of them; by
        default the labels in the files.
    frozen_layers : int, default 0
        Number of the transformer's first layers that are not trained and not sent,
        with its embeddings; -1 freezes the whole transformer.
    """

    data_dir: PathText = setting(
        "", form="a directory", may_differ="on resume", per_device=True
    )
    seed: int = setting(0, ge=0)
    sequence_length: int = setting(0, ge=0, le=100_000)
    test_fraction: float = setting(0.2, gt=0, lt=1)
    classes: str = setting("", form="names, separated by commas", safe=True)
    frozen_layers: int = setting(0, ge=-1)


class TransformerText(FileTask):
    """Classification of texts by a pretrained transformer and a linear head.

    Parameters
    ----------
    name : str
        The transformer, as for `flwr_frl.task.models.transformer.locate`.
    settings : TransformerSettings
        Tables of texts, and which part of the transformer is trained.
    num_clients : int
        Number of clients; 0 gives client 0 all files.

    Raises
    ------
    SettingsError
        If there is no such transformer, there are fewer files than clients, or a file
        is malformed.
    """

    _settings_type: ClassVar[type] = TransformerSettings
    loss: Loss = staticmethod(nn.functional.cross_entropy)

    def __init__(
        self, name: str, settings: TransformerSettings, num_clients: int
    ) -> None:
        self.settings, self.place = settings, locate(name)
        if not Path(self.place).is_dir():
            self.notes = (f"{self.place} is loaded from the Hugging Face hub",)
        super().__init__(settings.data_dir, num_clients, (".csv", ".tsv"), FORM)
        self.length = settings.sequence_length or LENGTH
        found = self._classes()
        names = [class_name(n) for n in settings.classes.split(",") if n.strip()]
        for label in found if names else ():
            if label not in names:
                raise unknown("class", label, names, code="classes")
        self.classes = tuple(names) or found

    @cached_property
    def tokenizer(self) -> Any:
        """The transformer's tokenizer."""
        return load_tokenizer(self.place)

    def initial_model(self) -> SplitModel:
        """Return a new model: the pretrained transformer, and a head by the seed."""
        transformer = load_transformer(self.place, self.settings.frozen_layers)
        encoder = TextEncoder(transformer, self.tokenizer.pad_token_id)
        with seeded(self.settings.seed):
            width = int(transformer.config.hidden_size)  # type: ignore[arg-type, union-attr]
            return SplitModel(encoder, nn.Linear(width, len(self.classes)))

    def read(self, line: str) -> Tensor:
        """Return the tokens of a text."""
        return self._tokens([line])[0]

    def _read(self, client: int) -> tuple[ExampleSet, ExampleSet]:
        rows = [row for file in self.files[client] for row in self._rows(file)]
        targets = torch.tensor([self.classes.index(label) for label, _ in rows])
        examples = ExampleSet(self._tokens([text for _, text in rows]), targets)
        n = len(rows)
        order = np.random.default_rng([HELD_OUT_SEED, n]).permutation(n)
        cut = n - int(n * self.settings.test_fraction + 0.5)
        train, test = (np.sort(part) for part in (order[:cut], order[cut:]))
        return (
            examples.subset(torch.from_numpy(train)),
            examples.subset(torch.from_numpy(test)),
        )

    def _tokens(self, texts: list[str]) -> Tensor:
        encoded = self.tokenizer(
            texts,
            max_length=self.length,
            truncation=True,
            padding="max_length",
            return_tensors="pt",
        )
        tokens: Tensor = encoded["input_ids"]
        return tokens

    def _rows(self, path: Path) -> list[tuple[str, str]]:
        """Return the (label, text) pairs of a table."""
        delimiter = "\t" if path.suffix == ".tsv" else ","
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows = list(csv.DictReader(file, delimiter=delimiter, strict=True))
        except (OSError, UnicodeError, csv.Error) as error:
            line = f"{str(path)!r} cannot be read: {error}"
            raise SettingsError(line, "data-dir") from None
        allowed = f"a text, a label and no more cells, as in {FORM}; quote texts"
        pairs = []
        for number, row in enumerate(rows or [{}], 1):
            label, text = class_name(row.get("label") or ""), row.get("text")
            # `DictReader` keeps the cells beyond the header's under None.
            valid = bool(label) and text is not None and None not in row
            require(valid, "data-dir", f"{path}, row {number}", allowed)
            pairs.append((label, str(text)))
        return pairs
