"""Run the command line in this process, and check its errors and its files."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from named_tasks import dashed
from refusals import refusal

from flwr_frl import cli
from flwr_frl.cli import parse
from flwr_frl.results.report import Report
from flwr_frl.results.results import read_rows
from flwr_frl.running import execute

ROOT = Path(__file__).parents[2]
# Algorithms with personal parameters, and settings for quick rounds
PERSONAL = ("fedrep", "fedper", "local", "flute", "srpfl")
STEADY = {"evaluate_every": 1, "head_epochs": 1, "learning_rate": 0.1}
STEADY |= {"batch_size": 150, "num_clients": 5, "model": "mlp-2"}


def run(output: Path, *arguments: str, **overrides) -> int:
    """Run the command line in this process; keyword arguments are settings."""
    words = [*arguments, "--backend", "inline", "--output", str(output)]
    return cli.main([*words, *config_of(overrides)])


def config_of(settings: Mapping[str, object]) -> tuple[str, ...]:
    names = dashed(settings).items()
    text = " ".join(f"{name}={json.dumps(value)}" for name, value in names)
    return config(text) if text else ()


class Killed(BaseException):
    """Simulates kill -9: nothing is written afterwards."""


def die_in(
    patched: pytest.MonkeyPatch,
    server_round: int,
    death: Callable[[], BaseException] = Killed,
) -> None:
    """Make runs die in a round, before its row is written."""
    add = Report.add

    def die(report: Report, row: dict, clients: dict) -> None:
        if row["round"] == server_round:
            raise death()
        add(report, row, clients)

    patched.setattr(Report, "add", die)


def rows_of(output: Path, algorithm: str = "fedrep") -> list[dict]:
    return read_rows(output / algorithm / "metrics.jsonl")


def json_of(path: Path) -> dict:
    return json.loads(path.read_text())


def assert_same_rows(found: list[dict], expected: list[dict], within: float) -> None:
    assert [row["round"] for row in found] == [row["round"] for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for name in row.keys() - {"seconds"}:
            assert row[name] == pytest.approx(other[name], rel=0, abs=within), name


def config(text: str) -> tuple[str, str]:
    return ("--run-config", text)


def tree(root: Path) -> set[str]:
    # Python may write bytecode of imported modules.
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if "__pycache__" not in path.parts
    }


def cases(table: str) -> list:
    """Return the arguments and the expected errors in the lines of a table."""
    parameters = []
    for line in filter(None, table.splitlines()):
        case, expected = line.split(" => ")
        flags, settings, text = case.partition("@ ")
        arguments = [*shlex.split(flags), *(config(text) if settings else ())]
        parameters.append(pytest.param(arguments, expected, id=case))
    return parameters


def assert_refused(arguments: Sequence[str], expected: str, root: Path) -> None:
    """Check that a command raises a one-line error and writes nothing.

    ``expected`` is the code of the error or, after ``~``, a part of its message.
    """
    before, command = tree(root), list(arguments)
    defaults = {"--output": "out", "--backend": "inline", "--rounds": "1"}
    for flag, value in defaults.items():
        command += [] if flag in command else [flag, value]
    error = refusal(lambda: execute(*parse(command)))
    if expected.startswith("~"):
        assert expected[1:] in str(error)
    else:
        assert error.code == expected, str(error)
    # Not even a directory was created.
    assert tree(root) == before


def one_error(printed: str) -> str:
    """Return the line of an error, which must be all that was printed."""
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1, printed
    return printed
