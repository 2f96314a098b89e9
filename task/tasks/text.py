"""Next-character prediction and text classification, with one file per client.

Shapes and models (two-layer LSTMs) are those of LEAF's Shakespeare, which predicts the
next of 80 characters, and of Sent140, which classifies tweets; or texts are classified
by a pretrained transformer.
"""

import csv
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from flwr_frl.common.errors import reading, require
from flwr_frl.common.settings import Checked, PathText, setting
from flwr_frl.task.base import BaseTask
from flwr_frl.task.data.datasets import named_classes
from flwr_frl.task.data.tables import HELD_OUT_SEED
from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import ExampleSet, Loss
from flwr_frl.task.models import SplitModel
from flwr_frl.task.models.transformer import (
    TextEncoder,
    load_tokenizer,
    load_transformer,
    locate,
)

# LEAF's characters for Shakespeare. Other characters are replaced by the first one.
CHARACTERS = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
# Size of the vocabulary (SRPFL); token 0 pads short lines. Without word vectors, a
# word's token is a checksum from 1 to WORDS - 1: devices need no common word list.
WORDS = 10_000
# Token of a word that has no vector.
UNKNOWN = 1
# Fraction of each file, at its end, that is for testing.
TEST_FRACTION = 0.2
# Tokens of a text for a transformer by default; longer texts are cut.
LENGTH = 128
TABLES = (".csv", ".tsv")
TABLE_FORM = "files <client>.csv or <client>.tsv with the columns text and label"
FORM = f"files <client>.txt, of text, or {TABLE_FORM}"


