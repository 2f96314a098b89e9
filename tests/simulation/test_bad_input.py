"""Bad input: exit code 2, one line, nothing written."""

import subprocess
import sys

import pytest
from command_line import (
    ROOT,
    assert_refused,
    config,
    run,
)

from flwr_frl.task.checkpoint import FILE

BAD = [
    (
        ("fedrap",),
        "unknown algorithm 'fedrap'; did you mean 'fedrep'? known: apfl, choco",
    ),
    (("fedavg", "fedrap"), "unknown algorithm 'fedrap'"),
    (("--task", "minst"), "unknown task 'minst'; did you mean 'mnist'? known: arrays"),
    (config("model='resnet81'"), "unknown model 'resnet81'; did you mean 'resnet18'"),
    (
        config("model='resnet18' model-head='top'"),
        "the model ResNet has no head named 'top'; its linear layers: fc",
    ),
    (
        config("model='resnet18' grey-to-rgb=false"),
        "model 'resnet18' does not fit inputs of shape (1, 8, 8): Given groups=1",
    ),
    (config("model='vit_b_16'"), "model 'vit_b_16' does not fit inputs of shape (3, 8"),
    (config("model='mlp' weights='no.pth'"), "weights is 'no.pth'; there is no such"),
    (config("sede=1"), "unknown setting 'sede'; did you mean 'seed'? known: "),
    (config("seed=true"), "seed is True; expected a value of type int"),
    (config("momentum='high'"), "momentum is 'high'; expected a value of type float"),
    (config("augment=1"), "augment is 1; expected a value of type bool"),
    (config("seed=1e"), "--run-config 'seed=1e' cannot be read: it must be"),
    (config("nowhere.toml"), "--run-config 'nowhere.toml' cannot be read"),
    (("--output", "/dev/null/out"), "output is '/dev/null/out'; expected writable"),
    (("--colour",), "unrecognized arguments: --colour; see --help"),
    (("--rounds",), "argument --rounds: expected one argument; see --help"),
    (("--rounds", "ten"), "argument --rounds: invalid int value: 'ten'; see --help"),
    (("--rounds", "1.5"), "argument --rounds: invalid int value: '1.5'"),
    (("--rounds", "0"), "num-server-rounds is 0; expected at least 1"),
    (("--clients", "0"), "num-clients is 0; expected at least 1"),
    (("--clients", "-5"), "num-clients is -5; expected at least 1"),
    (
        ("--clients", "13"),
        "num-clients is 13: 13 x 2 classes per client are no multiple",
    ),
    (("--clients", "13"), "values are 10 or 15"),
    (("--clients", "2000"), "num-clients is 2000; expected at most 1,438, the num"),
    (config("torch-threads=1025"), "torch-threads is 1025; expected a number in [1, 1"),
    (
        ("--classes-per-client", "11"),
        "classes-per-client is 11; expected from 1 to 10",
    ),
    (("--classes-per-client", "0"), "classes-per-client is 0; expected at least 1\n"),
    (("--fraction", "0"), "fraction-train is 0.0; expected a number in (0, 1]"),
    (("--fraction", "1.5"), "fraction-train is 1.5; expected a number in (0, 1]"),
    (("--fraction", "-1"), "fraction-train is -1.0; expected a number in (0, 1]"),
    (("--fraction", "nan"), "fraction-train is nan; expected a number in (0, 1]"),
    (
        ("--fraction", "0.01"),
        "fraction-train is 0.01: of 20 clients it samples nobody; expected at least",
    ),
    (("--seed", "-1"), "seed is -1; expected at least 0"),
    (("--backend", "dask"), "backend is 'dask'; expected auto, inline or ray"),
    (("--task", "image-folder"), "data-dir is ''; expected a directory with train/"),
    (
        ("--task", "image-folder", "--data-dir", "nowhere"),
        "data-dir is 'nowhere'; expected a directory with train/<class>/*",
    ),
    (
        ("--task", "image-folder", "--data-dir", "empty"),
        "data-dir 'empty' has no class folders under 'train'; it must hold train/",
    ),
    (
        ("--task", "image-folder", "--data-dir", "hollow"),
        "class folder 'hollow/train/b' has no images",
    ),
    (
        ("--task", "image-folder", "--data-dir", "broken"),
        "2 images cannot be read, the first is broken/train/a/0.png",
    ),
    (
        ("--task", "cifar10", "--data-dir", "nowhere"),
        "data-dir is 'nowhere'; expected an existing",
    ),
    (config("resume='nowhere'"), "there is no checkpoint 'nowhere/fedavg/checkpoint"),
    (config("momentum=1.5"), "momentum is 1.5; expected a number in [0, 1)"),
    (config("learning-rate=0"), "learning-rate is 0.0; expected a number above 0"),
    (config("weight-decay=-1.0"), "weight-decay is -1.0; expected at least 0"),
    (config("batch-size=0"), "batch-size is 0; expected at least 1"),
    (config("head-epochs=-1"), "head-epochs is -1; expected at least 0"),
    (config("representation-epochs=-1"), "representation-epochs is -1; expected at"),
    (
        ("fedavg-ft", *config("finetune-epochs=-1")),
        "finetune-epochs is -1; expected at least 0",
    ),
    (config("evaluate-every=-1"), "evaluate-every is -1; expected at least 0"),
    (config("checkpoint-every=-1"), "checkpoint-every is -1; expected at least 0"),
    (config("torch-threads=0"), "torch-threads is 0; expected a number in [1, 1024]"),
    (("--device", "gpu"), "device is 'gpu'; expected auto, cpu, cuda, cuda:N or mps"),
    (
        ("--device", "cuda:99"),
        "device is 'cuda:99'; expected auto, or what this machine has: cpu",
    ),
    (config("round-timeout=0"), "round-timeout is 0.0; expected a number above 0\n"),
    (config("weighting='even'"), "weighting is 'even'; expected uniform or examples"),
    (
        config("partition='even'"),
        "partition is 'even'; expected shards, distinct-shards, dirichlet, log-norm",
    ),
    (
        config("partition='dirichlet' dirichlet-alpha=0"),
        "dirichlet-alpha is 0.0; expected a number above 0\n",
    ),
    (
        config("partition='log-normal' size-sigma=-1"),
        "size-sigma is -1.0; expected at least 0",
    ),
    (config("num-classes=1"), "num-classes is 1; expected 0 (all) or from 2 to 10"),
    (config("head-layers=7"), "head-layers is 7; expected from 1 to 3"),
    (config("min-train-nodes=0"), "min-train-nodes is 0; expected at least 1"),
    (
        config("min-available-nodes=0"),
        "min-available-nodes is 0; expected at least 1",
    ),
    (
        ("--task", "linear", *config("rank=11")),
        "rank is 11; expected from 1 to 10, the dimension",
    ),
    (("--task", "linear", *config("samples=0")), "samples is 0; expected at least 1"),
    (
        ("--task", "linear", *config("noise-variance=-1.0")),
        "noise-variance is -1.0; expected at least 0",
    ),
    (
        ("--task", "linear", *config("spectrum='flat'")),
        "spectrum is 'flat'; expected low-rank, gaussian or decaying\n",
    ),
    (
        ("--task", "linear", *config("initialization='zero'")),
        "initialization is 'zero'; expected moments or random",
    ),
    (config("cache-dir='file'"), "the data cache 'file' cannot be written"),
    (("--output", ""), "output is ''; expected a directory"),
    (config("nonsense"), "nonsense"),
    (config("seed = 3"), "seed = 3"),
    (config("seed="), "seed="),
    (("--output", "file"), "file"),
    (("--output", "file/below"), "file"),
    (("--seed", str(10**30)), "seed is 1000"),
    (config("min-available-nodes=100"), "min-available-nodes is 100"),
    (config("learning-rate=inf"), "learning-rate is inf"),
    (
        ("fedrep", "--task", "linear", *config("head-steps=-1")),
        "head-steps is -1; expected at least 0",
    ),
    # Somebody else's.
    (
        ("nowhere.at_all:Strategy",),
        "algorithm 'nowhere.at_all:Strategy' cannot be imported: ModuleNotFoundError: ",
    ),
    (
        ("outsiders:Nobody",),
        "algorithm 'outsiders:Nobody' cannot be imported: module 'outsiders' has no",
    ),
    (
        ("fedavg", "outsiders:Homeless"),
        "algorithm 'outsiders:Homeless' is no strategy; expected a subclass of Base",
    ),
    (
        ("outsiders:WithoutClient",),
        "algorithm 'outsiders:WithoutClient' has no client; declare the import path",
    ),
    (
        ("outsiders:LostClient",),
        "client 'outsiders:NobodyIsHere' cannot be imported: module 'outsiders' has n",
    ),
    (
        ("outsiders:StrangeClient",),
        "client 'outsiders:Plain' is no client; expected a subclass of Client",
    ),
    (
        ("outsiders:Plain", "outsiders:Elsewhere.Plain", "fedrep", "outsiders:fedrep"),
        "two algorithms are called 'fedrep': 'fedrep' and 'outsiders:fedrep'; each mu",
    ),
    (("fedavg", *config("fewest=3")), "unknown setting 'fewest'; known: see docs/"),
    (
        ("outsiders:Hooked", *config("fewest=0")),
        "fewest is 0; expected a number in [1, 99]",
    ),
    (("--task", "nowhere:task"), "task 'nowhere:task' cannot be imported: ModuleNot"),
    (
        ("srpfl", *config("srpfl-base='srpfl'")),
        "srpfl-base is 'srpfl'; expected an algorithm that is not SRPFL\n",
    ),
    (
        ("srpfl", *config("srpfl-base='flanp-ft'")),
        "srpfl-base is 'flanp-ft'; expected an algorithm that is not SRPFL\n",
    ),
    (
        ("srpfl", *config("srpfl-base='outsiders:Homeless'")),
        "algorithm 'outsiders:Homeless' is no strategy; expected",
    ),
    (("fedrep-ft",), "FedRepClient cannot be fine-tuned with '-ft'; it must use the"),
    (
        ("per-fedavg", *config("inner-learning-rate=-0.1")),
        "inner-learning-rate is -0.1; expected at least 0\n",
    ),
    (
        ("hf-maml", *config("hessian-delta=0")),
        "hessian-delta is 0.0; expected a number above 0\n",
    ),
    (
        ("l2gd", *config("l2gd-probability=1.0")),
        "l2gd-probability is 1.0; expected a number in (0, 1)\n",
    ),
    (
        ("l2gd", *config("l2gd-lambda=12.0")),
        "l2gd-lambda is 12.0; expected at most 11.1111 with l2gd-probability 0.1 and",
    ),
    (
        ("fed-mtl", *config("weighting='examples'")),
        "weighting is 'examples'; expected uniform, as the mean is that of all",
    ),
    (("fed-mtl", *config("mtl-lambda=-1")), "mtl-lambda is -1.0; expected at least"),
    (
        ("fedrod", *config("head-layers=2")),
        "algorithm 'fedrod' and task 'digits': FedRoD needs a head that is one linear",
    ),
    (
        ("fedrod", "--task", "linear"),
        "algorithm 'fedrod' and task 'linear': it needs classes, to which its heads",
    ),
    (
        ("fedcp", *config("head-layers=2")),
        "algorithm 'fedcp' and task 'digits': FedCP needs a head that is one linear",
    ),
    (("fedcp", *config("fedcp-lambda=-1")), "fedcp-lambda is -1.0; expected at lea"),
]


