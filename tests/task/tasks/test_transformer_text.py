"""Texts classified by a transformer from a folder or a package."""

import csv
import json
import shutil
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import named_tasks
import numpy as np
import pytest
import refusals
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from flwr_frl import simulate
from flwr_frl.predict import load_run

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
LABELS = {"good": "up", "bad": "down", "fine": "up", "poor": "down"}
VOCABULARY = [*SPECIAL, *LABELS, "film", "phone", "the", "is"]
ROWS = [
    (f"the {noun} is {word}", label)
    for noun in ("film", "phone")
    for word, label in LABELS.items()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny transformer with random weights, and its tokenizer."""
    root = tmp_path_factory.mktemp("models") / "tiny"
    tokens = {word: i for i, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(tokens, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", None, ends)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(root)
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=len(VOCABULARY), intermediate_size=16, hidden_dropout_prob=0, **sizes
    )
    BertModel(config).save_pretrained(root)
    return root


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Files of three clients; one has tabs and lacks one of the classes."""
    root = tmp_path / "texts"
    root.mkdir()
    for name in ("ann", "bob"):
        write(root / f"{name}.csv", [("text", "label"), *ROWS, *ROWS])
    rows = [(label, text) for text, label in ROWS if label == "up"]
    write(root / "cat.tsv", [("label", "text"), *rows], "\t")
    return root


def write(path: Path, rows, delimiter: str = ",") -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)


def task_of(name, data, clients: int = 3, **more: Any):
    return named_tasks.task_of(f"hf-text:{name}", clients, data_dir=str(data), **more)


def code_of(*arguments, **more: Any) -> str:
    return refusals.code_of(lambda: task_of(*arguments, **more).scratch_model)


# Examples and models


def test_each_file_is_a_client_with_all_of_its_rows(folder, data):
    task = task_of(folder, data, test_fraction=0.25)
    assert task.client_names == ("ann", "bob", "cat")
    assert task.classes == ("down", "up")
    assert [len(task.train_examples(i)) for i in range(3)] == [12, 12, 3]
    assert [len(task.test_examples(i)) for i in range(3)] == [4, 4, 1]
    assert set(task.train_examples(2).targets.tolist()) == {1}
    parts = task.train_examples(2), task.test_examples(2)
    rows = torch.cat([next(part.batches(9))[0] for part in parts])
    expected = torch.stack([task.read(text) for text, label in ROWS if label == "up"])
    assert sorted(rows.tolist()) == sorted(expected.tolist())


def test_features_are_means_over_the_tokens_of_a_text(folder, data):
    task = task_of(folder, data)
    model = task.initial_model().eval()
    tokens = torch.stack([task.read("good film"), task.read("the phone is bad")])
    transformer = BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        features = model.representation(tokens)
        for row, count in zip(features, (4, 6), strict=True):
            alone = tokens[0 if count == 4 else 1][:count]
            states = transformer(alone[None]).last_hidden_state
            torch.testing.assert_close(row, states[0].mean(0))


def test_device_has_one_file_and_may_set_the_classes(folder, data):
    assert code_of(folder, data, 0) == "num-clients"
    for name in ("bob.csv", "cat.tsv"):
        (data / name).unlink()
    task = task_of(folder, data, 0, classes="down, up, none")
    assert len(task.train_examples(0)) + len(task.test_examples(0)) == 16
    assert task.classes == ("down", "up", "none")
    assert code_of(folder, data, 0, classes="up,none") == "classes"


@pytest.mark.parametrize(
    ("layers", "trained"), [(0, {0, 1, 2}), (1, {1, 2}), (3, set()), (-1, set())]
)
def test_first_layers_are_frozen(folder, data, layers, trained):
    task = task_of(folder, data, frozen_layers=layers)
    names = [n for n in task.initial_state if "encoder.layer." in n]
    assert {int(n.partition("layer.")[2][0]) for n in names} == trained
    embeddings = [n for n in task.initial_state if "embeddings" in n]
    assert bool(embeddings) == (layers == 0)
    assert not [n for n in task.initial_state if "pooler" in n]
    assert code_of(folder, data, frozen_layers=4) == "frozen-layers"


# Sources of transformers


def test_a_package_that_contains_a_transformer_is_found(folder, data, monkeypatch):
    package = folder.parent / "tiny_package"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    if not (package / "model").exists():
        (package / "model").symlink_to(folder)
    monkeypatch.setattr(sys, "path", [str(folder.parent), *sys.path])
    for name in ("tiny_package", "tiny-package"):
        assert task_of(name, data).place == str(folder.resolve())


@pytest.mark.parametrize(
    "name",
    ["", "json", "no_such_package", "./no", "a/b/c", "~nobody/x", "a\0b", "n" * 999],
)
def test_invalid_hub_names_fail_without_network_access(name, data):
    assert code_of(name, data) == "task"


def test_download_from_the_hub_is_announced(data, monkeypatch):
    asked = []

    def from_pretrained(place, local_files_only, **more):
        asked.append((place, local_files_only))
        raise OSError("no network")

    name = "transformers.AutoTokenizer.from_pretrained"
    monkeypatch.setattr(name, from_pretrained)
    task = task_of("owner/name", data)
    assert "hub" in task.notes[0]
    assert "no network" in str(refusals.refusal(task.train_examples, 0))
    assert asked == [("owner/name", False)]


