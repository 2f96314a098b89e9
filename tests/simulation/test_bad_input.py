"""Bad input: exit code 2, a one-line error, nothing written."""

import subprocess
import sys

import pytest
from command_line import ROOT, assert_refused, cases, config, run

from flwr_frl import cli
from flwr_frl.common.checkpoint import FILE

# Arguments, settings after @, and the code of the error or, after ~, a part of its text
BAD = r"""
fedrap => algorithm
--task minst => task
@ model='resnet81' => model
@ model='resnet18' model-head='top' => ~no head named 'top'
@ model='resnet18' grey-to-rgb=false => ~not fit inputs of shape (1, 8, 8)
@ model='vit_b_16' => ~not fit inputs of shape (3, 8
@ model='mlp' weights='no.pth' => ~weights is 'no.pth'; there is no such
@ sede=1 => setting
@ momentum='high' => momentum
@ augment=1 => augment
@ seed=1e => run-config
@ nowhere.toml => run-config
--output /dev/null/out => output
--colour => command-line
--rounds => command-line
--rounds ten => command-line
--rounds 0 => num-server-rounds
--clients 0 => num-clients
--clients 13 => num-clients
--clients 2000 => num-clients
--clients 99999999999 => num-clients
@ torch-threads=1025 => torch-threads
--classes-per-client 11 => classes-per-client
--classes-per-client 0 => classes-per-client
--fraction 0 => fraction-train
--fraction 1.5 => fraction-train
--fraction nan => fraction-train
--fraction 0.01 => ~of 20 clients it samples nobody
--seed -1 => seed
--backend dask => backend
--task image-folder => data-dir
--task image-folder --data-dir nowhere => data-dir
--task image-folder --data-dir empty => data-dir
--task image-folder --data-dir hollow => data-dir
--task image-folder --data-dir broken => data-dir
--task cifar10 --data-dir nowhere => data-dir
@ resume='nowhere' => ~there is no checkpoint 'nowhere/fedavg
@ momentum=1.5 => momentum
@ learning-rate=0 => learning-rate
@ weight-decay=-1.0 => weight-decay
@ batch-size=0 => batch-size
@ head-epochs=-1 => head-epochs
@ representation-epochs=-1 => representation-epochs
fedavg-ft @ finetune-epochs=-1 => finetune-epochs
@ evaluate-every=-1 => evaluate-every
@ checkpoint-every=-1 => checkpoint-every
--device gpu => device
--device cuda:99 => device
@ round-timeout=0 => round-timeout
@ weighting='even' => weighting
@ partition='even' => partition
@ partition='dirichlet' dirichlet-alpha=0 => dirichlet-alpha
@ partition='log-normal' size-sigma=-1 => size-sigma
@ num-classes=1 => num-classes
@ head-layers=7 => head-layers
@ min-train-nodes=0 => min-train-nodes
@ min-available-nodes=0 => min-available-nodes
--task linear @ rank=11 => rank
--task linear @ samples=0 => samples
--task linear @ noise-variance=-1.0 => noise-variance
--task linear @ spectrum='flat' => spectrum
--task linear @ initialization='zero' => initialization
@ cache-dir='file' => cache-dir
--output '' => ~output is ''; expected a directory
@ nonsense => run-config
@ seed = 3 => run-config
@ seed= => run-config
FedAvg => ~did you mean 'fedavg'? known: apfl,
flwr_frl.strategies.fedrep => ~; or package.module:Class
fedrep,fedavg => ~algorithm is 'fedrep,fedavg'; expected names separated by spaces
outsiders:Hookd => ~has no 'Hookd'; did you mean 'Hooked'?
nowhere.at_all:Strategy => ~install it, or run the command in the folder that
--task Digits => ~did you mean 'digits'?
--task digit => ~; or package.module:function
--local-epochs 5 => command-line
--local-epochs 5 => ~'head-epochs=5' or --run-config 'representation-epochs=5'?
--head_epochs=3 => ~did you mean --run-config 'head-epochs=3'?
--model mlp => ~did you mean --run-config 'model="mlp"'?
--num-clients 5 => ~unknown argument '--num-clients'; use --clients
--round 5 => ~unknown argument '--round'; did you mean --rounds?
-q => ~settings without a flag are set with --run-config 'name=value'
--rounds => ~--rounds: expected a value
--run-config --seed 1 => ~--run-config: expected a value
--rounds ten => ~--rounds: expected an integer, not 'ten'
--fraction 10% => ~--fraction: expected a number, not '10%'
--run-config seed=3 fedavg => ~'fedavg' is not name=value; quote all settings together
--run-config seed = 3 => ~must be name=value, without spaces around =
@ seed = 3 => ~must be name=value, without spaces around =
@ seed: 3 => ~'seed: 3' is not name=value
@ learning-rate=fast => ~learning-rate is 'fast'; expected a number
@ augment=True => ~augment is 'True'; expected true or false
@ model=mlp => ~model is mlp without quotes; write 'model="mlp"'
@ model="mlp => ~is not closed
@ seed=1,batch-size=5 => ~settings are separated by spaces
@ seed=1, batch-size=5 => ~settings are separated by spaces
@ model='mlp',seed=1 => ~settings are separated by spaces
@ seed=1 seed=2 => ~seed is set twice
fedrep --grid seed=1,2 => ~expected 'tune' before the algorithms
tune fedrep => ~tune needs a setting with values
tune fedrep --grid 'momentum=0.1, 0.2' => ~'0.2' has no name or no value; commas
tune fedrep --grid 'momentum=0 momentum=1' => ~momentum is set twice
@ local-epochs=5 => ~did you mean 'head-epochs' or 'representation-epochs'?
@ rounds=5 => ~did you mean 'num-server-rounds'?
@ momentum='high' => ~momentum is 'high'; expected a number
@ head-epochs=1.5 => ~head-epochs is 1.5; expected an integer
@ augment=1 => ~augment is 1; expected true or false
@ model=3 => ~model is 3; expected a string
--output file => output
--seed 1000000000000000000000000000000 => seed
@ min-available-nodes=100 => min-available-nodes
@ learning-rate=inf => learning-rate
fedrep --task linear @ head-steps=-1 => head-steps
nowhere.at_all:Strategy => algorithm
outsiders:Nobody => algorithm
fedavg outsiders:Homeless => ~'outsiders:Homeless' is no strategy
outsiders:WithoutClient => ~has no client
outsiders:LostClient => client
outsiders:StrangeClient => ~'outsiders:Plain' is no client
fedrep outsiders:fedrep => ~two algorithms are called 'fedrep'
fedavg @ fewest=3 => setting
outsiders:Hooked @ fewest=0 => fewest
--task nowhere:task => task
srpfl @ srpfl-base='srpfl' => ~srpfl-base is 'srpfl'
srpfl @ srpfl-base='flanp-ft' => ~srpfl-base is 'flanp-ft'
srpfl @ srpfl-base='outsiders:Homeless' => ~'outsiders:Homeless' is no strategy
fedrep-ft => ~FedRepClient cannot be fine-tuned with '-ft'; it must use the
per-fedavg @ inner-learning-rate=-0.1 => inner-learning-rate
hf-maml @ hessian-delta=0 => hessian-delta
l2gd @ l2gd-probability=1.0 => l2gd-probability
l2gd @ l2gd-lambda=12.0 => ~l2gd-lambda is 12.0; expected at most 11.1111
fed-mtl @ weighting='examples' => weighting
fed-mtl @ mtl-lambda=-1 => mtl-lambda
fedrod @ head-layers=2 => ~FedRoD needs a head that is one linear
fedrod --task linear => ~'fedrod' and task 'linear': it needs classes
fedcp @ head-layers=2 => ~FedCP needs a head that is one linear
fedcp @ fedcp-lambda=-1 => fedcp-lambda
"""


