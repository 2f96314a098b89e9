"""Command lines whose errors are one line, like all others here."""

import argparse
from typing import NoReturn

from flwr_frl.task.settings import SettingsError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises a `SettingsError` where others print and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        raise SettingsError(f"{message}; --help shows what is allowed")
