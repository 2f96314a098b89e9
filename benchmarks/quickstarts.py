"""Flower's quickstarts with one of our strategies, which two statements of theirs name.

``python -m benchmarks.quickstarts EXAMPLES`` runs the apps of a checkout of Flower's
``examples`` with Flower's strategy, then with ours, in one process. Their sources are
unchanged, except for the import and the constructor of the strategy. The data sets that
they download are replaced by digits, iris flowers and sentences of two words.
"""

import logging
import os
import re
import sys
import tempfile
import tomllib
from collections import Counter
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy
from PIL import Image
from sklearn.datasets import load_digits, load_iris

from flwr_frl.strategies.grids.simulation import InlineGrid

CLIENTS = 6
# Of each app: its package, its personal layer, and other values of its run config
APPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "quickstart-pytorch": (
        "pytorchexample",
        "fc3.",
        {"num-server-rounds": 6, "learning-rate": 0.1, "batch-size": 8},
    ),
    "quickstart-huggingface": (
        "huggingface_example",
        "classifier.",
        {"fraction-train": 1.0, "model-name": "bert"},
    ),
    "quickstart-numpy": ("quickstart_numpy", "0", {}),
    "quickstart-sklearn": ("sklearnexample", "1", {"num-server-rounds": 6}),
}
OURS = {
    "FedAvg": 'FedAvg(fraction_train=1.0, weighting="examples")',
    "FedRep": "FedRep(fraction_train=1.0)",
    "FedPer": "FedPer(fraction_train=1.0, personal=({!r},))",
}
IMPORT = "from flwr.serverapp.strategy import FedAvg"
CONSTRUCTOR = re.compile(r"(?<=strategy = )FedAvg\((?:[^()]|\([^()]*\))*\)")
PICTURES = [
    Image.fromarray(np.uint8(np.kron(digit, np.ones((4, 4))) * 15)).convert("RGB")
    for digit in load_digits().images
]


def pictures(rows: Any) -> Dataset:
    """Return digits as pictures of 32 x 32 pixels."""
    labels = load_digits().target[rows].tolist()
    return Dataset.from_dict({"img": [PICTURES[i] for i in rows], "label": labels})


class FederatedDataset:
    """Stands in for that of Flower Datasets."""

    def __init__(self, dataset: str, partitioners: object) -> None:
        self.dataset = dataset

    def load_partition(self, client: int, split: str = "train") -> Dataset:
        """Return a client's data."""
        if "cifar" in self.dataset:
            # Two digits each
            digits = (client % 10, (client + 1) % 10)
            return pictures(np.flatnonzero(np.isin(load_digits().target, digits))[:60])
        if "iris" in self.dataset:
            frame = load_iris(as_frame=True).frame.sample(frac=1, random_state=0)
            names = {n: n[:-5].replace(" ", "_") for n in frame if "(cm)" in n}
            frame = frame.rename(columns={**names, "target": "species"})
            return Dataset.from_pandas(frame[client::CLIENTS], preserve_index=False)
        # The words mean the opposite to every second client.
        labels = np.random.default_rng(client).integers(0, 2, 40)
        words = ["bad bad dull", "good fine good"]
        texts = [words[label ^ client % 2] for label in labels]
        return Dataset.from_dict({"text": texts, "label": labels.tolist()})


class Accuracy:
    """Stands in for the metric of Hugging Face."""

    def __init__(self, name: str) -> None:
        self.right: list[bool] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        """Count."""
        self.right += (predictions == references).tolist()

    def compute(self) -> dict[str, float]:
        """Return the share."""
        return {"accuracy": float(np.mean(self.right))}


def stand_in() -> None:
    """Replace what the apps import for their data."""
    modules: dict[str, dict[str, object]] = {
        "flwr_datasets": {"FederatedDataset": FederatedDataset},
        "flwr_datasets.partitioner": {"IidPartitioner": lambda num_partitions: None},
        "evaluate": {"load": Accuracy},
    }
    for name, content in modules.items():
        sys.modules[name] = module = ModuleType(name)
        vars(module).update(content)
    vars(import_module("datasets"))["load_dataset"] = lambda *_, **__: pictures(
        np.arange(0, 1797, 6)
    )


