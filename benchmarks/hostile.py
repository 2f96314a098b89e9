"""Test the robustness against hostile replies, hostile messages and kills.

No client may end a run, and nothing that was learned may be lost. The script tests the
given number of cases of each kind, writes ``results/hostile`` and exits with 1 if any
case failed. The harness is in ``tests/hostile``; the tests run a small part of it.

``python -m benchmarks.hostile --replies N --messages N --kills N --seed S``
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import markdown, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "hostile"))

SHOWN = 20


def main() -> int:
    """Run all cases and write the page; return 1 if any case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replies", type=int, default=80_000)
    parser.add_argument("--messages", type=int, default=6_000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--secure", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    import kills
    import messages
    import replies
    import secure

    logging.getLogger("flwr").setLevel(logging.CRITICAL + 1)
    seed = arguments.seed
    rows, data, fell = [], {}, 0
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Callable[[int, Path], replies.Outcome]] = {
            "replies": lambda n, _: replies.run(n, seed),
            "messages": lambda n, root: messages.run(n, seed, root),
            "kills": lambda n, root: kills.run(n, seed, root),
            "secure": lambda n, _: secure.run(n, seed),
        }
        for name, run in parts.items():
            number = getattr(arguments, name)
            root = Path(folder) / name
            root.mkdir()
            began = time.process_time()
            outcome = run(number, root) if number else replies.Outcome()
            seconds = time.process_time() - began
            print(f"{name}: {outcome.tried:,} tried, {len(outcome.fell)} fell")
            print("\n".join(outcome.fell[:SHOWN]))
            counts = (f"{n:,}" for n in (outcome.tried, outcome.refused))
            rows.append([name, *counts, len(outcome.fell), f"{seconds:.0f}"])
            data[name] = {
                "tried": outcome.tried,
                "refused": outcome.refused,
                "fell": outcome.fell[:SHOWN],
            }
            fell += len(outcome.fell)
    body = (
        "*Replies* are sent by one of five clients to each strategy, in training, in "
        "evaluation and in answer to the initial query; in some runs two clients come "
        "and go under changing names. *Messages* are sent to each "
        "algorithm's client, which has saved the state of two rounds. *Kills* are "
        "`kill -9` of a simulation, which is then resumed until its end. *Secure* are "
        "runs of four rounds with secure aggregation, in which one of five clients "
        "corrupts replies of all steps; such a run failed if it lost more than one "
        "round, or more than one other client. A reply "
        "*failed* the test if it raised an exception, ended the run, caused a state "
        "or a metric that is not finite, was not logged in one line, kept an honest "
        "client out, or was rejected but changed the result of the honest clients. A "
        "message failed if it raised "
        "anything but a one-line error, took more than 20 s, lost or damaged a head, "
        "or wrote a file outside of the allowed folders. A kill failed if the "
        "numbers differ from those of an undisturbed run.\n\n"
    ) + markdown(["", "tried", "rejected", "failed", "CPU s"], rows)
    write("hostile", "Hostile replies, messages and kills", body, data)
    return 1 if fell else 0


if __name__ == "__main__":
    sys.exit(main())
