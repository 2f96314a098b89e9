"""Bad input: exit code 2, a one-line error, nothing written."""

import subprocess
import sys

import pytest
from command_line import ROOT, assert_refused, cases, config, run

from flwr_frl.common.checkpoint import FILE

# Arguments, settings after @, and the code of the error or, after ~, a part of its text
BAD = r"""
fedrap => algorithm
fedavg dpsgd @ server-optimizer='adam' => ~dpsgd: server-optimizer is 'adam'
--task minst => task
@ model='resnet81' => model
@ model='vit_b_16' => ~not fit inputs of shape (3, 8
@ model='mlp' weights='no.pth' => ~'no.pth' cannot be read
@ sede=1 => setting
--task table --data-dir nowhere @ label-colum='x' => setting
@ seed=1e => run-config
@ nowhere.toml => run-config
--colour => command-line
--clients 13 => num-clients
@ torch-threads=1025 => torch-threads
--fraction 0.01 => ~of 20 clients it samples nobody
--backend dask => backend
--task image-folder --data-dir nowhere => data-dir
--task image-folder --data-dir broken => data-dir
--task cifar10 --data-dir nowhere => data-dir
@ resume='nowhere' => ~there is no checkpoint 'nowhere/fedavg
--device gpu => device
@ weighting='even' => weighting
--task linear @ rank=11 => rank
@ cache-dir='file' => cache-dir
--output '' => ~output is ''; expected a directory
FedAvg => ~did you mean 'fedavg'? known: see flwr-frl --list
outsiders:Nobody => algorithm
outsiders: => algorithm
--num-clients 5 => command-line
--rounds => command-line
--run-config seed=3 fedavg => run-config
@ learning-rate=fast => run-config
@ model=mlp => run-config
fedrep --grid seed=1,2 => command-line
tune fedrep => command-line
tune fedrep --grid 'momentum=0.1, 0.2' => grid
--seed 1000000000000000000000000000000 => seed
@ min-available-nodes=100 => min-available-nodes
nowhere.at_all:Strategy => algorithm
fedavg outsiders:Homeless => ~'outsiders:Homeless' is no strategy
outsiders:WithoutClient => client
outsiders:LostClient => client
outsiders:StrangeClient => ~'outsiders:Plain' is no client
fedrep outsiders:fedrep => ~two algorithms are called 'fedrep'
squarm-sgd @ graph='rign' => ~unknown graph 'rign'; did you mean 'ring'?
squarm-sgd @ graph='nowhere.txt' => ~unknown graph 'nowhere.txt'; known: complete
squarm-sgd --clients 5 @ graph='torus' => ~the number of nodes of a torus is 5
squarm-sgd @ graph='erdos-renyi' edge-probability=0.0 => edge-probability
squarm-sgd @ consensus-step=1.5 => consensus-step
squarm-sgd @ consensus-step=0.0 => consensus-step
squarm-sgd @ consensus-step=nan => consensus-step
squarm-sgd @ local-steps=0 => local-steps
squarm-sgd @ compressor='topk' => compressor
squarm-sgd @ trigger='1:2' => trigger
squarm-sgd @ learning-rate-schedule='cosine' => learning-rate-schedule
squarm-sgd @ max-missed-rounds=0 => max-missed-rounds
dpsgd --clients 1 @ partition='iid' => ~the number of nodes is 1
fedavg @ fewest=3 => setting
outsiders:Hooked @ fewest=0 => fewest
--task nowhere:task => task
srpfl @ srpfl-base='srpfl' => ~srpfl-base is 'srpfl'
fed-mtl @ weighting='examples' => weighting
fedrod --task linear => ~'fedrod' and task 'linear': it needs classes
fedrep @ secure-aggregation=true aggregation='median' => aggregation
flute @ secure-aggregation=true => secure-aggregation
fedproto @ secure-aggregation=true => secure-aggregation
ifca @ secure-aggregation=true => secure-aggregation
fedas @ secure-aggregation=true => secure-aggregation
local @ upload-compressor='top-k' => ~only methods that average models
dpsgd @ secure-aggregation=true => secure-aggregation
fedbuff @ secure-aggregation=true => secure-aggregation
srpfl @ secure-aggregation=true => secure-aggregation
fedrep --task linear @ secure-aggregation=true => initialization
fedrep --fraction 0.1 @ secure-aggregation=true => secure-aggregation
fedrep @ secure-aggregation=true secure-neighbours=5 => secure-neighbours
fedrep @ secure-aggregation=true secure-neighbours=2 => secure-neighbours
fedrep @ secure-aggregation=true secure-bits=8 => secure-bits
fedrep @ secure-aggregation=true secure-threshold=0.5 => secure-threshold
fedrep @ secure-aggregation=true secure-range=0.0 => secure-range
fedrep @ secure-aggregation=true checkpoint-every=5 => checkpoint-every
"""


@pytest.mark.parametrize(("arguments", "expected"), cases(BAD))
def test_bad_input_gives_a_one_line_error(surroundings, arguments, expected):
    assert_refused(arguments, expected, surroundings)


def test_resumes_that_cannot_continue_are_refused(surroundings):
    assert run(surroundings / "out", "fedper", "--rounds", "1", checkpoint_every=1) == 0
    (surroundings / "damaged" / "fedper").mkdir(parents=True)
    (surroundings / "damaged" / "fedper" / FILE).write_bytes(b"\0" * 100)
    both = "~learning-rate was 0.01 and is 0.5, momentum was 0.5 and is 0.1"
    for words, settings, line in (
        (("--rounds", "2"), "resume='out' seed=3", "~seed was 0 and is 3"),
        (("--rounds", "2"), "resume='out' learning-rate=0.5 momentum=0.1", both),
        ((), "resume='damaged'", f"~'damaged/fedper/{FILE}' is damaged"),
    ):
        text = f"checkpoint-every=1 {settings}"
        assert_refused(("fedper", *words, *config(text)), line, surroundings)


def test_a_refused_run_deletes_and_moves_nothing(surroundings):
    kept = {"checkpoint_every": 1, "initial_nodes": 2}
    assert run(surroundings / "out", "srpfl", "--rounds", "2", **kept) == 0
    (surroundings / "times.txt").write_text("1.5\nsoon\n")
    (surroundings / "bytes").write_bytes(b"\xff\xfe")
    for setting, line in (
        ("initial-nodes=11", "~initial-nodes is 11; expected at most 10"),
        ("tracker='foo'", "~tracker 'foo' cannot be imported"),
        ("tracker='os:path'", "~expected a subclass of Tracker"),
        ("speed-model='fast'", "~unknown speed-model 'fast'"),
        ("speed-model='times.txt'", "~'soon' to float64"),
        ("speed-model='bytes'", "~can't decode byte 0xff"),
    ):
        arguments = ("srpfl", *config(f"checkpoint-every=1 {setting}"))
        assert_refused(arguments, line, surroundings)


def test_an_error_in_a_users_code_is_raised(surroundings):
    lines = ["from flwr_frl.strategies import FedRep", "class Wrong(FedRep):"]
    lines += ["    def aggregate(self, round):", "        return round.nothing"]
    (surroundings / "wrong_aggregate.py").write_text("\n".join(lines))
    arguments = ("wrong_aggregate:Wrong", "--rounds", "1", "--clients", "5")
    with pytest.raises(AttributeError, match="nothing"):
        run(surroundings / "out", *arguments)


@pytest.mark.e2e
def test_bad_input_to_a_real_process_gives_a_one_line_error(tmp_path):
    command = [sys.executable, ROOT / "simulation.py", "--clients", "13"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: fedavg: num-clients is 13")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