@pytest.mark.parametrize(("arguments", "line"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input(surroundings, capfd, arguments, line):
    assert_refused(arguments, line, surroundings, capfd)


def test_resume_with_other_settings(surroundings, capfd):
    assert run(surroundings / "out", "fedper", "--rounds", "1", checkpoint_every=1) == 0
    for overrides, line in (
        ("seed=3", "'out/fedper' was made with other settings: seed was 0 and is 3\n"),
        (
            "learning-rate=0.5 momentum=0.1",
            "learning-rate was 0.01 and is 0.5, momentum was 0.5 and is 0.1\n",
        ),
    ):
        arguments = ("fedper", "--rounds", "2")
        arguments += config(f"checkpoint-every=1 resume='out' {overrides}")
        assert_refused(arguments, line, surroundings, capfd)


def test_resume_from_a_damaged_checkpoint(surroundings, capfd):
    (surroundings / "out" / "fedper").mkdir(parents=True)
    (surroundings / "out" / "fedper" / FILE).write_bytes(b"\0" * 100)
    arguments = ("fedper", *config("resume='out'"))
    line = f"resume: 'out/fedper/{FILE}' is damaged"
    assert_refused(arguments, line, surroundings, capfd)


def test_a_run_that_is_over_cannot_be_resumed_elsewhere(surroundings, capfd):
    assert run(surroundings / "out", "fedper", "--rounds", "2", checkpoint_every=1) == 0
    arguments = ("fedper", "--rounds", "2", "--output", "new")
    arguments += config("checkpoint-every=1 resume='out'")
    assert_refused(arguments, "resume: the run has ended", surroundings, capfd)
    # Another run that is there is not this one.
    other = {"checkpoint_every": 1, "seed": 1}
    assert run(surroundings / "new", "fedper", "--rounds", "2", **other) == 0
    assert_refused(arguments, "resume: the run has ended", surroundings, capfd)


def test_a_refused_run_deletes_and_moves_nothing(surroundings, capfd):
    kept = {"checkpoint_every": 1, "initial_nodes": 2}
    assert run(surroundings / "out", "srpfl", "--rounds", "2", **kept) == 0
    (surroundings / "times.txt").write_text("1.5\nsoon\n")
    (surroundings / "bytes").write_bytes(b"\xff\xfe")
    for setting, line in (
        ("initial-nodes=11", "initial-nodes is 11; expected at most 10"),
        ("tracker='foo'", "unknown tracker 'foo'; known: "),
        ("tracker='os:path'", "expected a subclass of Tracker"),
        ("speed-model='fast'", "unknown speed-model (or file) 'fast'"),
        ("speed-model='times.txt'", "'soon'; it must have a number a line"),
        ("speed-model='bytes'", "can't decode byte 0xff"),
    ):
        arguments = ("srpfl", *config(f"checkpoint-every=1 {setting}"))
        assert_refused(arguments, line, surroundings, capfd)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["fedrap"], "error: unknown algorithm 'fedrap'"),
        (["--clients", "13"], "error: num-clients is 13"),
    ],
)
def test_bad_input_to_the_real_command(tmp_path, arguments, line):
    result = subprocess.run(
        [sys.executable, ROOT / "simulation.py", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
