"""Settings and tasks that are rejected before a run begins."""

import math

import pytest
import torch
from torch import nn

from flwr_frl import running
from flwr_frl.common.settings import SettingsError, resolve
from flwr_frl.strategies.algorithms import settings_owners
from flwr_frl.strategies.srpfl import SRPFL
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel


def unbiased(num_clients):
    """A linear head without a bias."""

    def model():
        return SplitModel(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))

    sets = [ExampleSet(torch.ones(2, 2), torch.tensor([0, 1]))] * num_clients
    return ExampleTask(model, sets, sets, classes=("a", "b"))


# Values out of range, by algorithm and setting.
OUT_OF_RANGE: dict[str, dict[str, tuple]] = {
    # Settings of every algorithm
    "fedavg": {
        "num-server-rounds": (0,),
        "evaluate-every": (-1,),
        "evaluate-last": (-1,),
        "checkpoint-every": (-1,),
        "max-empty-rounds": (-1,),
        "torch-threads": (0,),
        "round-timeout": (0.0, math.nan),
    },
    "fedprox": {"proximal-mu": (-1.0, math.inf)},
    "scaffold": {"global-learning-rate": (0.0, -0.5)},
    "ditto": {"ditto-lambda": (-1.0,), "personal-epochs": (-1,)},
    "apfl": {"apfl-alpha": (1.5, -0.1, math.nan), "apfl-adaptive": (1,)},
    "pfedme": {
        "pfedme-lambda": (0.0, -1.0),
        "pfedme-eta": (0.0,),
        "pfedme-beta": (-1.0, math.nan),
        "pfedme-steps": (0,),
    },
    "fedbabu": {"finetune-part": ("body",), "finetune-epochs": (-1,)},
    "fedproto": {"fedproto-lambda": (-1.0,)},
    "fedala": {
        "ala-learning-rate": (-1.0,),
        "ala-share": (0.0, 1.5),
        "ala-start-epochs": (0,),
    },
    "feddbe": {"dbe-kappa": (-1.0,), "dbe-momentum": (0.0, 1.5), "dbe-memory": (1,)},
    "fedcp": {"fedcp-lambda": (-1.0,)},
    "fed-mtl": {"mtl-lambda": (-1.0,), "weighting": ("examples",)},
    "l2gd": {
        "l2gd-probability": (0.0, 1.0),
        "l2gd-lambda": (-0.1,),
        "weighting": ("examples",),
    },
    "representation-transfer": {
        "num-sources": (0, 20),
        "rank-tolerance": (0.0, 1.5),
        "phase-two-epochs": (-1,),
        "transport": ("float16",),
    },
    "multi-task": {
        "constrained-part": ("tail",),
        "constraint-bound": (-1.0,),
        "primal-steps": (0,),
        "radius": ("wide", "0"),
        # Above 1 / saddle-step squared.
        "dual-regularizer": (1e7,),
    },
    "fedrep": {"new-clients": (-1,)},
    # Settings of third-party algorithms are checked, too.
    "outsiders:Hooked": {"fewest": (100, 2.5)},
}
CASES = [
    (algorithm, {name: value}, name)
    for algorithm, settings in OUT_OF_RANGE.items()
    for name, values in settings.items()
    for value in values
] + [
    ("fedavg", {"optimizer": "adamm"}, "optimizer"),
    ("fedavg", {"learning-rate-schedule": "cosin"}, "learning-rate-schedule"),
    ("fedavg", {"num-server-rounds": 4, "warmup-rounds": 4}, "warmup-rounds"),
    ("fedavg", {"class-weights": "balance"}, "class-weights"),
    ("fedavg", {"class-weights": "1,2"}, "class-weights"),
    ("fedavg", {"patience": 3}, "patience"),
    ("fedavg", {"keep-best": True}, "keep-best"),
    ("scaffold", {"optimizer": "adamw"}, "optimizer"),
    ("hf-maml", {"optimizer": "adam"}, "optimizer"),
    ("feddyn", {"max-gradient-norm": 1.0}, "max-gradient-norm"),
    ("fedproto", {"client-models": "mlp mlp-2"}, "client-models"),
    (
        "fedproto",
        {"server-dp-noise": 1.0, "server-dp-clip": 1.0, "server-dp-delta": 1e-5},
        "server-dp-noise",
    ),
    ("fedrep", {"task": "linear", "initialization": "moment"}, "initialization"),
    ("scaffold", {"weighting": "examples", "largest-share": 0.5}, "largest-share"),
    ("multi-task", {"radius": "1", "bandit-radius": 2.0}, "bandit-radius"),
    ("multi-task", {"task": "qcqp", "bandit-radius": 20.0}, "bandit-radius"),
    (
        "representation-transfer",
        {"task": "transfer", "target-samples": 1},
        "target-samples",
    ),
    (
        "representation-transfer",
        {"task": "transfer", "noise-variance": 0.0},
        "noise-variance",
    ),
    (
        "representation-transfer",
        {"task": "transfer", "source-outputs": 0},
        "source-outputs",
    ),
]


