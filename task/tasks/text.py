"""Text, one file a client: the next character, or the class of a line.

The shapes of LEAF's Shakespeare (the next of 80 characters) and Sent140 (the class of a
tweet's words), with the papers' two-layer LSTMs.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar
from zlib import crc32

import torch
from torch import Tensor, nn

from flwr_frl.task.base import BaseTask
from flwr_frl.task.devices import seeded
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.models import SplitModel
from flwr_frl.task.settings import Checked, Place, Range, Seed, SettingsError, require
from flwr_frl.task.training import Loss

# LEAF's characters for Shakespeare; anything else is the first.
CHARACTERS = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
# Words have a number from 1 up to here by their checksum, so that devices agree without
# a list; 0 fills short lines up. SRPFL's vocabulary has 10,000 words.
WORDS = 10_000
# The last part of each file tests.
TEST_SHARE = 0.2
HOLDS = "<client>.txt, of text, or <client>.tsv, a class, a tab and a text a line"


class RecurrentText(nn.Module):
    """An embedding and a two-layer LSTM: tokens (n, time) to features.

    Parameters
    ----------
    tokens, embedding, width : int
        How many tokens there are, and the sizes of their vectors and of each layer.
    dropout : float, default 0
        Between the layers, and of the features.
    both : bool, default False
        Whether the text is read backwards as well; features are of twice the width.
    """

    def __init__(
        self,
        tokens: int,
        embedding: int,
        width: int,
        dropout: float = 0.0,
        both: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding)
        self.lstm = nn.LSTM(
            embedding, width, 2, batch_first=True, dropout=dropout, bidirectional=both
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the last layer's states when all has been read."""
        _, (states, _) = self.lstm(self.embedding(tokens))
        last = states[-2:] if self.lstm.bidirectional else states[-1:]
        features: Tensor = self.dropout(last.transpose(0, 1).flatten(1))
        return features


@dataclass(frozen=True)
class TextSettings(Checked):
    """Which text, and how much of it the model sees.

    Parameters
    ----------
    data_dir : str, default ""
        A directory with ``<client>.txt``, of which the next character is learned, or
        with ``<client>.tsv``, which has a class, a tab and a text in each line. The
        last fifth of a file tests. A device's own has one file.
    seed : int, default 0
        Fixes the initial model.
    sequence_length : int, default 0
        Characters, or words, that the model sees; 0 are LEAF's 80 or 25.
    lstm_width : int, default 256
        Units of each of the two layers.
    """

    data_dir: Annotated[str, Place("a directory")] = ""
    seed: Annotated[int, Seed] = 0
    sequence_length: Annotated[int, Range("[0, 100000]")] = 0
    lstm_width: Annotated[int, Range("[1, inf)")] = 256