class RecurrentText(nn.Module):
    """An embedding and a two-layer LSTM.

    Maps tokens of shape (n, time) to features of shape (n, width), (n, 2 * width) if
    bidirectional, or (n, time, width) with features at every position.

    Parameters
    ----------
    tokens, embedding, width : int
        Number of tokens, size of the embedding, and units per layer.
    dropout : float, default 0
        Dropout between the layers and of the features.
    bidirectional : bool, default False
        Whether the LSTM also reads backwards.
    every_position : bool, default False
        Return the features at every position instead of those at the end.
    """

    def __init__(
        self,
        tokens: int,
        embedding: int,
        width: int,
        dropout: float = 0.0,
        bidirectional: bool = False,
        every_position: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding)
        options = {"batch_first": True, "bidirectional": bidirectional}
        self.lstm = nn.LSTM(embedding, width, 2, dropout=dropout, **options)
        self.dropout = nn.Dropout(dropout)
        self.every_position = every_position

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of the last layer, final or at every position."""
        outputs, (states, _) = self.lstm(self.embedding(tokens))
        if not self.every_position:
            last = states[-2:] if self.lstm.bidirectional else states[-1:]
            outputs = last.transpose(0, 1).flatten(1)
        features: Tensor = self.dropout(outputs)
        return features

    def extra_repr(self) -> str:
        """Return the attribute in which models with equal layers may differ."""
        return "every_position" if self.every_position else ""


class PositionwiseLinear(nn.Linear):
    """A linear layer applied at every position of a sequence.

    Maps features (n, time, width) to outputs (n, classes, time), which is the order
    that cross-entropy expects.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Return the outputs."""
        return super().forward(features).transpose(1, 2)


@dataclass(frozen=True)
class FileSettings(Checked):
    """Settings of all tasks of texts, which their classes describe."""

    data_dir: PathText = setting(
        "", form="a directory", may_differ="on resume", per_device=True
    )
    seed: int = setting(0, ge=0)
    sequence_length: int = setting(0, ge=0, le=100_000)


@dataclass(frozen=True)
class TextSettings(FileSettings):
    """Text files and size of the model.

    Parameters
    ----------
    data_dir : str, default ""
        Directory with files ``<client>.txt`` for next-character prediction, or for
        classification with files ``<client>.csv`` or ``<client>.tsv``, whose first line
        names the columns ``text`` and ``label``. The last fifth of a file is for
        testing. On a device, one file.
    seed : int, default 0
        Seed of the initial model.
    sequence_length : int, default 0
        Characters or words per example, or tokens with the task ``hf-text``; 0 stands
        for LEAF's 80 characters or 25 words, and for 128 tokens.
    text_windows : {"disjoint", "sliding"}, default "disjoint"
        How a text is cut into examples of ``sequence-length`` characters. Disjoint
        windows are consecutive, and the next character is predicted at every position.
        Sliding windows, as in LEAF, start at every character, and only the character
        after a window is predicted; an epoch takes about ``sequence-length`` times as
        long.
    lstm_width : int, default 256
        Units of each of the two LSTM layers.
    embedding_file : str, default ""
        File of word vectors in the format of GloVe, most frequent words first, for
        classification. The vectors of its first 9,998 words are neither trained nor
        sent. By default, an embedding of size 100 is trained, of checksums of words.
    """

    text_windows: Literal["disjoint", "sliding"] = setting("disjoint")
    lstm_width: int = setting(256, ge=1)
    embedding_file: PathText = setting(
        "", form="a file", may_differ="on resume", per_device=True
    )


@dataclass(frozen=True)
class TransformerSettings(FileSettings):
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

    test_fraction: float = setting(0.2, gt=0, lt=1)
    classes: str = setting("", form="names, separated by commas", safe=True)
    frozen_layers: int = setting(0, ge=-1)


class FileTask(BaseTask):
    """A task on files of texts, one per client.

    Parameters
    ----------
    settings : FileSettings
        Directory of the files.
    num_clients : int
        Number of clients; 0 on a device, which has one file.
    suffixes : tuple of str
        Suffixes of the files.
    form : str
        Description of the files, for error messages.

    Raises
    ------
    SettingsError
        If there are no files, or fewer than clients.
    """

    loss: Loss = staticmethod(nn.functional.cross_entropy)

    def __init__(
        self, settings: Any, num_clients: int, suffixes: tuple[str, ...], form: str
    ) -> None:
        self.settings, data_dir = settings, settings.data_dir
        root = Path(data_dir).expanduser()
        files = sorted(f for suffix in suffixes for f in root.glob(f"*{suffix}"))
        exist = bool(data_dir) and bool(files)
        require(exist, "data-dir", data_dir, f"a directory with {form}")
        allowed = f"at most {len(files)}, the number of files; a device has one"
        valid = num_clients <= len(files) if num_clients else len(files) == 1
        require(valid, "num-clients", num_clients, allowed)
        self.files = files
        self.client_names = tuple(file.stem for file in files[:num_clients])
        self._examples = lru_cache(maxsize=32)(self._split)

    @abstractmethod
    def _split(self, path: Path) -> tuple[ExampleSet, ExampleSet]:
        """Return the training and test examples of a file."""

    @abstractmethod
    def _tokens(self, texts: list[str]) -> Tensor:
        """Return the tokens of texts that are classified, shape (n, length)."""

    def _labelled(self, path: Path) -> ExampleSet:
        """Return the examples of a table."""
        labels, texts = zip(*_rows(path), strict=True)
        targets = torch.tensor([self.classes.index(label) for label in labels])
        return ExampleSet(self._tokens([*texts]), targets)

    def _classes(self) -> tuple[str, ...]:
        """Return the classes in all files, also in those of unused clients."""
        labels = {label for file in self.files for label, _ in _rows(file)}
        allowed = "a directory with texts of more than one class"
        require(len(labels) > 1, "data-dir", self.settings.data_dir, allowed)
        return tuple(sorted(labels))

    def train_examples(self, client: int) -> ExampleSet:
        """Return the examples from a client's text that are not for testing."""
        return self._examples(self.files[client])[0]

    def test_examples(self, client: int) -> ExampleSet:
        """Return the examples from a client's text that are for testing."""
        return self._examples(self.files[client])[1]

    def read(self, line: str) -> Tensor:
        """Return the tokens of a text."""
        return self._tokens([line])[0]


