"""The arguments of ``python simulation.py`` and their help."""

import argparse
from collections.abc import Sequence
from typing import Any

from flwr_frl.common.command_line import Parser, run_config
from flwr_frl.common.settings import defaults, require

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
    "page": ("page", "serve the results on http://127.0.0.1:PORT/ during the run"),
}
FLAGS = {flag: name for flag, (name, _) in SETTING_FLAGS.items()}


def parse(
    arguments: Sequence[str] | None, about: str | None = None
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parse the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments without the program's name; ``sys.argv`` by default.
    about : str, optional
        The description that ``--help`` prints.

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
    parser = Parser(
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "algorithms",
        nargs="*",
        metavar="ALGORITHM",
        help="algorithms to compare; see --list",
    )
    text = "inline: in this process; ray: on all cores; auto (default): the faster one"
    add("--backend", default="auto", help=text)
    text = "other settings (docs/settings.md), or a TOML file with settings"
    add(
        "--run-config",
        nargs="+",
        action="append",
        default=[],
        metavar="'k=v …'",
        help=text,
    )
    text = "run N seeds, starting at --seed; report mean ± standard deviation"
    add("--seeds", type=int, metavar="N", help=text)
    text = "run N of them in parallel processes (default 1; not with --backend ray)"
    add("--jobs", type=int, default=1, metavar="N", help=text)
    text = "with `tune ALGORITHM …`: values to choose from by validation accuracy"
    add("--grid", action="append", default=[], metavar="'k=v,v …'", help=text)
    add("--list", action="store_true", help="list algorithms, tasks and models")
    add("--verbose", action="store_true", help="show Flower's log")
    for flag, (name, meaning) in SETTING_FLAGS.items():
        default = defaults()[name]
        text = f"{meaning} (default {default!r})" if default != "" else meaning
        # argparse formats the help with the % operator.
        text, absent = text.replace("%", "%%"), argparse.SUPPRESS
        add(f"--{flag}", dest=name, type=type(default), default=absent, help=text)
    namespace = parser.parse_intermixed_args(arguments)
    for name in namespace.algorithms:
        require("," not in name, "algorithm", name, "names separated by spaces")
    by_flag = {n: value for n, value in vars(namespace).items() if n in defaults()}
    namespace.grid = " ".join(namespace.grid)
    given = dict[str, Any]()
    for texts in namespace.run_config:
        given |= run_config(texts)
    return namespace, given | by_flag