class TextTask(BaseTask):
    """Text of one file a client.

    Parameters
    ----------
    settings : TextSettings
        Which.
    num_clients : int
        Number of clients; 0 gives client 0 all files (a device has one).

    Raises
    ------
    SettingsError
        If there are no such files, not as many, or a line is none.
    """

    settings_type: ClassVar[type] = TextSettings

    def __init__(self, settings: TextSettings, num_clients: int) -> None:
        self.settings = settings
        root = Path(settings.data_dir).expanduser()
        kinds = [sorted(root.glob(f"*.{suffix}")) for suffix in ("txt", "tsv")]
        if not settings.data_dir or not root.is_dir() or not any(kinds):
            raise SettingsError(
                f"data-dir is {settings.data_dir!r}; it must hold {HOLDS}"
            )
        if all(kinds):
            raise SettingsError(
                f"data-dir {str(root)!r} holds {kinds[0][0].name} and "
                f"{kinds[1][0].name}; it must hold either {HOLDS}"
            )
        self.labelled = not kinds[0]
        files = kinds[0] or kinds[1]
        names = f"{files[0].name} to {files[-1].name}"
        allowed = f"at most {len(files)}, the number of files, {names}"
        require(num_clients <= len(files), "num-clients", num_clients, allowed)
        self.files = [files] if num_clients == 0 else [[f] for f in files[:num_clients]]
        self.client_names = tuple(f.stem for f in files[:num_clients])
        self.length = settings.sequence_length or (25 if self.labelled else 80)
        # A window of characters and the next one have all but one in common.
        self.overlap = 0 if self.labelled else self.length
        self.loss: Loss = nn.functional.cross_entropy
        self.classes: tuple[str, ...] = tuple(CHARACTERS)
        if self.labelled:
            found = {label for file in files for label, _ in _lines(file)}
            require(len(found) > 1, "data-dir", str(root), "of more than one class")
            self.classes = tuple(sorted(found))
        self._examples = lru_cache(maxsize=32)(self._read)

    def initial_model(self) -> SplitModel:
        """Return the papers' model with the seed's initial values.

        Characters: LEAF's, with vectors of 8. Words: SRPFL's (appendix C), in both
        directions with dropout 0.5, vectors of 100 and a layer of 5 before the head.
        """
        width = self.settings.lstm_width
        with seeded(self.settings.seed):
            if not self.labelled:
                lstm = RecurrentText(len(CHARACTERS), 8, width)
                return SplitModel(lstm, nn.Linear(width, len(CHARACTERS)))
            lstm = RecurrentText(WORDS, 100, width, dropout=0.5, both=True)
            layers = nn.Sequential(lstm, nn.Linear(2 * width, 5), nn.ReLU())
            return SplitModel(layers, nn.Linear(5, len(self.classes)))

    def train_examples(self, client: int) -> ExampleSet:
        """Return the first part of a client's text."""
        return self._examples(client)[0]

    def test_examples(self, client: int) -> ExampleSet:
        """Return the last part of a client's text."""
        return self._examples(client)[1]

    def read(self, line: str) -> Tensor:
        """Return the tokens of a text, whose last ones count."""
        if self.labelled:
            return self._words(line.rpartition("\t")[2])
        if len(line) < self.length:
            line = line.rjust(self.length)
        return _characters(line[-self.length :])

    def _read(self, client: int) -> tuple[ExampleSet, ExampleSet]:
        pairs = [self._pair(path) for path in self.files[client]]
        if len(pairs) == 1:
            return pairs[0]
        train, test = zip(*pairs, strict=True)
        return _joined(train), _joined(test)

    def _pair(self, path: Path) -> tuple[ExampleSet, ExampleSet]:
        """Return a file's training and test examples."""
        if not self.labelled:
            codes = _characters(_text(path))
            cut = len(codes) - int(len(codes) * TEST_SHARE)
            # Of the test's own text, so that nothing is in both.
            parts = codes[:cut], codes[cut:]
            if len(parts[1]) <= self.length:
                raise SettingsError(
                    f"{str(path)!r} has {len(codes)} characters; with sequence-length "
                    f"{self.length} there must be at least "
                    f"{int((self.length + 1) / TEST_SHARE)}"
                )
            # Views: no character is copied.
            windows = [part.unfold(0, self.length, 1)[:-1] for part in parts]
            train, test = (
                ExampleSet(window, part[self.length :])
                for window, part in zip(windows, parts, strict=True)
            )
            return train, test
        lines = list(_lines(path))
        inputs = torch.stack([self._words(text) for _, text in lines])
        targets = torch.tensor([self.classes.index(label) for label, _ in lines])
        cut = len(lines) - int(len(lines) * TEST_SHARE)
        return (
            ExampleSet(inputs[:cut], targets[:cut]),
            ExampleSet(inputs[cut:], targets[cut:]),
        )

    def _words(self, text: str) -> Tensor:
        words = text.lower().split()[-self.length :]
        codes = [crc32(word.encode()) % (WORDS - 1) + 1 for word in words]
        return torch.tensor([0] * (self.length - len(codes)) + codes)


def _joined(parts: tuple[ExampleSet, ...]) -> ExampleSet:
    return ExampleSet(
        torch.cat([part.inputs for part in parts]),
        torch.cat([part.targets for part in parts]),
    )


def _characters(text: str) -> Tensor:
    places = {character: i for i, character in enumerate(CHARACTERS)}
    return torch.tensor([places.get(character, 0) for character in text])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise SettingsError(f"{str(path)!r} cannot be read: {error}") from None


def _lines(path: Path) -> list[tuple[str, str]]:
    """Return the labels and texts of a file."""
    found = []
    if not _text(path).strip("\n"):
        raise SettingsError(f"{str(path)!r} has no lines")
    # Not by splitlines: a text may hold other characters that break a line.
    for number, line in enumerate(_text(path).rstrip("\n").split("\n"), 1):
        label, tab, text = line.partition("\t")
        if not tab or not label:
            raise SettingsError(
                f"{str(path)!r}, line {number} is {line[:40]!r}; it must be a class, a "
                "tab and a text"
            )
        found.append((label, text))
    return found
