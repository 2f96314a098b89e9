"""Argument parsing with one-line errors."""

import argparse
from functools import partial
from typing import Any, NoReturn

from flwr_frl.common.settings import TYPES, SettingsError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `SettingsError` instead of exiting."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take the arguments of `ArgumentParser`."""
        super().__init__(*arguments, **options)
        self.register("type", int, partial(_converted, int))
        self.register("type", float, partial(_converted, float))

    def error(self, message: str) -> NoReturn:
        """Raise `SettingsError` with the parser's message."""
        for text in ("expected one argument", "expected at least one argument"):
            message = message.replace(text, "expected a value")
        raise SettingsError(f"{message}; see --help", "command-line")


def _converted(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        error = f"expected {TYPES[kind]}, not {text!r}"
        raise argparse.ArgumentTypeError(error) from None
