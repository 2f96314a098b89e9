"""Several methods in one process do not affect each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from command_line import assert_same_rows, rows_of

from flwr_frl import simulate

METHODS = ("scaffold", "multi-task", "fedrep", "squarm-sgd", "flute", "dpsgd", "apfl")


def rows_of_each(methods: Sequence[str], output: Path) -> dict[str, list[Any]]:
    quick = {"num_clients": 10, "rounds": 3, "fraction": 1.0, "local_steps": 2}
    simulate(list(methods), backend="inline", output=output, **quick)
    return {name: rows_of(output, name) for name in methods}


def test_results_do_not_depend_on_the_order_of_the_methods(tmp_path):
    first = rows_of_each(METHODS, tmp_path / "first")
    second = rows_of_each(METHODS[::-1], tmp_path / "second")
    for name in METHODS:
        assert_same_rows(first[name], second[name], within=0)
