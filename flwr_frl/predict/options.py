"""Command-line options for settings that a file alone cannot set."""

import argparse

from flwr.common.config import parse_config_args

from flwr_frl.common.settings import Settings, SettingsError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--task``, ``--algorithm`` and ``--run-config`` to a parser."""
    add = parser.add_argument
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


def named_in(options: argparse.Namespace) -> Settings:
    """Parse ``--run-config``; `SettingsError` if it is not ``name=value ...``."""
    text = options.run_config
    try:
        return dict(parse_config_args(text))
    # Flower raises any exception of its TOML parser.
    except Exception as error:
        raise SettingsError(
            f"run-config {' '.join(text)!r} cannot be read: it must be 'name=value ...'"
        ) from error
