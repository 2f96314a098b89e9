"""Argument parsing with one-line errors."""

import argparse
from typing import NoReturn

from flwr_frl.common.settings import SettingsError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `SettingsError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise `SettingsError` with the parser's message."""
        raise SettingsError(f"{message}; see --help", "command-line")
