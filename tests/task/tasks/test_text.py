"""Text with one file per client: windows of characters, and classified lines."""

from zlib import crc32

import named_tasks
import pytest
from refusals import code_of

from flwr_frl.task.tasks.text import CHARACTERS

HEAD = "label\ttext\n"


def task_of(root, clients: int, **more):
    usual = {"data_dir": str(root), "lstm_width": 4}
    return named_tasks.task_of("text-folder", clients, **{**usual, **more})


def spelled(codes) -> str:
    return "".join(CHARACTERS[int(code)] for code in codes)


def test_disjoint_windows_predict_at_every_position(tmp_path):
    (tmp_path / "anna.txt").write_text("abcdefghijklmnopqrst")
    task = task_of(tmp_path, 1, sequence_length=3)
    # 15 of the first 16 characters are predicted, each from the one before.
    train, test = task.train_examples(0), task.test_examples(0)
    assert [spelled(w) for w in train.inputs] == ["abc", "def", "ghi", "jkl", "mno"]
    assert [spelled(w) for w in train.targets] == ["bcd", "efg", "hij", "klm", "nop"]
    # The last 4 characters are for testing; they share none with training.
    assert [spelled(w) for w in test.inputs] == ["qrs"]
    assert [spelled(w) for w in test.targets] == ["rst"]
    task.check(0)
    # Windows without common predictions can be split at random for validation.
    assert task.overlap == 0
    # Predictions use the last characters. Short texts are not padded, since windows
    # start without context.
    assert spelled(task.read("xyzab")) == "zab"
    assert spelled(task.read("b")) == "b"


def test_sliding_windows_and_their_next_characters(tmp_path):
    (tmp_path / "anna.txt").write_text("abcdefghijklmnopqrst")
    (tmp_path / "bob.txt").write_text("ABCDEFGHIJKLMNOPQRST" * 2)
    task = task_of(tmp_path, 2, sequence_length=3, text_windows="sliding")
    # 16 of 20 characters are for training: windows of 3 and the next character.
    anna = task.train_examples(0)
    assert [spelled(window) for window in anna.inputs[:2]] == ["abc", "bcd"]
    assert spelled(anna.targets) == "defghijklmnop"
    # The last 4 characters are for testing; they share none with training.
    test = task.test_examples(0)
    assert [spelled(window) for window in test.inputs] == ["qrs"]
    assert spelled(test.targets) == "t"
    assert len(task.train_examples(1)) == 32 - 3
    assert task.classes[int(test.targets[0])] == "t"
    # Predictions use the last characters, and short texts are padded.
    assert spelled(task.read("xyzab")) == "zab"
    assert spelled(task.read("b")) == "  b"
    assert task.overlap == 3


def test_model_of_leaf_has_the_documented_layers(tmp_path):
    assert len(set(CHARACTERS)) == len(CHARACTERS) == 80
    (tmp_path / "a.txt").write_text("to be or not to be, é " * 60)
    task = task_of(tmp_path, 1, lstm_width=256)
    shapes = {name: tuple(t.shape) for name, t in task.initial_state.items()}
    # Two layers with four gates each, for inputs of width 8 and 256
    assert shapes["representation.embedding.weight"] == (80, 8)
    assert shapes["representation.lstm.weight_ih_l0"] == (1024, 8)
    assert shapes["representation.lstm.weight_ih_l1"] == (1024, 256)
    assert shapes["head.weight"] == (80, 256)
    inputs, _ = next(task.train_examples(0).batches(5))
    assert inputs.shape == (5, 80)
    assert task.initial_model()(inputs).shape == (5, 80, 80)
    task.check(0)