def test_code_in_a_folder_is_not_run(folder, data, tmp_path, monkeypatch):
    coded = tmp_path / "coded"
    shutil.copytree(folder, coded)
    names = {"AutoConfig": "code.A", "AutoModel": "code.B"}
    named = {"auto_map": {**names, "AutoTokenizer": ["code.C", None]}}
    kind = {"model_type": "mine", "tokenizer_class": "C"}
    for file in "config.json", "tokenizer_config.json":
        content = json.loads((coded / file).read_text())
        (coded / file).write_text(json.dumps({**content, **named, **kind}))
    (coded / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    # A prompt would be answered.
    monkeypatch.setattr(sys, "stdin", StringIO("y\n" * 9))
    for device in "cpu", "meta":
        with torch.device(device):
            assert code_of(coded, data) == "task"
    read = task_of(coded, data).train_examples
    assert "code of its own" in str(refusals.refusal(read, 0))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "bert"}')
    assert code_of(tmp_path / "broken", data) == "task"
    assert not (tmp_path / "ran").exists()


# Malformed tables


def test_malformed_tables_are_an_error(folder, data):
    rows = ("", "only text\n", "a,\n", '"a,b\n', "the film is good, really,up\n")
    for text in ("", "text,class\na,b\n", *(f"text,label\n{row}" for row in rows)):
        (data / "ann.csv").write_text(text)
        assert code_of(folder, data) == "data-dir"


def test_missing_tables_are_an_error(folder, data, tmp_path):
    assert code_of(folder, "") == "data-dir"
    assert code_of(folder, tmp_path) == "data-dir"
    assert code_of(folder, data, 4) == "num-clients"
    for file in data.glob("*.csv"):
        file.unlink()
    assert code_of(folder, data, 1) == "data-dir"


# Complete runs


@pytest.mark.parametrize("rows", [8, 3])
def test_closed_form_heads_equal_numpy_on_the_pooled_features(folder, tmp_path, rows):
    (tmp_path / "texts").mkdir()
    for i, name in enumerate(("ann", "bob")):
        own = ROWS[i : i + rows]
        write(tmp_path / "texts" / f"{name}.csv", [("text", "label"), *own])
    # Nobody has the third class. With 3 rows there are 4 examples of 8 features.
    named = {"data_dir": str(tmp_path / "texts"), "frozen_layers": -1}
    named |= {"classes": "down, up, none", "task": f"hf-text:{folder}"}
    task = task_of(folder, named["data_dir"], 2, classes=named["classes"])
    model, parts = task.initial_model().eval(), map(task.train_examples, range(2))
    x, y = map(torch.cat, zip(*(next(part.batches(9)) for part in parts), strict=True))
    z, y = model.representation(x).detach().double().numpy(), y.numpy()
    means = np.stack([z[y == c].mean(0) for c in range(2)])
    total, center, own = np.bincount(y, minlength=3), z - z.mean(0), z - means[y]
    ridge = 0.1 * np.eye(8) * np.square(z).sum() / 8
    w = np.linalg.solve(center.T @ center + ridge, center.T @ np.eye(3)[y]).T
    square = own.T @ own / len(z)
    g = np.linalg.solve(square + 0.1 * np.trace(square) / 8 * np.eye(8), means.T).T
    log = np.log((total + 1) / (len(z) + 3))
    expected = {
        "fed3r": (w, total / len(z) - w @ z.mean(0)),
        "fedcgs": (g, log[:2] - (g * means).sum(1) / 2),
    }
    for name, head in expected.items():
        more = {"class_prior": "global"} if name == "fedcgs" else {}
        more |= {"checkpoint_every": 1, "output": str(tmp_path), "ridge": 0.1}
        simulate(name, "inline", clients=2, rounds=1, fraction=1.0, **named, **more)
        found = load_run(tmp_path / name, "bob", **named).model.head
        for array, values in zip(head, (found.weight, found.bias), strict=True):
            values = values.detach().numpy()[: len(array)]
            np.testing.assert_allclose(values, array, rtol=1e-3, atol=1e-3)
    assert (found.weight[2] == 0).all()
    assert found.bias[2] < -99


def test_a_run_is_loaded(folder, data, tmp_path):
    named = {"task": f"hf-text:{folder}", "data_dir": str(data)}
    sizes = {"clients": 3, "rounds": 2, "lora_rank": 2, "sequence_length": 8}
    more = {"fraction": 1.0, "checkpoint_every": 1, "output": str(tmp_path / "out")}
    run = simulate("fedsa-lora", "inline", **named, **sizes, **more)
    assert run.rows[-1]["rejected"] == 0
    predictor = load_run(tmp_path / "out" / "fedsa-lora", "bob", **named)
    assert predictor("the film is good").classes[0] in predictor.classes
    # The transformer could not be described in the file.
    path = tmp_path / "model.safetensors"
    assert refusals.code_of(predictor.export, path) == "export"


def test_the_task_of_the_guide_trains_with_its_adapters(folder, tmp_path, monkeypatch):
    guide = (Path(__file__).parents[3] / "docs" / "transformers.md").read_text()
    _, _, code = guide.partition("```python\n")
    code = code.partition("```")[0].replace("models/minilm", str(folder))
    (tmp_path / "guide_reviews.py").write_text(code.replace("r=4", "r=2"))
    monkeypatch.syspath_prepend(str(tmp_path))
    more = {"clients": 2, "rounds": 2, "fraction": 1.0, "output": str(tmp_path / "o")}
    run = simulate("fedsa-lora", "inline", task="guide_reviews:task", **more)
    # 3 layers with query and value; matrices A have shape (2, 8) and 4-byte entries.
    sent = run.rows[-1]["bytes-up"] / 2
    assert 6 * 2 * 8 * 4 < sent < 6 * (2 * 8 * 4 + 250)
