"""Classification of texts by a transformer, with one table of texts per client."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from flwr_frl.common.settings import (
    Checked,
    PathText,
    SettingsError,
    reason_of,
    require,
    setting,
    unknown,
)
from flwr_frl.task.base import BaseTask, Task
from flwr_frl.task.data.columns import class_name
from flwr_frl.task.data.hub import HELD_OUT_SEED
from flwr_frl.task.devices import current, seeded
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.transformer import (
    TextEncoder,
    load_tokenizer,
    load_transformer,
    locate,
)
from flwr_frl.task.training import Loss

FORM = "files <client>.csv or <client>.tsv with the columns text and label"
COLUMNS = ("text", "label")
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


@dataclass(frozen=True)
class FromTransformer:
    """Make the task of a transformer.

    Parameters
    ----------
    name : str, default ""
        The transformer, as for `flwr_frl.task.models.transformer.locate`.
    """

    name: str = ""

    settings_type: ClassVar[type] = TransformerSettings

    def __call__(self, settings: TransformerSettings, num_clients: int) -> Task:
        """Return the task; ``num_clients`` 0 gives client 0 all files."""
        return TransformerText(self.name, settings, num_clients)


class TransformerText(BaseTask):
    """Classification of texts by a pretrained transformer and a linear head.

    Parameters
    ----------
    name : str
        The transformer.
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

    loss: Loss = staticmethod(nn.functional.cross_entropy)

    def __init__(
        self, name: str, settings: TransformerSettings, num_clients: int
    ) -> None:
        self.settings, self.place = settings, locate(name)
        if not Path(self.place).is_dir():
            self.notes = (f"{self.place} is loaded from the Hugging Face hub",)
        root = Path(settings.data_dir).expanduser()
        files = sorted([*root.glob("*.csv"), *root.glob("*.tsv")])
        exist = bool(settings.data_dir) and bool(files)
        require(exist, "data-dir", settings.data_dir, f"a directory with {FORM}")
        allowed = f"at most {len(files)}, the number of files"
        require(num_clients <= len(files), "num-clients", num_clients, allowed)
        self.files = [[file] for file in files[:num_clients]] or [files]
        self.client_names = tuple(file.stem for file in files[:num_clients])
        self.tables = [[row for f in each for row in _rows(f)] for each in self.files]
        labels = {label for table in self.tables for _, label in table}
        names = [class_name(n) for n in settings.classes.split(",") if n.strip()]
        for label in sorted(labels):
            if names and label not in names:
                raise unknown("class", label, names, code="classes")
        self.classes: tuple[str, ...] = tuple(names or sorted(labels))
        allowed = "a directory with texts of more than one class"
        require(len(self.classes) > 1, "data-dir", settings.data_dir, allowed)
        self._examples = lru_cache(maxsize=32)(self._read)

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

    def check(self, client: int) -> None:
        """Try the model as `BaseTask` does, and once on a text of full length."""
        super().check(client)
        if self._refusal:
            length = self.settings.sequence_length or LENGTH
            allowed = f"shorter, as the transformer fails: {self._refusal}"
            require(False, "sequence-length", length, allowed)

    @cached_property
    def _refusal(self) -> str:
        """Why the model fails for texts of full length; empty if it does not."""
        tokens = self._tokens(["text"])[:, :1]
        length = self.settings.sequence_length or LENGTH
        try:
            with torch.no_grad():
                self.scratch_model.eval()(tokens.expand(-1, length).to(current()))
        # Models raise exceptions of many types.
        except Exception as error:
            return reason_of(error)
        return ""

    def train_examples(self, client: int) -> ExampleSet:
        """Return the examples of a client that are not for testing."""
        return self._examples(client)[0]

    def test_examples(self, client: int) -> ExampleSet:
        """Return the ``test-fraction`` of a client's examples."""
        return self._examples(client)[1]

    def read(self, line: str) -> Tensor:
        """Return the tokens of a text."""
        return self._tokens([line])[0]

    def _read(self, client: int) -> tuple[ExampleSet, ExampleSet]:
        texts, labels = zip(*self.tables[client], strict=True)
        examples = ExampleSet(
            self._tokens(list(texts)),
            torch.tensor([self.classes.index(label) for label in labels]),
        )
        n = len(labels)
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
            max_length=self.settings.sequence_length or LENGTH,
            truncation=True,
            padding="max_length",
            return_tensors="pt",
        )
        tokens: Tensor = encoded["input_ids"]
        return tokens


def _rows(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the (text, label) pairs of a table."""
    with _readable(path), path.open(encoding="utf-8-sig", newline="") as file:
        delimiter = "\t" if path.suffix == ".tsv" else ","
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        for column in COLUMNS:
            if column not in (reader.fieldnames or ()):
                line = f"{str(path)!r} has no column {column!r}; expected {FORM}"
                raise SettingsError(line, "data-dir")
        empty = True
        for row in reader:
            empty = False
            place = f"{str(path)!r}, line {reader.line_num}"
            label = class_name(row["label"] or "")
            if row["text"] is None or not label:
                line = f"{place} lacks a text or a label"
                raise SettingsError(line, "data-dir")
            # `DictReader` keeps the cells beyond the header's under None.
            if None in row:
                line = f"{place} has more cells than the header: quote texts"
                raise SettingsError(line, "data-dir")
            yield row["text"], label
        if empty:
            raise SettingsError(f"{str(path)!r} has no rows", "data-dir")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn exceptions of reading a table into a one-line `SettingsError`."""
    try:
        yield
    except (OSError, UnicodeError, csv.Error) as error:
        line = f"{str(path)!r} cannot be read: {error}"
        raise SettingsError(line, "data-dir") from None
