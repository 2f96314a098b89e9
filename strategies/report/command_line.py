"""What ``simulation.py`` is given: flags, settings, and errors of one line."""

import argparse
import re
from collections.abc import Sequence
from typing import Any

from flwr.common.config import parse_config_args

from flwr_frl.strategies.report import help_texts
from flwr_frl.task.command_line import Parser
from flwr_frl.task.settings import SettingsError, defaults

# As in flwr.common.config.parse_config_args.
PAIR = re.compile(r"""\S+?=('[^']*'|"[^"]*"|\S+)""")
# Flags, and the settings that they are short for.
FLAGS = {
    "task": "task",
    "data-dir": "data-dir",
    "clients": "num-clients",
    "classes-per-client": "classes-per-client",
    "rounds": "num-server-rounds",
    "fraction": "fraction-train",
    "seed": "seed",
    "device": "device",
    "output": "output",
    "page": "page",
}


def parse(
    arguments: Sequence[str] | None, about: str | None = None
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parse the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Without the program's name; ``sys.argv`` by default.
    about : str, optional
        What ``--help`` says first.

    Returns
    -------
    namespace, given
        The arguments and the settings that are given.
    """
    parser = Parser(
        description=about,
        epilog=help_texts.epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "algorithms", nargs="*", metavar="ALGORITHM", help=help_texts.ALGORITHM
    )
    parser.add_argument("--backend", default="auto", help=help_texts.BACKEND)
    parser.add_argument(
        "--run-config",
        nargs="*",
        default=[],
        metavar="'k=v …'",
        help=help_texts.RUN_CONFIG,
    )
    parser.add_argument("--seeds", type=int, metavar="N", help=help_texts.SEEDS)
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help=help_texts.JOBS
    )
    parser.add_argument("--grid", default="", metavar="'k=v,v …'", help=help_texts.GRID)
    parser.add_argument("--list", action="store_true", help="what there is to run")
    parser.add_argument("--verbose", action="store_true", help="show Flower's own log")
    for flag, name in FLAGS.items():
        default = defaults()[name]
        parser.add_argument(
            f"--{flag}", type=type(default), help=help_texts.meaning(flag, default)
        )
    namespace = parser.parse_intermixed_args(arguments)
    given = {
        name: value
        for flag, name in FLAGS.items()
        if (value := getattr(namespace, flag.replace("-", "_"))) is not None
    }
    try:
        config = parse_config_args(namespace.run_config)
        # Flower passes over what it cannot read.
        lines = [line for line in namespace.run_config if not line.endswith(".toml")]
        rest = " ".join(PAIR.sub("", line) for line in lines).strip()
        if rest:
            raise ValueError(f"what is {rest!r}?")
    except Exception as error:
        raise SettingsError(
            f"--run-config {' '.join(namespace.run_config)!r} cannot be read: it must "
            f"be 'name=value …' or a TOML file ({error})"
        ) from None
    # Where both say something, it is the flag that counts.
    return namespace, {**config, **given}