@pytest.mark.parametrize(
    ("algorithm", "given", "code"),
    CASES,
    ids=[f"{a}-{'-'.join(map(str, g.values()))}" for a, g, _ in CASES],
)
def test_invalid_value_is_rejected_with_its_code(algorithm, given, code):
    named = resolve({"algorithm": algorithm})
    tried = [(algorithm, given)]
    if not SRPFL.allowed_base(settings_owners(named)[0]):
        tried.append(("srpfl", {"srpfl-base": algorithm, **given}))
    for name, settings in tried:
        with pytest.raises(SettingsError) as caught:
            running.check([name], settings, "inline")
        assert caught.value.code == code
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stages", ["auto", "theory", "theory-exact"])
@pytest.mark.parametrize("contraction", [0.0, 1.0, 1.5])
def test_contraction_out_of_range_is_rejected(contraction, stages):
    settings = {"contraction": contraction, "rounds-per-stage": stages}
    with pytest.raises(SettingsError) as caught:
        running.check(["srpfl"], settings, "inline")
    assert caught.value.code == "contraction"


@pytest.mark.parametrize(
    ("algorithm", "given", "words"),
    [
        ("fedrep", {"task": "qcqp"}, "there is nothing to train on; the algorithm for"),
        ("dpsgd", {"task": "multi-task-logistic"}, "there is nothing to train on; "),
        ("representation-transfer", {"task": "qcqp"}, "there is nothing to train on; "),
        ("flute", {"task": "transfer"}, "it needs classes, to which its heads belong"),
        ("flute-star", {"task": "linear"}, "it needs classes, to which its heads"),
        ("fedproto", {"task": "linear"}, "it needs classes, to which its heads"),
        ("fedproto", {"head-layers": 2}, "FedProto needs a head that is one linear"),
        ("fedbn", {}, "it needs a model with batch norms"),
        ("srpfl", {"srpfl-base": "fedbn"}, "it needs a model with batch norms"),
        ("feddbe", {"task": "linear"}, "it needs a head that begins with a linear lay"),
    ],
)
def test_unsuitable_task_is_rejected(algorithm, given, words):
    with pytest.raises(SettingsError) as caught:
        running.check([algorithm], given, "inline")
    line = str(caught.value)
    assert line.startswith(f"algorithm {algorithm!r} and task ")
    assert words in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("algorithm", "given", "code"),
    [
        ("ifca", {"num-clusters": 21}, "num-clusters"),
        ("pfedhn", {"model": "resnet18"}, "model"),
        ("fedpac", {"head-layers": 2}, "head-not-linear"),
        ("fedas", {"head-layers": 2}, "head-not-linear"),
        ("gpfl", {"head-layers": 2}, "head-not-linear"),
        ("pfedfda", {"head-layers": 2}, "head-not-linear"),
        ("knn-per", {"task": "linear"}, "no-classes"),
        ("fedbn", {}, "no-batch-norms"),
        ("fedproto", {"task": f"{__name__}:unbiased"}, "no-bias"),
        ("pfedfda", {"task": f"{__name__}:unbiased"}, "no-bias"),
        ("feddbe", {"task": f"{__name__}:unbiased"}, "no-bias"),
        ("moon", {"model": "logistic"}, "no-features"),
        ("feddyn", {"model": "resnet18"}, "has-buffers"),
    ],
)
def test_unsuitable_model_or_task_is_rejected_with_a_code(algorithm, given, code):
    with pytest.raises(SettingsError) as caught:
        running.check([algorithm], given, "inline")
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


THEORY = {"speed-model": "dynamic", "rounds-per-stage": "theory"}


@pytest.mark.parametrize(
    ("algorithm", "given", "line"),
    [
        ("fedrep", {"new-clients": 20}, "new-clients is 20; expected at most 19"),
        *(
            ("srpfl", {"new-clients": n, **THEORY}, f"new-clients is {n}; expected at")
            for n in (20, 21)
        ),
        ("dpsgd", {"new-clients": 1}, "new-clients is 1; expected 0 with dpsgd"),
        (
            "l2gd",
            {"l2gd-lambda": 12.0, "l2gd-probability": 0.1, "learning-rate": 0.01},
            "l2gd-lambda is 12.0; expected at most 11.1111 with l2gd-probability 0.1",
        ),
        (
            "fedavg",
            {"new-clients": 19, "fraction-train": 0.5},
            "fraction-train is 0.5: of 1 clients it samples nobody",
        ),
        ("fedavg", {"output": ""}, "output is ''; expected a directory"),
        ("fedavg", {"fewest": 3}, "unknown setting 'fewest'"),
        ("outsiders:Hooked", {"fewer": 3}, "unknown setting 'fewer'; did you mean"),
        ("outsiders:Hooked", {"fewest": 21}, "fewest is 21; 20 are too few"),
    ],
)
def test_inconsistent_values_are_rejected(algorithm, given, line):
    with pytest.raises(SettingsError) as caught:
        running.check([algorithm], given, "inline")
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