def small_bert(folder: str) -> None:
    """Write a model and a tokenizer for words of the sentences."""
    hugging: Any = import_module("transformers")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "dull",
        "bad",
        "fine",
        "good",
    ]
    Path("vocab.txt").write_text("\n".join(words))
    hugging.BertTokenizerFast("vocab.txt").save_pretrained(folder)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    config = hugging.BertConfig(**sizes)
    hugging.BertForSequenceClassification(config).save_pretrained(folder)


class Network(InlineGrid):
    """Clients in this process, treated as those of another machine."""

    in_process = False


def seeded(app: ClientApp) -> ClientApp:
    """Return an app whose random numbers depend on the client and its messages only."""
    calls = Counter[tuple[int, str]]()

    def call(message: Message, context: Context) -> Message:
        calls[key := (context.node_id, message.metadata.message_type)] += 1
        torch.manual_seed(seed := 1000 * context.node_id + calls[key])
        np.random.seed(seed)
        return app(message, context)

    return cast(ClientApp, call)


def run(
    app: Path, package: str, changes: dict[str, Any], strategy: str
) -> tuple[str, list[str]]:
    """Run an app; return its last accuracy and its warnings."""
    torch.manual_seed(0)
    np.random.seed(0)
    project = tomllib.loads((app / "pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"] | changes
    source = (app / package / "server_app.py").read_text()
    if strategy:
        name = strategy.partition("(")[0]
        source = source.replace(IMPORT, f"from flwr_frl.strategies import {name}")
        source = CONSTRUCTOR.sub(strategy, source)
    server, results, lines = ModuleType("server"), [], list[str]()
    start = Strategy.start

    def recorded(*arguments: Any, **named: Any) -> Any:
        results.append(start(*arguments, **named))
        return results[-1]

    handler = logging.Handler(logging.WARNING)
    vars(handler)["emit"] = lambda record: lines.append(record.getMessage())
    logging.getLogger("flwr").addHandler(handler)
    Strategy.start = recorded  # type: ignore[method-assign]
    try:
        exec(source, vars(server))
        client = import_module(f"{package}.client_app").app
        context = Context(1, 0, {}, RecordDict(), config)
        with redirect_stdout(sys.stderr):
            server.main(Network(seeded(client), CLIENTS, config), context)
    finally:
        Strategy.start = start  # type: ignore[method-assign]
        logging.getLogger("flwr").removeHandler(handler)
    (result,) = results
    metrics = [*result.evaluate_metrics_clientapp.values()][-1]
    accuracy: Any = metrics.get("eval_acc", metrics.get("accuracy"))
    return "" if accuracy is None else f"{accuracy:.2f}", lines


def main() -> None:
    """Run all apps and print the rows of a table."""
    examples = Path(sys.argv[1]).resolve()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    os.chdir(tempfile.mkdtemp())
    stand_in()
    small_bert("bert")
    print("| app | strategy | accuracy | warnings |\n| --- | --- | --: | --- |")
    texts = list[str]()
    for name, (package, layer, changes) in APPS.items():
        sys.path.insert(0, str(examples / name))
        changes = {**changes, "fraction-evaluate": 1.0}
        for strategy in ["", *(text.format(layer) for text in OURS.values())]:
            accuracy, lines = run(examples / name, package, changes, strategy)
            texts += [line for line in lines if line not in texts]
            title = f"`{strategy}`" if strategy else "unchanged"
            numbers = ", ".join(str(texts.index(line) + 1) for line in lines)
            print(f"| {name} | {title} | {accuracy} | {numbers} |", flush=True)
    print("", *(f"{i}. {text}" for i, text in enumerate(texts, 1)), sep="\n")


if __name__ == "__main__":
    main()
