"""The arguments of ``python simulation.py`` and their help."""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

from flwr_frl.common.command_line import Parser
from flwr_frl.common.settings import (
    TYPES,
    SettingsError,
    defaults,
    require,
    similar,
)
from flwr_frl.strategies.table import ALGORITHMS

# A pair ``name=value``, as in flwr.common.config.parse_config_args.
PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")
COMMA = "settings are separated by spaces, not by commas"
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
        same setting in ``--run-config``, and a later ``--run-config`` over an earlier
        one, so that the hint of Ctrl-C can be appended to the command.

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
        add(f"--{flag}", type=type(default), help=text.replace("%", "%%"))
    namespace, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        flags = parser._option_string_actions
        words = sys.argv if arguments is None else arguments
        following = words[words.index(unknown[0]) + 1 :]
        message = _unknown_flag(unknown[0], following, flags)
        raise SettingsError(message, "command-line")
    for name in namespace.algorithms:
        allowed = "names separated by spaces"
        require("," not in name, "algorithm", name, allowed)
    by_flag = {
        name: value
        for flag, name in FLAGS.items()
        if (value := getattr(namespace, flag.replace("-", "_"))) is not None
    }
    namespace.grid = " ".join(namespace.grid)
    given = dict[str, Any]()
    for texts in namespace.run_config:
        given |= _run_config(texts)
    return namespace, given | by_flag


def _unknown_flag(text: str, following: Sequence[str], flags: Iterable[str]) -> str:
    """Return the message about an argument that is not in ``flags``."""
    name, _, value = text.lstrip("-").replace("_", "-").partition("=")
    if not value and following and not following[0].startswith("-"):
        value = following[0]
    line = f"unknown argument {text!r}; "
    if name in FLAGS.values():
        return f"{line}use --{next(f for f in FLAGS if FLAGS[f] == name)}"
    if near := similar(name, (flag.lstrip("-") for flag in flags)):
        return f"{line}did you mean --{near[0]}?"
    pairs = []
    for setting in [name] if name in defaults() else similar(name, defaults()):
        default, shown = defaults()[setting], value or "VALUE"
        shown = json.dumps(shown) if isinstance(default, str) else shown
        pairs.append(f"--run-config '{setting}={shown}'")
    if pairs:
        return f"{line}did you mean {' or '.join(pairs)}?"
    return f"{line}settings without a flag are set with --run-config 'name=value'"


def _run_config(texts: list[str]) -> dict[str, Any]:
    # Takes long to import, and is not needed for `--help`.
    from flwr.common.config import parse_config_args

    lines = [line for line in texts if not line.endswith(".toml")]
    try:
        if reason := _invalid_pair(lines):
            raise ValueError(reason)
        return parse_config_args(texts)
    except Exception as error:
        raise SettingsError(
            f"--run-config {' '.join(texts)!r} cannot be read: {error}", "run-config"
        ) from None


def _invalid_pair(lines: Sequence[str]) -> str:
    """Return why some text is not a sequence of ``name=value``; "" if it is one."""
    # Flower ignores text that is not a pair.
    rest = " ".join(" ".join(PAIR.sub("", line) for line in lines).split())
    if "=" in rest:
        return f"{rest!r} must be name=value, without spaces around ="
    if rest:
        return (
            f"{rest!r} is not name=value; quote all settings together, as in "
            "--run-config 'name=value name=value', and write algorithms before it"
        )
    names = set[str]()
    for name, value in (pair for line in lines for pair in PAIR.findall(line)):
        if name in names:
            return f"{name} is set twice"
        names.add(name)
        try:
            tomllib.loads(f"value = {value}")
        except tomllib.TOMLDecodeError:
            return _invalid_value(name, value)
        if name.startswith(","):
            return COMMA
    return ""


def _invalid_value(name: str, value: str) -> str:
    kind = type(defaults().get(name, ""))
    if value.endswith(",") or re.search(r",[\w-]+=", value):
        return COMMA
    if value[0] in "'\"":
        return f"the quote in {name}={value} is not closed"
    if kind is str:
        return f"{name} is {value} without quotes; write '{name}=\"{value}\"'"
    return f"{name} is {value!r}; expected {TYPES[kind]}"


def _epilog() -> str:
    width = max(map(len, ALGORITHMS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in ALGORITHMS.items()]
    listed = "\n".join(lines)
    return f"algorithms, or package.module:Class:\n{listed}\n\n{EXAMPLES}"
