"""The common part of both commands: options, output and one-line errors."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from flwr.common.config import parse_config_args

from flwr_frl.common.command_line import Parser
from flwr_frl.common.settings import SettingsError, TrainingDivergedError
from flwr_frl.predict.file_settings import FLAGS

Arguments = Sequence[str] | None


def parser_of(prog: str, description: str | None) -> Parser:
    """Return a parser with the options that both commands have."""
    parser = Parser(prog=prog, description=description, allow_abbrev=False)
    add = parser.add_argument
    add("--client-name", default="", help="as in the node config")
    add("--state-dir", default="", help="as in the node config")
    add("--data-dir", default="", help="the client's data")
    add("--task", default="", help="task, if it is custom or downloads its data")
    add("--algorithm", default="", help="algorithm, if it is package.module:Class")
    add(
        "--run-config",
        nargs="*",
        action="extend",
        default=[],
        metavar="'k=v ...'",
        help="other settings that a file alone cannot set, such as weights",
    )
    return parser


def named_in(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that options name; `SettingsError` if they are malformed."""
    try:
        named = parse_config_args(options.run_config)
    # Flower raises any exception of its TOML parser.
    except Exception:
        text = " ".join(options.run_config)
        message = f"run-config is {text!r}; expected 'name=value ...'"
        raise SettingsError(message, "run-config") from None
    flags = {name: getattr(options, name.replace("-", "_")) for name in FLAGS}
    return {**named, **{name: text for name, text in flags.items() if text}}


def show(line: str) -> None:
    """Print a line; names of files need not be valid Unicode."""
    text = line.encode("utf-8", "surrogateescape")
    print(text.decode("utf-8", "backslashreplace"))


def exit_code(command: Callable[[Arguments], None], arguments: Arguments) -> int:
    """Carry out a command; return 0, or 2 after printing a one-line error."""
    try:
        command(arguments)
        sys.stdout.flush()
    except (SettingsError, TrainingDivergedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # A reader such as `head` has closed the pipe. Without the redirection, flushing
        # the remaining output at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
