"""Count the files and functions that one FedRep round passes through, in one process.

``python -m benchmarks.one_round`` runs three rounds with one client, and prints the
functions that the second round calls, in the order of their first calls.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from flwr_frl import simulate
from flwr_frl.strategies.server import loop as runner

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("strategies", "clients", "task", "flwr_frl")


def functions_of_a_round() -> list[tuple[str, str]]:
    """Return the (file, function) pairs of our code that a round calls, in order."""
    calls: dict[tuple[str, str], None] = {}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT):
                name = path.relative_to(ROOT).as_posix()
                function = frame.f_code.co_qualname
                # Comprehensions and generator expressions are part of a function.
                if name.startswith(PACKAGES) and "<" not in function.split(".")[-1]:
                    calls[name, function] = None

    original = runner.run_rounds

    def profiled(
        strategy: Any, grid: Any, arrays: Any, rounds: range, **more: Any
    ) -> Any:
        # Only the second round is profiled: the first one builds and checks everything,
        # and the last one writes a checkpoint.
        arrays = original(strategy, grid, arrays, rounds[:1], **more)
        sys.setprofile(profile)
        try:
            arrays = original(strategy, grid, arrays, rounds[1:2], **more)
        finally:
            sys.setprofile(None)
        return original(strategy, grid, arrays, rounds[2:], **more)

    runner.run_rounds = profiled
    try:
        with tempfile.TemporaryDirectory() as output:
            simulate(
                "fedrep",
                "inline",
                rounds=3,
                clients=10,
                fraction=0.1,
                evaluate_every=0,
                evaluate_last=0,
                cohort="off",
                output=output,
            )
    finally:
        runner.run_rounds = original
    return list(calls)


def main() -> int:
    """Print the counts and the list."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    calls = functions_of_a_round()
    for name, function in calls:
        print(f"{name:<44} {function}")
    print(f"{len({name for name, _ in calls})} files, {len(calls)} functions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