def test_texts_with_a_class_are_parsed(tmp_path):
    good, bad = " Good \tWhat a day\n", 'bad\t"no\tno"\n'
    (tmp_path / "a.tsv").write_text("label\ttext\n" + (good + bad) * 5)
    (tmp_path / "b.csv").write_text("text,label\n" + "no no,bad\n" * 5)
    task = task_of(tmp_path, 2, sequence_length=4)
    assert task.classes == ("Good", "bad")
    train, test = task.train_examples(0), task.test_examples(0)
    assert (len(train), len(test)) == (8, 2)
    assert train.targets.tolist() == [0, 1] * 4
    # Texts are padded on the left, and the case of words does not matter.
    numbers = [crc32(word) % 9_999 + 1 for word in (b"what", b"a", b"day")]
    assert train.inputs[0].tolist() == [0, *numbers]
    assert task.read("WHAT a day").tolist() == [0, *numbers]
    # Only the last words of a long text are used.
    assert task.read("so so what a day")[1:].tolist() == numbers
    shapes = {name: tuple(t.shape) for name, t in task.initial_state.items()}
    # SRPFL: 10,000 words, vectors of width 100, both directions, a layer of 5, the head
    assert shapes["representation.0.embedding.weight"] == (10_000, 100)
    assert shapes["representation.0.lstm.weight_ih_l0_reverse"] == (16, 100)
    assert shapes["representation.1.weight"] == (5, 8)
    assert shapes["head.weight"] == (2, 5)


def test_words_have_the_vectors_of_a_file(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\n" + "So good so,1\nbad,0\n" * 5)
    file = tmp_path / "vectors"
    file.write_text("so 1 2.5 -3\nbad 4 5 6\n")
    task = task_of(tmp_path, 1, sequence_length=3, embedding_file=str(file))
    # Unknown words have token 1, and padding token 0.
    inputs = task.train_examples(0).inputs[:2]
    assert inputs.tolist() == [[2, 1, 2], [0, 0, 3]]
    embedding = task.scratch_model.representation[0].embedding
    assert embedding(inputs[0]).tolist() == [[1, 2.5, -3], [0, 0, 0], [1, 2.5, -3]]
    # They are not trained and not sent.
    assert "representation.0.embedding.weight" not in task.initial_state
    assert task.initial_state["representation.0.lstm.weight_ih_l0"].shape == (16, 3)
    for damaged in ("", "so 1 2\nbad 3", "so 1\nso 1", "so 1\nbad x", "so 1\nbad nan"):
        file.write_text(damaged)
        options = {"embedding_file": str(file)}
        assert code_of(task_of, tmp_path, 1, **options) == "embedding-file", damaged


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({}, "data-dir"),
        ({"a.txt": "abc", "b.tsv": f"{HEAD}x\ty"}, "data-dir"),
        ({"a.txt": "abc" * 20}, "num-clients"),
        ({"a.txt": "abcde", "b.txt": "b"}, "sequence-length"),
        ({"a.tsv": f"{HEAD}x\ty\nno tab", "b.tsv": f"{HEAD}z\ty"}, "data-dir"),
        ({"a.tsv": f"{HEAD}x\ty", "b.tsv": f"{HEAD}x\tz"}, "data-dir"),
        ({"a.tsv": "", "b.tsv": f"{HEAD}x\tz"}, "data-dir"),
        ({"a.txt": b"\xff\xfe" * 50, "b.txt": "b" * 50}, "data-dir"),
    ],
)
def test_invalid_folders_are_an_error(tmp_path, files, code):
    for name, text in files.items():
        content = text if isinstance(text, bytes) else text.encode()
        (tmp_path / name).write_bytes(content)
    task = lambda: task_of(tmp_path, 2, sequence_length=3).train_examples(0)  # noqa: E731
    assert code_of(task) == code


def test_byte_order_mark_is_not_part_of_a_class(tmp_path):
    # Notepad writes byte order marks, and texts may contain Unicode line separators.
    text = f"\ufeff{HEAD}pos\tgood\u2028day\r\nneg\tno\r\n"
    (tmp_path / "a.tsv").write_bytes(text.encode())
    task = task_of(tmp_path, 1, sequence_length=3)
    assert task.classes == ("neg", "pos")
    assert len(task.train_examples(0)) + len(task.test_examples(0)) == 2
