"""LoRA adapters for the models of tasks, and settings that do not fit a model."""

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from flwr_frl.common.settings import SettingsError, resolve
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel
from flwr_frl.task.models import build_model
from flwr_frl.task.models.adapters import AdapterSettings, with_adapters
from flwr_frl.task.models.frozen import frozen_tensors
from flwr_frl.task.tasks import build_task

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, 4)
        self.mix = nn.Conv1d(4, 5, 1)

    def forward(self, x):
        return self.mix(self.value(torch.relu(self.query(x))).unsqueeze(-1)).squeeze(-1)


def task_of(layers, head_inputs: int) -> ExampleTask:
    sets = [ExampleSet(torch.ones(4, WIDTH), torch.arange(4) % 2)]
    return ExampleTask(
        lambda: SplitModel(layers(), nn.Linear(head_inputs, 2)), sets, sets, seed=3
    )


def blocks() -> ExampleTask:
    return task_of(lambda: nn.Sequential(Block(), nn.BatchNorm1d(5)), 5)


def adapted(task: ExampleTask, **settings):
    return with_adapters(task, AdapterSettings("lora", **settings))


def names_of(task) -> set[str]:
    """Return the names of layers with adapters."""
    names = (n for n in task.initial_state if ".lora_A." in n)
    return {n.partition(".lora_A.")[0].removeprefix("representation.") for n in names}


def code_of(task, **settings) -> str:
    with pytest.raises(SettingsError) as caught:
        _ = adapted(task, **settings).scratch_model
    assert "\n" not in str(caught.value)
    return caught.value.code


def test_all_linear_layers_of_the_representation_are_adapted_by_default():
    task = adapted(blocks(), lora_rank=2)
    assert names_of(task) == {"0.query", "0.value"}
    frozen = frozen_tensors(task.scratch_model)
    assert "representation.0.query.base_layer.weight" in frozen
    assert "representation.1.weight" in frozen
    assert {"head.weight", "head.bias"} <= {*task.initial_state}
    # Statistics of batch norms are shared as without adapters.
    assert "representation.1.running_mean" in task.initial_state


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("query", {"0.query"}),
        ("0.value", {"0.value"}),
        ("representation.0.value", {"0.value"}),
        ("query mix", {"0.query", "0.mix"}),
    ],
)
def test_targets_are_full_names_or_suffixes(targets, names):
    assert names_of(adapted(blocks(), lora_rank=2, lora_targets=targets)) == names


def test_a_representation_that_is_one_layer_is_adapted():
    task = adapted(task_of(lambda: nn.Linear(WIDTH, 5), 5), lora_rank=2)
    assert "representation.lora_A.default.weight" in task.initial_state


def test_adapter_starts_without_effect_and_adds_a_product():
    task, x = blocks(), torch.randn(3, WIDTH)
    plain = task.initial_model().eval()
    model = adapted(
        task, lora_rank=2, lora_alpha=3.0, lora_targets="query"
    ).initial_model()
    torch.testing.assert_close(model.eval()(x), plain(x))
    query = model.representation[0].query
    nn.init.ones_(query.lora_B.default.weight)
    product = query.lora_B.default.weight @ query.lora_A.default.weight
    expected = copy.deepcopy(plain)
    expected.representation[0].query.weight.data += 3.0 / 2 * product
    torch.testing.assert_close(model(x), expected(x))


def test_the_seed_determines_the_adapters():
    states = [adapted(blocks(), lora_rank=2, seed=s).initial_state for s in (0, 0, 1)]
    name = "representation.0.query.lora_A.default.weight"
    assert torch.equal(states[0][name], states[1][name])
    assert not torch.equal(states[0][name], states[2][name])


def test_with_share_b_the_matrices_a_are_frozen():
    task = adapted(blocks(), lora_rank=2, lora_share="b")
    assert not [n for n in task.initial_state if "lora_A" in n]
    assert [n for n in frozen_tensors(task.scratch_model) if "lora_A" in n]


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


def test_without_adapters_the_task_is_unchanged():
    task = blocks()
    assert with_adapters(task, AdapterSettings()) is task


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"lora_targets": "qeury"}, "lora-targets"),
        ({"lora_targets": "head"}, "lora-targets"),
        ({"lora_rank": 5}, "lora-rank"),
        ({"lora_rank": 0}, "lora-rank"),
        ({"lora_alpha": 0.0}, "lora-alpha"),
        ({"lora_share": "a"}, "lora-share"),
    ],
)
def test_setting_that_does_not_fit_the_model_is_an_error(settings, code):
    with pytest.raises(SettingsError) as caught:
        _ = adapted(blocks(), **settings).scratch_model
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_the_rank_of_a_grouped_convolution_is_a_multiple_of_its_groups():
    def layers() -> nn.Module:
        convolution = nn.Conv1d(WIDTH, 4, 1, groups=2)
        return nn.Sequential(nn.Unflatten(1, (WIDTH, 1)), convolution, nn.Flatten())

    task = task_of(layers, 4)
    model = adapted(task, lora_targets="1", lora_rank=4).scratch_model
    assert model(torch.ones(2, WIDTH)).shape == (2, 2)
    assert code_of(task, lora_targets="1", lora_rank=3) == "lora-rank"


def test_the_nearest_name_of_a_layer_is_suggested():
    with pytest.raises(SettingsError, match="did you mean 'query'"):
        _ = adapted(blocks(), lora_targets="qeury").scratch_model


def test_model_without_linear_layers_is_rejected():
    assert code_of(task_of(nn.Identity, WIDTH)) == "adapters"


def test_task_whose_model_has_no_layers_is_rejected():
    with pytest.raises(SettingsError) as caught:
        build_task(resolve({"task": "linear", "adapters": "lora"}), 5)
    assert caught.value.code == "adapters"


def test_share_b_needs_adapters():
    task = with_adapters(blocks(), AdapterSettings("none", lora_share="b"))
    with pytest.raises(SettingsError) as caught:
        _ = task.scratch_model
    assert caught.value.code == "lora-share"


def test_missing_peft_is_named_with_its_extra(monkeypatch):
    lacking = lambda name: None if name == "peft" else find_spec(name)  # noqa: E731
    monkeypatch.setattr("flwr_frl.common.settings.find_spec", lacking)
    with pytest.raises(SettingsError, match=r"flwr-frl\[transformers\]") as caught:
        adapted(blocks())
    assert caught.value.code == "missing-package"


def test_convolutions_of_resnet20_are_adapted():
    sets = [ExampleSet(torch.rand(4, 3, 32, 32), torch.arange(4) % 2)]
    plain = ExampleTask(lambda: build_model("resnet20", (3, 32, 32), 2), sets, sets)
    task = adapted(plain, lora_targets="conv2", lora_rank=2)
    task.check(0)
    assert len(names_of(task)) == 9


def test_share_b_of_a_task_without_layers_is_named():
    task = build_task(resolve({"task": "linear"}), 2)
    with pytest.raises(SettingsError) as caught:
        with_adapters(task, AdapterSettings(lora_share="b"))
    assert caught.value.code == "lora-share"
