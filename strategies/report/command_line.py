"""The arguments of ``python simulation.py`` and their help."""

import argparse
import re
from collections.abc import Sequence
from typing import Any

from flwr_frl.strategies.table import ALGORITHMS
from flwr_frl.task.command_line import Parser
from flwr_frl.task.settings import SettingsError, defaults

# A pair ``name=value``, as in flwr.common.config.parse_config_args.
PAIR = re.compile(r"""\S+?=('[^']*'|"[^"]*"|\S+)""")
# Flags that stand for a setting: the setting's name and the flag's help.
SETTING_FLAGS = {
    "task": ("task", "a task of --list, or package.module:function"),
    "data-dir": ("data-dir", "the folder of images or arrays, or torchvision's root"),
    "clients": ("num-clients", "number of clients"),
    "classes-per-client": ("classes-per-client", "number of classes per client"),
    "rounds": ("num-server-rounds", "number of rounds"),
    "fraction": ("fraction-train", "fraction of the clients that train in a round"),
    "seed": ("seed", "seed of data, model and sampling; it fixes all numbers"),
    "device": ("device", "training device: auto, cpu, cuda, cuda:N or mps"),
    "output": ("output", "folder for the results"),
    "page": ("page", "serve the results on http://127.0.0.1:PORT/ during the run"),
}
FLAGS = {flag: name for flag, (name, _) in SETTING_FLAGS.items()}
EXAMPLES = """examples:
  python simulation.py
      FedAvg, FedRep and FLUTE on the bundled digits
  python simulation.py fedrep local --clients 10 --rounds 20 --page 8765
      two algorithms; http://127.0.0.1:8765/ shows the results during the run
  python simulation.py fedrep --task image-folder --data-dir photos \\
      --run-config 'image-size=32 head-epochs=5'
      your own images, and settings that have no flag (docs/settings.md)
"""


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
        same setting in ``--run-config``.

    Raises
    ------
    SettingsError
        If the arguments cannot be parsed.
    """
    parser = Parser(
        description=about,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("algorithms", nargs="*", metavar="ALGORITHM", help="algorithms to compare")
    text = "inline: in this process; ray: on all cores; auto (default): the faster one"
    add("--backend", default="auto", help=text)
    text = "other settings (docs/settings.md), or a TOML file with settings"
    add("--run-config", nargs="*", default=[], metavar="'k=v …'", help=text)
    text = "run N seeds, starting at --seed; report mean ± standard deviation"
    add("--seeds", type=int, metavar="N", help=text)
    text = "run N of them in parallel processes (default 1; not with --backend ray)"
    add("--jobs", type=int, default=1, metavar="N", help=text)
    text = "with `tune ALGORITHM …`: values to choose from by validation accuracy"
    add("--grid", default="", metavar="'k=v,v …'", help=text)
    add("--list", action="store_true", help="list algorithms, tasks and models")
    add("--verbose", action="store_true", help="show Flower's log")
    for flag, (name, meaning) in SETTING_FLAGS.items():
        default = defaults()[name]
        text = f"{meaning} (default {default!r})" if default != "" else meaning
        # argparse formats the help with the % operator.
        add(f"--{flag}", type=type(default), help=text.replace("%", "%%"))
    namespace = parser.parse_intermixed_args(arguments)
    by_flag = {
        name: value
        for flag, name in FLAGS.items()
        if (value := getattr(namespace, flag.replace("-", "_"))) is not None
    }
    return namespace, {**_run_config(namespace.run_config), **by_flag}


def _run_config(texts: list[str]) -> dict[str, Any]:
    if not texts:
        return {}
    # Takes long to import, and is not needed for `--help`.
    from flwr.common.config import parse_config_args

    # Flower ignores text that is not a pair.
    lines = [line for line in texts if not line.endswith(".toml")]
    try:
        if rest := " ".join(PAIR.sub("", line) for line in lines).strip():
            raise ValueError(f"{rest!r} is not a pair")
        return parse_config_args(texts)
    except Exception as error:
        raise SettingsError(
            f"--run-config {' '.join(texts)!r} cannot be read: it must be 'name=value "
            f"…' or a TOML file ({error})",
            "run-config",
        ) from None


def _epilog() -> str:
    width = max(map(len, ALGORITHMS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in ALGORITHMS.items()]
    listed = "\n".join(lines)
    return f"algorithms, or package.module:Class:\n{listed}\n\n{EXAMPLES}"
