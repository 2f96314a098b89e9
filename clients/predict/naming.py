"""Options by which a user names settings that a file alone cannot set."""

import argparse

from flwr.common.config import parse_config_args

from flwr_frl.task.settings import Settings, SettingsError


def name_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--task",
        default="",
        help="the task, if it is package.module:function or downloads its data",
    )
    parser.add_argument(
        "--algorithm", default="", help="the algorithm, if it is package.module:Class"
    )
    parser.add_argument(
        "--run-config",
        nargs="*",
        default=[],
        metavar="'k=v ...'",
        help="other settings that a file alone cannot set, weights or cache-dir say",
    )


def named_in(options: argparse.Namespace) -> Settings:
    """Return the settings in ``--run-config``; `SettingsError` if it is none."""
    text = options.run_config
    try:
        return dict(parse_config_args(text))
    # Flower raises whatever a reader of TOML does.
    except Exception as error:
        raise SettingsError(
            f"run-config {' '.join(text)!r} cannot be read: it must be 'name=value ...'"
        ) from error
