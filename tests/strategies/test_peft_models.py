"""Models that already have ``peft`` adapters, and ``transformers`` models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_runs import rows_of, settings_of
from peft_tasks import N, bert_model, examples, words_model
from safetensors.torch import load_file

from flwr_frl.common.checkpoint import FILE
from flwr_frl.common.settings import resolve
from flwr_frl.predict import load_run
from flwr_frl.task.devices import seeded
from flwr_frl.task.models.frozen import frozen_tensors
from flwr_frl.task.tasks import build_task

PREFIX = "representation.base_model.model."


def run_in(
    folder: Path, algorithm: str, task: str, **more: Any
) -> list[dict[str, Any]]:
    usual = {"algorithm": algorithm, "task": f"peft_tasks:{task}", "num-clients": N}
    usual |= {"num-server-rounds": 2, "fraction-train": 1.0, "checkpoint-every": 1}
    usual |= {"cohort": "off", "output": str(folder)}
    return rows_of(settings_of(usual, **more))


def test_adapters_have_the_names_of_peft_and_the_saved_module_is_the_head():
    task = build_task(resolve({"task": "peft_tasks:words"}), N)
    assert sorted(task.initial_state) == [
        "head.bias",
        "head.weight",
        f"{PREFIX}first.lora_A.default.weight",
        f"{PREFIX}first.lora_B.default.weight",
    ]
    assert f"{PREFIX}first.base_layer.weight" in frozen_tensors(task.scratch_model)


@pytest.mark.parametrize(
    ("task", "model"), [("words", words_model), ("sequence", bert_model)]
)
def test_split_model_computes_the_same_as_the_user_s_model(task, model):
    tokens = examples(0, True).inputs
    built = build_task(resolve({"task": f"peft_tasks:{task}"}), N).initial_model()
    with torch.no_grad(), seeded(0):
        expected = model().eval()(tokens)
    expected = getattr(expected, "logits", expected)
    torch.testing.assert_close(built.eval()(tokens), expected)


@pytest.mark.parametrize("task", ["words", "sequence", "plain"])
@pytest.mark.parametrize("algorithm", ["fedsa-lora", "ffa-lora", "feddpa", "flute"])
def test_run_trains_and_sends_only_adapters_and_heads(task, algorithm, tmp_path):
    more = {"adapters": "lora", "lora-rank": 2} if task == "plain" else {}
    rows = run_in(tmp_path, algorithm, task, learning_rate=0.1, **more)
    assert [row["rejected"] for row in rows] == [0, 0]
    sent = {
        n.partition("/")[2]: v
        for n, v in load_file(tmp_path / algorithm / FILE).items()
    }
    names = [n for n in sent if n.startswith(("representation.", "head."))]
    assert names
    assert all("lora_" in n or n.startswith("head.") for n in names)
    initial = build_task(resolve({**more, "task": f"peft_tasks:{task}"}), N)
    for name in names:
        assert not torch.equal(sent[name], initial.initial_state[name])


def test_existing_adapters_are_kept():
    options = {"task": "peft_tasks:words", "adapters": "lora", "lora-rank": 4}
    state = build_task(resolve(options), N).initial_state
    assert state[f"{PREFIX}first.lora_A.default.weight"].shape == (2, 8)


@pytest.mark.parametrize("algorithm", ["fedsa-lora", "feddpa"])
def test_a_client_s_model_is_loaded(algorithm, tmp_path):
    task = "peft_tasks:words"
    run_in(tmp_path, algorithm, "words", learning_rate=0.5)
    predictor = load_run(tmp_path / algorithm, "000001", task=task)
    tests = build_task({"task": task}, N).test_examples(1)
    metrics = json.loads((tmp_path / algorithm / "clients.json").read_text())["000001"]
    with torch.no_grad():
        outputs = predictor.model(tests.inputs)
    accuracy = (outputs.argmax(1) == tests.targets).double().mean().item()
    assert accuracy == pytest.approx(metrics["accuracy"])
