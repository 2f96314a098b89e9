r"""Run and compare algorithms on a task, and write the results.

FedAvg, FedRep and FLUTE on the bundled digits:
  python simulation.py
Two algorithms; a second terminal shows their results as a web page during the run:
  python simulation.py fedrep local --clients 10 --rounds 20
  python -m flwr_frl.results.page results
The rate with the highest validation accuracy (options: tune --help):
  python simulation.py tune fedrep --grid 'learning-rate=0.01,0.1'
Statistical tests, and the tables and figures of a paper:
  python simulation.py compare results --output paper
Your own images, and settings that have no flag (docs/settings.md):
  python simulation.py fedrep --task image-folder --data-dir photos \
      --run-config 'image-size=32 head-epochs=5'
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from flwr_frl.common.algorithms import ALGORITHMS
from flwr_frl.common.command_line import Parser, exit_code, run_config
from flwr_frl.common.run_cache import begin_run
from flwr_frl.common.settings import defaults
from flwr_frl.results.processes import signals_as_ctrl_c
from flwr_frl.task.names import MODELS, TASKS

# Flags that stand for a setting: the setting's name and the flag's help.
SETTING_FLAGS = {
    "task": ("task", "a task of --list, or package.module:function"),
    "data-dir": ("data-dir", "the folder of images or arrays, or torchvision's root"),
    "clients": ("num-clients", "number of clients"),
    "classes-per-client": ("classes-per-client", "number of shards per client"),
    "rounds": ("num-server-rounds", "number of rounds"),
    "fraction": ("fraction-train", "fraction of the clients that train in a round"),
    "seed": ("seed", "seed of data, model and sampling; it fixes all numbers"),
    "device": ("device", "training device: auto, cpu, cuda, cuda:N or mps"),
    "output": ("output", "folder for the results"),
}
FLAGS = {flag: name for flag, (name, _) in SETTING_FLAGS.items()}


def list_all() -> str:
    """Return the names of all algorithms, tasks and models, one per line."""
    lines = [f"algorithm  {n:<24} {about}" for n, (_, about) in ALGORITHMS.items()]
    lines += [f"task       {name}" for name in TASKS]
    lines += [f"model      {name:<14} {about}" for name, about in MODELS.items()]
    return "\n".join([*lines, "model      any classification model of torchvision"])


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parse the arguments of runs and of ``tune``.

    Parameters
    ----------
    arguments : sequence of str
        Arguments without the program's name.

    Returns
    -------
    namespace, overrides
        The arguments, and the settings among them. A flag takes precedence over the
        same setting in ``--run-config``, and a later ``--run-config`` over an earlier
        one, so that the hint of Ctrl-C can be appended to the command.

    Raises
    ------
    SettingsError
        If the arguments cannot be parsed.
    """
    tunes = arguments[:1] == ["tune"]
    raw = argparse.RawDescriptionHelpFormatter
    many: dict[str, Any] = {"action": "append", "default": []}
    parser = Parser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.set_defaults(tunes=tunes, list=False)
    add = parser.add_argument
    text = "other settings (docs/settings.md), or a TOML file with settings"
    add("--run-config", nargs="+", metavar="'k=v …'", help=text, **many)
    text = "algorithms to compare; see --list"
    add("algorithms", nargs="*", metavar="ALGORITHM", help=text)
    text = "inline: in this process; ray: on all cores; auto (default): by model"
    add("--backend", default="auto", help=text)
    text = "run N seeds, starting at --seed; report mean ± standard deviation"
    add("--seeds", type=int, metavar="N", help=text)
    text = "run N of them in parallel processes (default 1; not with --backend ray)"
    add("--jobs", type=int, default=1, metavar="N", help=text)
    add("--verbose", action="store_true", help="show Flower's log")
    if tunes:
        text = "values to choose from by validation accuracy"
        add("--grid", metavar="'k=v,v …'", required=True, action="append", help=text)
    else:
        text = "list algorithms, tasks and models"
        add("--list", action="store_true", help=text)
    for flag, (name, meaning) in SETTING_FLAGS.items():
        default = defaults()[name]
        text = f"{meaning} (default {default!r})" if default != "" else meaning
        # argparse formats the help with the % operator.
        text, absent = text.replace("%", "%%"), argparse.SUPPRESS
        add(f"--{flag}", dest=name, type=type(default), default=absent, help=text)
    namespace = parser.parse_intermixed_args(arguments[1:] if tunes else arguments)
    by_flag = {n: value for n, value in vars(namespace).items() if n in defaults()}
    given = dict[str, Any]()
    for texts in namespace.run_config:
        given |= run_config(texts)
    return namespace, given | by_flag


@signals_as_ctrl_c()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments without the program's name; ``sys.argv`` by default.

    Returns
    -------
    int
        0 on success, 2 for invalid input or results that could not be written, 3 if a
        run lost most replies of its last rounds, 130 if interrupted. Each failure
        prints one line to standard error. Errors in a user's code are raised.
    """
    # Custom tasks and algorithms are imported from here, as with `python -m`.
    sys.path.append(os.getcwd())
    begin_run()
    return exit_code(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["compare"]:
        return _compare(words[1:])
    namespace, overrides = parse(words)
    if namespace.list:
        Console().out(list_all(), highlight=False)
        return 0
    # Loads torch and Flower, which `--list` and `--help` do without.
    from flwr_frl.running import execute

    return execute(namespace, overrides)


def _compare(arguments: Sequence[str]) -> int:
    """Compare results folders; with ``--output``, write what a paper needs."""
    from flwr_frl.results.comparison import write_paper
    from flwr_frl.results.methods import compare

    parser = Parser(prog="flwr-frl compare", description=_compare.__doc__)
    add = parser.add_argument
    add("folders", nargs="+", metavar="DIR", help="folders of results")
    text = "test against this method (default: the best one)"
    add("--baseline", default="", metavar="ALGORITHM", help=text)
    text = "rounds of the results, as result-protocol (default: that of the runs)"
    add("--protocol", default="", help=text)
    add("--output", type=Path, metavar="DIR", help="folder for the files of a paper")
    options = parser.parse_args(arguments)
    named = {"protocol": options.protocol, "baseline": options.baseline}
    comparison = compare(*options.folders, **named)
    if options.output:
        write_paper(options.output.expanduser(), comparison)
    Console().out(comparison, highlight=False)
    return 0