class TextTask(FileTask):
    """Next characters, or classes, of texts.

    Parameters
    ----------
    settings : TextSettings
        Text files and size of the model.
    num_clients : int
        Number of clients; 0 on a device, which has one file.

    Raises
    ------
    SettingsError
        If there are fewer files than clients, a text is too short, or a table is
        malformed.
    """

    _settings_type: ClassVar[type] = TextSettings

    def __init__(self, settings: TextSettings, num_clients: int) -> None:
        super().__init__(settings, num_clients, (".txt", *TABLES), FORM)
        kinds = {file.suffix in TABLES for file in self.files}
        allowed = f"a directory with either {FORM}"
        require(len(kinds) == 1, "data-dir", settings.data_dir, allowed)
        self.labelled = kinds == {True}
        self.length = settings.sequence_length or (25 if self.labelled else 80)
        self.every_position = not self.labelled and settings.text_windows == "disjoint"
        # Successive sliding windows share all but one character.
        self.overlap = 0 if self.labelled or self.every_position else self.length
        self.classes = self._classes() if self.labelled else tuple(CHARACTERS)
        self.vocabulary = dict[str, int]()
        self.vectors: Tensor | None = None
        if self.labelled and settings.embedding_file:
            self.vocabulary, self.vectors = read_vectors(Path(settings.embedding_file))

    def initial_model(self) -> SplitModel:
        """Return a new model with initial values drawn by the seed.

        For characters it is LEAF's, with an embedding of size 8. For words it is
        SRPFL's (appendix C): bidirectional, with dropout 0.5 and a layer of 5 units
        before the head. SRPFL has GloVe's vectors, which ``embedding_file`` reads.
        """
        width = self.settings.lstm_width
        with seeded(self.settings.seed):
            if not self.labelled:
                every = self.every_position
                lstm = RecurrentText(len(CHARACTERS), 8, width, every_position=every)
                linear = PositionwiseLinear if every else nn.Linear
                return SplitModel(lstm, linear(width, len(CHARACTERS)))
            words, size = (WORDS, 100) if self.vectors is None else self.vectors.shape
            lstm = RecurrentText(words, size, width, dropout=0.5, bidirectional=True)
            if self.vectors is not None:
                lstm.embedding.weight = nn.Parameter(self.vectors.clone(), False)
            layers = nn.Sequential(lstm, nn.Linear(2 * width, 5), nn.ReLU())
            return SplitModel(layers, nn.Linear(5, len(self.classes)))

    def read(self, line: str) -> Tensor:
        """Return the last ``length`` tokens of a text.

        Shorter ones are padded at the beginning, unless the model was trained to
        predict at every position.
        """
        if self.labelled:
            return super().read(line)
        if len(line) < self.length and not self.every_position:
            line = line.rjust(self.length)
        return _characters(line[-self.length :])

    def _split(self, path: Path) -> tuple[ExampleSet, ExampleSet]:
        """Return a file's examples. No window is partly for training and testing."""
        if self.labelled:
            examples = self._labelled(path)
            cut = len(examples) - int(len(examples) * TEST_FRACTION)
            rows = np.arange(len(examples))
            return examples.subset(rows[:cut]), examples.subset(rows[cut:])
        with reading(path, "data-dir"):
            codes = _characters(path.read_text(encoding="utf-8-sig"))
        tested = int(len(codes) * TEST_FRACTION)
        allowed = f"below {tested}, the characters of {str(path)!r} for testing"
        require(self.length < tested, "sequence-length", self.length, allowed)
        cut = len(codes) - tested
        return self._windows(codes[:cut]), self._windows(codes[cut:])

    def _windows(self, codes: Tensor) -> ExampleSet:
        """Return the examples of a part of a text, as views without copies."""
        if self.every_position:
            # The remaining characters, fewer than a window, are left out.
            stop = (len(codes) - 1) // self.length * self.length
            inputs, targets = codes[:stop], codes[1 : stop + 1]
            shape = -1, self.length
            return ExampleSet(inputs.view(shape), targets.view(shape))
        return ExampleSet(codes.unfold(0, self.length, 1)[:-1], codes[self.length :])

    def _tokens(self, texts: list[str]) -> Tensor:
        rows = []
        for text in texts:
            codes = [self._token(word) for word in text.lower().split()[-self.length :]]
            rows.append([0] * (self.length - len(codes)) + codes)
        return torch.tensor(rows)

    def _token(self, word: str) -> int:
        if self.vocabulary:
            return self.vocabulary.get(word, UNKNOWN)
        return crc32(word.encode()) % (WORDS - 1) + 1


