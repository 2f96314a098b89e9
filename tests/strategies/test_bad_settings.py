"""Settings and tasks that are rejected before a run begins, by algorithm."""

import math

import pytest
import torch
from refusals import refusal
from torch import nn

from flwr_frl import running
from flwr_frl.common.settings import resolve
from flwr_frl.strategies.algorithms import settings_owners
from flwr_frl.strategies.srpfl import SRPFL
from flwr_frl.task import ExampleSet, ExampleTask, SplitModel


def unbiased(num_clients):
    """A linear head without a bias."""

    def model():
        return SplitModel(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))

    sets = [ExampleSet(torch.ones(2, 2), torch.tensor([0, 1]))] * num_clients
    return ExampleTask(model, sets, sets, classes=("a", "b"))


# Algorithms that SRPFL cannot wrap
BASES = ("fedbuff", "srpfl", "dpsgd", "representation-transfer")
BASES += ("flwr_frl.strategies.srpfl:LGSRPFL",)
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
        "cohort": ("0", "-1", "many", "1.5"),
        "upload-compressor": ("gzip",),
        "server-optimizer": ("lamb",),
        "server-optimizer-rate": (-1.0,),
        "server-optimizer-beta1": (1.0,),
        "server-optimizer-tau": (0.0,),
        "optimizer": ("adamm",),
        "learning-rate-schedule": ("cosin",),
        "output": ("",),
        "fraction-train": (0.0, 1.01, math.nan, "all"),
        "min-train-nodes": (0,),
        "min-available-nodes": (0,),
        "seed": (-1, "one"),
        "weighting": ("even",),
        "aggregation": ("krum",),
        "byzantine-fraction": (0.5,),
        "clip-norm": (-1.0,),
    },
    "fedprox": {"proximal-mu": (-1.0, math.inf)},
    "scaffold": {"global-learning-rate": (0.0, -0.5), "optimizer": ("adamw",)},
    "hf-maml": {"optimizer": ("adam",)},
    "ditto": {"ditto-lambda": (-1.0,), "personal-epochs": (-1,)},
    "apfl": {"apfl-alpha": (1.5, -0.1, math.nan), "apfl-adaptive": (1,)},
    "pfedme": {
        "pfedme-lambda": (0.0, -1.0),
        "pfedme-eta": (0.0,),
        "pfedme-beta": (-1.0, math.nan),
        "pfedme-steps": (0,),
    },
    "fedbabu": {"finetune-part": ("body",), "finetune-epochs": (-1,)},
    "fedproto": {"fedproto-lambda": (-1.0,), "client-models": ("mlp mlp-2",)},
    "fd": {"fd-gamma": (-1.0,)},
    "fml": {
        "fml-alpha": (1.5,),
        "fml-beta": (-0.1,),
        "shared-model": ("mlp-9", "cifar10-cnn"),
    },
    "fedkd": {"fedkd-energy-start": (1.5,), "fedkd-energy-end": (-1.0,)},
    "fedgh": {"fedgh-learning-rate": (-1.0,), "aggregation": ("median",)},
    "fedtgp": {
        "fedtgp-threshold": (-1.0,),
        "fedtgp-epochs": (0,),
        "client-models": ("mlp digits-cnn",),
    },
    "fedala": {
        "ala-learning-rate": (-1.0,),
        "ala-share": (0.0, 1.5),
        "ala-start-epochs": (0,),
    },
    "fedamp": {
        "fedamp-attention": ("dot",),
        "fedamp-alpha": (0.0,),
        "fedamp-sigma": (-1.0,),
        "fedamp-self-weight": (1.5,),
        "fedamp-lambda": (-1.0,),
    },
    "fedas": {"fedas-learning-rate": (-1.0,), "fedas-epochs": (-1,)},
    "feddbe": {"dbe-kappa": (-1.0,), "dbe-momentum": (0.0, 1.5)},
    "feddyn": {
        "feddyn-alpha": (0.0,),
        "weighting": ("examples",),
        "max-gradient-norm": (1.0,),
    },
    "fedfomo": {
        "fomo-models": (-1,),
        "fomo-epsilon": (1.5,),
        "fomo-epsilon-decay": (-1.0,),
        "fomo-validation": (1.0,),
        "aggregation": ("median",),
    },
    "fedcp": {"fedcp-lambda": (-1.0,)},
    "fed-mtl": {"mtl-lambda": (-1.0,), "weighting": ("examples",)},
    "fedpac": {
        "fedpac-lambda": (-1.0,),
        "fedpac-head-epochs": (-1,),
        "fedpac-head-learning-rate": (-0.1,),
    },
    "gpfl": {"gpfl-lambda": (-1.0,), "gpfl-mu": (-1.0,)},
    "ifca": {"num-clusters": (0,)},
    "cfl": {"cfl-eps1": (-1.0,), "cfl-eps2": (-1.0,), "cfl-gamma": (1.5,)},
    "fedem": {"fedem-components": (0,)},
    "ccvr": {
        "ccvr-features": (0,),
        "ccvr-epochs": (-1,),
        "server-optimizer": ("adam",),
    },
    "knn-per": {"knn-lambda": (1.1,), "knn-neighbours": (0,), "knn-scale": (0.0,)},
    "l2gd": {
        "l2gd-probability": (0.0, 1.0),
        "l2gd-lambda": (-0.1,),
        "weighting": ("examples",),
    },
    "mime": {"server-optimizer": ("adam",), "max-gradient-norm": (1.0,)},
    "q-fedavg": {"q-fedavg-q": (-1.0,), "server-optimizer": ("adam",)},
    "afl": {"afl-rate": (-1.0,), "weighting": ("examples",)},
    "fedlc": {"fedlc-tau": (0.0,)},
    "fedntd": {"ntd-beta": (-1.0,), "ntd-temperature": (0.0,)},
    "moon": {"moon-mu": (-1.0,), "moon-temperature": (0.0,)},
    "apple": {
        "apple-models": (-1,),
        "apple-learning-rate": (-1.0,),
        "apple-mu": (-1.0,),
        "apple-rounds": (1.5,),
        "aggregation": ("median",),
    },
    "fedcac": {"fedcac-tau": (1.5,), "fedcac-beta": (0,)},
    "fedcross": {
        "fedcross-alpha": (0.4, 1.0),
        "fedcross-partner": ("nearest",),
        "aggregation": ("median",),
    },
    "fedphp": {"fedphp-mu": (1.5,), "fedphp-lambda": (-1.0, 1.5)},
    "pfedfda": {"pfedfda-ridge": (-1.0,)},
    "pfedhn": {
        "hypernetwork-width": (0,),
        "hypernetwork-layers": (-1,),
        "embedding-width": (-1,),
        "hypernetwork-learning-rate": (0.0,),
        "hypernetwork-momentum": (1.0,),
        "hypernetwork-weight-decay": (-1.0,),
        "aggregation": ("median",),
        "new-clients": (1,),
        "model": ("resnet18",),
    },
    "representation-transfer": {
        "num-sources": (0, 20),
        "rank-tolerance": (0.0, 1.5),
        "phase-two-epochs": (-1,),
    },
    "multi-task": {
        "constrained-part": ("tail",),
        "constraint-bound": (-1.0,),
        "radius": ("wide", "0"),
        # Above 1 / saddle-step squared.
        "dual-regularizer": (1e7, -1.0, "none"),
        "saddle-step": (0.0,),
    },
    "fedrep": {"new-clients": (-1, 20)},
    "srpfl": {"initial-nodes": (0, 21), "srpfl-base": BASES},
    "fedbuff": {
        "buffer-size": (11,),
        "concurrency": (0,),
        "staleness-exponent": (-1.0,),
        "global-learning-rate": (0.0,),
        "async-base": ("scaffold", "feddbe", "choco-sgd", "fedproto", "srpfl", "l2gd"),
    },
    "fedasync": {
        "fedasync-alpha": (1.5,),
        "aggregation": ("median", "clip"),
        "async-base": ("fedbuff",),
    },
    "dpsgd": {"new-clients": (1,)},
    # Settings of third-party algorithms are checked, too.
    "outsiders:Hooked": {"fewest": (100, 2.5, 21)},
}
PRIVATE = {"server-dp-noise": 1.0, "server-dp-clip": 1.0, "server-dp-delta": 1e-5}
THEORY = {"speed-model": "dynamic", "rounds-per-stage": "theory"}
UNBIASED = {"task": f"{__name__}:unbiased"}
COMPRESSED = {"upload-compressor": "top-k", "compressor-k": 0.3}
# Algorithms that do more than averaging models, which are all that is compressed
DOES_MORE = ("choco-sgd", "dpsgd", "squarm-sgd", "multi-task", "scaffold", "fednova")
DOES_MORE += ("flute", "local", "fedproto", "l2gd")
# Algorithms that combine replies in a way that no other rule can replace
MEANS_ONLY = ("l2gd", "fednova", "q-fedavg", "afl")
CASES = [
    (algorithm, {name: value}, name)
    for algorithm, settings in OUT_OF_RANGE.items()
    for name, values in settings.items()
    for value in values
] + [
    # Values that do not fit one another
    ("fedavg", {"new-clients": 19, "fraction-train": 0.5}, "fraction-train"),
    # More is told of a client than its share of a mean.
    *(
        (name, PRIVATE, "server-dp-noise")
        for name in ("fedproto", "fedamp", "local", "feddbe", "srpfl", "fedbuff")
    ),
    ("flute", {**PRIVATE, "task": "linear"}, "server-dp-noise"),
    ("fedavg", {**PRIVATE, "weighting": "examples"}, "weighting"),
    ("fedavg", {**PRIVATE, "aggregation": "clip"}, "aggregation"),
    *(
        ("fedavg", {**PRIVATE, name: 0.0}, "server-dp-noise")
        for name in ("server-dp-clip", "server-dp-delta")
    ),
    *(
        ("fedavg", {name: 1e-5}, "server-dp-noise")
        for name in ("server-dp-clip", "server-dp-delta")
    ),
    ("fedavg", {"aggregation": "median", "weighting": "examples"}, "weighting"),
    *((name, {"aggregation": "clip"}, "aggregation") for name in ("local", "dpsgd")),
    *((name, COMPRESSED, "upload-compressor") for name in DOES_MORE),
    ("fedrep", {"task": "linear", **COMPRESSED}, "upload-compressor"),
    ("fedavg", {"secure-aggregation": True, **COMPRESSED}, "secure-aggregation"),
    ("fedavg", {**COMPRESSED, "compressor-k": 1.5}, "compressor-k"),
    ("fml", {"shared-model": "mlp", **UNBIASED}, "shared-model"),
    ("fedmrl", {"shared-model": "mlp", "model": "digits-cnn"}, "shared-model"),
    ("fedgh", {"client-models": "mlp digits-cnn"}, "client-models"),
    # Algorithms whose new arrays are not a mean of models
    *(
        (name, {"server-optimizer": "adam"}, "server-optimizer")
        for name in ("scaffold", "l2gd", "ifca", "local", "pfedhn", "dpsgd", "fednova")
    ),
    ("fedrep", {"task": "linear", "initialization": "moment"}, "initialization"),
    ("scaffold", {"weighting": "examples"}, "weighting"),
    *((name, {"aggregation": "median"}, "aggregation") for name in MEANS_ONLY),
    ("multi-task", {"radius": "1", "bandit-radius": 2.0}, "bandit-radius"),
    ("multi-task", {"task": "qcqp", "bandit-radius": 20.0}, "bandit-radius"),
    *(
        ("representation-transfer", {"task": "transfer", name: value}, name)
        for name, value in {"target-samples": 1, "noise-variance": 0.0}.items()
    ),
    *(
        ("srpfl", {"contraction": value, "rounds-per-stage": stages}, "contraction")
        for value in (0.0, 1.0, 1.5)
        for stages in ("auto", "theory")
    ),
    *(("srpfl", {"new-clients": n, **THEORY}, "new-clients") for n in (20, 21)),
    # Settings of other algorithms
    ("fedavg", {"fewest": 3}, "setting"),
    ("outsiders:Hooked", {"fewer": 3}, "setting"),
    # Tasks and models that do not suit the algorithm; digits has no batch norms
    ("fedrep", {"task": "qcqp"}, "settings"),
    ("dpsgd", {"task": "multi-task-logistic"}, "settings"),
    ("representation-transfer", {"task": "qcqp"}, "settings"),
    ("flute", {"task": "transfer"}, "no-classes"),
    *(
        (name, {"task": "linear"}, "no-classes")
        for name in (
            "flute-star",
            "fedproto",
            "knn-per",
            "fedlc",
            "fedntd",
            "fd",
            "fedem",
        )
    ),
    *(
        (name, {"head-layers": 2}, "head-not-linear")
        for name in ("fedproto", "fedpac", "fedas", "flute", "gpfl", "pfedfda", "fedkd")
    ),
    ("fedbn", {}, "no-batch-norms"),
    *(
        (name, UNBIASED, "no-bias")
        for name in ("fedproto", "pfedfda", "feddbe", "fedgh")
    ),
    ("feddbe", {"task": "linear"}, "no-bias"),
    ("moon", {"model": "logistic"}, "no-features"),
    ("feddyn", {"model": "resnet18"}, "has-buffers"),
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
        assert refusal(running.check, [name], settings, "inline").code == code
