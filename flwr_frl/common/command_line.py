"""Argument parsing with one-line errors."""

import argparse
import re
from typing import Any, NoReturn

from flwr_frl.common.settings import SettingsError

# A pair ``name=value``, as in flwr.common.config.parse_config_args.
PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `SettingsError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise `SettingsError` with the parser's message."""
        raise SettingsError(f"{message}; see --help", "command-line")


def run_config(texts: list[str]) -> dict[str, Any]:
    """Parse the values of ``--run-config``: pairs, and TOML files."""
    # Takes long to import, and is not needed for `--help`.
    from flwr.common.config import parse_config_args

    pairs = " ".join(text for text in texts if not text.endswith(".toml"))
    try:
        # Flower ignores text that is not a pair.
        if PAIR.sub("", pairs).strip():
            raise ValueError
        return parse_config_args(texts)
    except Exception:
        raise SettingsError(
            f"--run-config {' '.join(texts)!r} cannot be read; expected a TOML file, "
            "or pairs as in 'seed=1 model=\"mlp\"'",
            "run-config",
        ) from None
