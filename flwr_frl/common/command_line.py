"""Argument parsing with one-line errors."""

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from flwr_frl.common.errors import SettingsError, TrainingDivergedError
from flwr_frl.common.settings import Setting

# A pair ``name=value``, as in Flower's `parse_config_args`.
PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `SettingsError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise `SettingsError` with the parser's message."""
        raise SettingsError(f"{message}; see --help", "command-line")


def exit_code(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; print each failure as one line."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # A reader such as `head` has closed the pipe. Without the redirection, flushing
        # the remaining output at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    # The system's errors name the file, or the size of the array.
    except (SettingsError, TrainingDivergedError, OSError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def shorten_errors() -> None:
    """Let Flower log invalid input and errors of files without their traceback."""
    # A filter is not added twice.
    logging.getLogger("flwr").addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, SettingsError | OSError):
        record.exc_info, record.args = None, ()
        record.msg = f"error: {error}"
    return True


def run_config(texts: list[str]) -> dict[str, Setting]:
    """Parse ``--run-config`` as ``flwr run`` does: pairs, or one TOML file."""
    from click import ClickException
    from flwr.common.config import parse_config_args

    is_file = len(texts) == 1 and texts[0].endswith(".toml")
    try:
        values: dict[str, Setting] = parse_config_args(texts)
        # Flower ignores text that is not a pair.
        is_read = is_file or not PAIR.sub("", " ".join(texts)).strip()
        # TOML reads the backslash of "C:\temp" and the letter after it as a tabulator.
        if is_read and all(str(value).isprintable() for value in values.values()):
            return values
    except (OSError, ValueError, ClickException):
        pass
    raise SettingsError(
        f"--run-config {' '.join(texts)!r} cannot be read; expected a TOML file, "
        "or pairs as in 'seed=1 model=\"mlp\"', with / in paths",
        "run-config",
    )
