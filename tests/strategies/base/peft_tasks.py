"""Tasks with models of ``peft`` and ``transformers``, as users write them."""

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from flwr_frl.task import ExampleSet, ExampleTask

N, TOKENS, CLASSES = 4, 20, 3


def examples(i: int, test: bool) -> ExampleSet:
    rng = np.random.default_rng([i, test])
    tokens = torch.from_numpy(rng.integers(1, TOKENS, (12, 6)))
    return ExampleSet(tokens, tokens[:, 0] % CLASSES)


def task_of(model, **more) -> ExampleTask:
    train, test = ([examples(i, t) for i in range(N)] for t in (False, True))
    return ExampleTask(model, train, test, classes=("a", "b", "c"), **more)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 8)
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, tokens):
        return self.last(self.norm(self.first(self.words(tokens)).mean(1)))


def words_model() -> nn.Module:
    config = LoraConfig(r=2, target_modules=["first"], modules_to_save=["last"])
    return get_peft_model(Words(), config)


def bert() -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=TOKENS, intermediate_size=16, num_labels=CLASSES, **sizes
    )
    return BertForSequenceClassification(config)


def bert_model() -> nn.Module:
    return get_peft_model(bert(), LoraConfig(task_type="SEQ_CLS", r=2))


def words(num_clients: int) -> ExampleTask:
    """A custom model in which ``peft`` trains an adapter and the last layer."""
    return task_of(words_model)


def sequence(num_clients: int) -> ExampleTask:
    """A classifier of ``transformers`` with adapters for sequence classification."""
    return task_of(bert_model)


def plain(num_clients: int) -> ExampleTask:
    """A classifier of ``transformers`` without adapters."""
    return task_of(bert, head="classifier")