def read_vectors(path: Path) -> tuple[dict[str, int], Tensor]:
    """Return the tokens of words, from 2, and the vectors of all tokens.

    Tokens 0 and 1, for padding and for words that are not in the file, have zeros.
    """
    allowed = "another word and equally many finite numbers in each line"
    form: dict[str, Any] = {"delimiter": " ", "comments": None, "ndmin": 2}
    with (
        reading(path, "embedding-file", allowed),
        path.expanduser().open(encoding="utf-8") as file,
    ):
        # Some programs write a blank at the end of each line.
        lines = (line.rstrip() for line in file)
        table = np.loadtxt(lines, np.str_, max_rows=WORDS - 2, **form)
        vectors = torch.from_numpy(table[:, 1:].astype(np.float32))
        vocabulary = {word: i for i, word in enumerate(table[:, 0].tolist(), 2)}
        if len(vocabulary) < len(table):
            raise ValueError("a word is repeated")
        if not (vectors.numel() and vectors.isfinite().all()):
            raise ValueError("a number is missing or not finite")
    return vocabulary, torch.cat([torch.zeros(2, vectors.shape[1]), vectors])


class TransformerText(FileTask):
    """Classification of texts by a pretrained transformer and a linear head.

    Parameters
    ----------
    name : str
        The transformer, as for `flwr_frl.task.models.transformer.locate`.
    settings : TransformerSettings
        Tables of texts, and which part of the transformer is trained.
    num_clients : int
        Number of clients; 0 on a device, which has one file.

    Raises
    ------
    SettingsError
        If there is no such transformer, there are fewer files than clients, or a file
        is malformed.
    """

    _settings_type: ClassVar[type] = TransformerSettings

    def __init__(
        self, name: str, settings: TransformerSettings, num_clients: int
    ) -> None:
        self.place = locate(name)
        if not Path(self.place).is_dir():
            self.notes = (f"{self.place} is loaded from the Hugging Face hub",)
        super().__init__(settings, num_clients, TABLES, TABLE_FORM)
        self.length = settings.sequence_length or LENGTH
        self.classes = named_classes(settings.classes, self._classes())

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

    def _split(self, path: Path) -> tuple[ExampleSet, ExampleSet]:
        examples = self._labelled(path)
        n = len(examples)
        order = np.random.default_rng([HELD_OUT_SEED, n]).permutation(n)
        cut = n - int(n * self.settings.test_fraction + 0.5)
        train, test = np.sort(order[:cut]), np.sort(order[cut:])
        return examples.subset(train), examples.subset(test)

    def _tokens(self, texts: list[str]) -> Tensor:
        size = {"max_length": self.length, "truncation": True, "padding": "max_length"}
        tokens: Tensor = self.tokenizer(texts, return_tensors="pt", **size)["input_ids"]
        return tokens


def _rows(path: Path) -> list[tuple[str, str]]:
    """Return the (label, text) pairs of a table."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    # Other readers take a stray quote for the begin of a text of many lines.
    with reading(path, "data-dir"), path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file, delimiter=delimiter, strict=True))
    allowed = f"a text, a label and no more cells, as in {TABLE_FORM}; quote texts"
    pairs = []
    for number, row in enumerate(rows or [{}], 1):
        label, text = (row.get("label") or "").strip(), row.get("text")
        # `DictReader` keeps the cells beyond the header's under None.
        valid = bool(label) and text is not None and None not in row
        require(valid, "data-dir", f"{path}, row {number}", allowed)
        pairs.append((label, str(text)))
    return pairs


def _characters(text: str) -> Tensor:
    places = {character: i for i, character in enumerate(CHARACTERS)}
    return torch.tensor([places.get(character, 0) for character in text])
