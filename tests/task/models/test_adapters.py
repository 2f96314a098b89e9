"""LoRA adapters for the models of tasks, and settings that do not fit a model."""

import copy
from functools import partial

import pytest
import torch
from named_tasks import task_of as built
from refusals import code_of, refusal, uninstall
from torch import nn

from flwr_frl.task import ExampleSet, ExampleTask, SplitModel
from flwr_frl.task.models import build_model
from flwr_frl.task.models.adapters import AdapterSettings, with_adapters
from flwr_frl.task.models.frozen import frozen_tensors

WIDTH, RANK, SHARE = 6, "lora-rank", "lora-share"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, 4)
        self.mix = nn.Conv1d(4, 5, 1)

    def forward(self, x):
        return self.mix(self.value(torch.relu(self.query(x))).unsqueeze(-1)).squeeze(-1)


def task_of(layers, head_inputs: int, shape=(WIDTH,)) -> ExampleTask:
    sets = [ExampleSet(torch.ones(4, *shape), torch.arange(4) % 2)]
    return ExampleTask(
        lambda: SplitModel(layers(), nn.Linear(head_inputs, 2)), sets, sets, seed=3
    )


def blocks() -> ExampleTask:
    return task_of(lambda: nn.Sequential(Block(), nn.BatchNorm1d(5)), 5)


def grouped() -> nn.Module:
    convolution = nn.Conv1d(WIDTH, 4, 1, groups=2)
    return nn.Sequential(nn.Unflatten(1, (WIDTH, 1)), convolution, nn.Flatten())


def adapted(task: ExampleTask, adapters: str = "lora", **settings):
    return with_adapters(task, AdapterSettings(adapters, **settings))


def names_of(task) -> set[str]:
    """Return the names of layers with adapters."""
    names = (n for n in task.initial_state if ".lora_A." in n)
    return {n.partition(".lora_A.")[0].removeprefix("representation.") for n in names}


def test_all_linear_layers_of_the_representation_are_adapted_by_default():
    task = adapted(blocks(), lora_rank=2)
    assert names_of(task) == {"0.query", "0.value"}
    frozen = frozen_tensors(task.scratch_model)
    assert {"representation.0.query.base_layer.weight", "representation.1.weight"} <= {
        *frozen
    }
    assert {"head.weight", "head.bias"} <= {*task.initial_state}
    # Statistics of batch norms are shared as without adapters.
    assert "representation.1.running_mean" in task.initial_state
    with_b = adapted(blocks(), lora_rank=2, lora_share="b")
    assert not [n for n in with_b.initial_state if "lora_A" in n]
    assert [n for n in frozen_tensors(with_b.scratch_model) if "lora_A" in n]
    task = blocks()
    assert adapted(task, "none") is task


RESNET = partial(build_model, "resnet20", (3, 32, 32), 2)


@pytest.mark.parametrize(
    ("task", "targets", "names"),
    [
        (blocks(), "query", {"0.query"}),
        (blocks(), "representation.0.value", {"0.value"}),
        (blocks(), "query mix", {"0.query", "0.mix"}),
        # A representation that is one layer
        (task_of(lambda: nn.Linear(WIDTH, 5), 5), "", {"representation"}),
        (task_of(grouped, 4), "1", {"1"}),
        (task_of(lambda: RESNET().representation, 64, (3, 32, 32)), "conv2", 9),
    ],
)
def test_targets_are_full_names_or_suffixes(task, targets, names):
    task = adapted(task, lora_rank=2, lora_targets=targets)
    found = names_of(task)
    assert found == names or len(found) == names
    task.check(0)


def test_adapter_starts_without_effect_and_adds_a_product():
    task, x = blocks(), torch.randn(3, WIDTH)
    plain = task.initial_model().eval()
    rank = {"lora_rank": 2, "lora_alpha": 3.0, "lora_targets": "query"}
    model = adapted(task, **rank).initial_model()
    torch.testing.assert_close(model.eval()(x), plain(x))
    query = model.representation[0].query
    nn.init.ones_(query.lora_B.default.weight)
    product = query.lora_B.default.weight @ query.lora_A.default.weight
    expected = copy.deepcopy(plain)
    expected.representation[0].query.weight.data += 3.0 / 2 * product
    torch.testing.assert_close(model(x), expected(x))


def test_evaluation_of_a_torch_encoder_includes_its_adapters():
    layer = lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)  # noqa: E731
    model = adapted(task_of(layer, WIDTH), lora_rank=2).initial_model()
    # The attention reads the weight of this layer without calling the layer.
    assert not hasattr(model.representation.self_attn.out_proj, "base_layer")
    x = torch.randn(2, 3, WIDTH)
    with torch.no_grad():
        before = model.eval()(x)
        nn.init.ones_(model.representation.linear1.lora_B.default.weight)
        assert not torch.allclose(model(x), before)


@pytest.mark.parametrize(
    ("task", "settings", "code"),
    [
        (blocks, {"lora_targets": "qeury"}, "lora-targets"),
        (blocks, {"lora_targets": "head"}, "lora-targets"),
        (blocks, {"lora_rank": 0}, "lora-rank"),
        (blocks, {"lora_alpha": 0.0}, "lora-alpha"),
        (blocks, {"lora_share": "a"}, "lora-share"),
        (blocks, {"adapters": "none", "lora_share": "b"}, "lora-share"),
        # The rank of a grouped convolution is a multiple of its groups.
        (partial(task_of, grouped, 4), {"lora_targets": "1", "lora_rank": 3}, RANK),
        # Models without linear layers, and without layers
        (partial(task_of, nn.Identity, WIDTH), {}, "adapters"),
        (partial(built, "linear", 5), {}, "adapters"),
        (partial(built, "linear", 5), {"adapters": "none", "lora_share": "b"}, SHARE),
    ],
)
def test_setting_that_does_not_fit_the_model_is_an_error(task, settings, code):
    assert code_of(lambda: adapted(task(), **settings).scratch_model) == code


def test_the_nearest_name_and_the_missing_extra_are_suggested(monkeypatch):
    error = refusal(lambda: adapted(blocks(), lora_targets="qeury").scratch_model)
    assert "did you mean 'query'" in str(error)
    uninstall(monkeypatch, "peft")
    error = refusal(adapted, blocks())
    assert error.code == "missing-package"
    assert "flwr-frl[transformers]" in str(error)