@pytest.mark.parametrize(("arguments", "expected"), cases(BAD))
def test_bad_input_gives_a_one_line_error(surroundings, arguments, expected):
    assert_refused(arguments, expected, surroundings)


def test_an_error_prints_one_line_and_exits_with_code_2(surroundings, capfd):
    assert cli.main(["fedrap", "--backend", "inline"]) == 2
    out, error = capfd.readouterr()
    assert out == ""
    assert error.startswith("error: unknown algorithm 'fedrap'; did you mean 'fedrep'?")
    assert error.count("\n") == 1


def test_resume_with_other_settings_is_refused(surroundings):
    assert run(surroundings / "out", "fedper", "--rounds", "1", checkpoint_every=1) == 0
    for overrides, line in (
        ("seed=3", "~seed was 0 and is 3"),
        (
            "learning-rate=0.5 momentum=0.1",
            "~learning-rate was 0.01 and is 0.5, momentum was 0.5 and is 0.1",
        ),
    ):
        arguments = ("fedper", "--rounds", "2")
        arguments += config(f"checkpoint-every=1 resume='out' {overrides}")
        assert_refused(arguments, line, surroundings)


def test_resume_from_a_damaged_checkpoint_is_refused(surroundings):
    (surroundings / "out" / "fedper").mkdir(parents=True)
    (surroundings / "out" / "fedper" / FILE).write_bytes(b"\0" * 100)
    arguments = ("fedper", *config("resume='out'"))
    assert_refused(arguments, f"~'out/fedper/{FILE}' is damaged", surroundings)


def test_a_finished_run_cannot_be_resumed_in_another_folder(surroundings):
    assert run(surroundings / "out", "fedper", "--rounds", "2", checkpoint_every=1) == 0
    arguments = ("fedper", "--rounds", "2", "--output", "new")
    arguments += config("checkpoint-every=1 resume='out'")
    assert_refused(arguments, "~the run of fedper has ended", surroundings)
    # A different run in the new folder makes no difference.
    other = {"checkpoint_every": 1, "seed": 1}
    assert run(surroundings / "new", "fedper", "--rounds", "2", **other) == 0
    assert_refused(arguments, "~leave fedper out, or set a larger num", surroundings)


def test_a_refused_run_deletes_and_moves_nothing(surroundings):
    kept = {"checkpoint_every": 1, "initial_nodes": 2}
    assert run(surroundings / "out", "srpfl", "--rounds", "2", **kept) == 0
    (surroundings / "times.txt").write_text("1.5\nsoon\n")
    (surroundings / "bytes").write_bytes(b"\xff\xfe")
    for setting, line in (
        ("initial-nodes=11", "~initial-nodes is 11; expected at most 10"),
        ("tracker='foo'", "~unknown tracker 'foo'; known: "),
        ("tracker='os:path'", "~expected a subclass of Tracker"),
        ("speed-model='fast'", "~unknown speed-model 'fast'"),
        ("speed-model='times.txt'", "~'soon'; it must have a number a line"),
        ("speed-model='bytes'", "~can't decode byte 0xff"),
    ):
        arguments = ("srpfl", *config(f"checkpoint-every=1 {setting}"))
        assert_refused(arguments, line, surroundings)


@pytest.mark.e2e
def test_bad_input_to_a_real_process_gives_a_one_line_error(tmp_path):
    command = [sys.executable, ROOT / "simulation.py", "--clients", "13"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: num-clients is 13")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
