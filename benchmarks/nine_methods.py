"""FedRep compared with eight other methods by the product's own commands.

``python -m benchmarks.nine_methods --data-dir DATA`` runs the commands of `COMMANDS`
one after another and writes ``results/nine_methods.md`` with their tables and figures.
Commands whose results are in the output folder are not repeated. DATA is torchvision's
root with MNIST; its folder ``natural`` has the data of ``natural_tasks.py``.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, markdown, provenance, write
from flwr_frl import compare
from flwr_frl.results.methods import Comparison, MethodResult
from flwr_frl.results.results import read_json, write_json

NAME = "nine_methods"
ROOT = Path(__file__).resolve().parents[1]
# File that a finished command leaves in its folder
DONE = "done.json"
METHODS = "fedrep fedavg fedavg-ft fedper lg-fedavg ditto apfl flute local"
EVERY = "learning-rate=0.05 evaluate-every=5 evaluate-last=1"
MNIST = f'{METHODS} --task mnist --data-dir DATA --run-config \'{EVERY} model="mlp"'
NATURAL = f"{METHODS} --data-dir DATA/natural --task benchmarks.natural_tasks"
# The folder of each task and the command that fills it
COMMANDS = {
    "mnist-shards": f"{MNIST} client-examples=50' --rounds 20",
    "mnist-dirichlet": (
        f'{MNIST} client-examples=50 partition="dirichlet" dirichlet-alpha=0.3\' '
        "--rounds 20"
    ),
    "digits": f"{METHODS} --rounds 20 --run-config '{EVERY}'",
    "people": (
        f"{NATURAL}:wisdm --clients 36 --rounds 30 --run-config '{EVERY} batch-size=16'"
    ),
    "speakers": (
        f"{NATURAL}:speech --clients 6 --fraction 1 --rounds 15 "
        f"--run-config '{EVERY} batch-size=16'"
    ),
    "hospitals": (
        f"{NATURAL}:heart --clients 4 --fraction 1 --rounds 30 "
        f"--run-config '{EVERY} batch-size=16'"
    ),
}
COMPARE = f"compare {' '.join(COMMANDS)} --baseline fedrep --output paper"
TEXT = """
The comparison that a paper would print, made by the commands below in a checkout:
FedRep and eight other methods on six tasks, five seeds each. In three tasks the clients
are real ones: 36 people whose activity is recognised (WISDM), six speakers of digits,
and four hospitals (`benchmarks/natural_tasks.py`). MNIST is divided over 20 clients
with at most 50 training examples each and their part of all test images, either into
shards (about two digits a client) or by a Dirichlet distribution with concentration
0.3; the bundled digits are divided into shards. All methods have the learning rate
0.05, and their other settings have the defaults: nothing was tuned. The result is the
accuracy on the clients' test examples after the last round, because FedAvg-FT is tested
only then.
"""


def commands() -> list[str]:
    """Return the arguments of all commands, as on the page."""
    runs = [f"{c} --seeds 5 --output {folder}" for folder, c in COMMANDS.items()]
    return [*runs, COMPARE]


def carry_out(output: Path, data: Path) -> None:
    """Run the commands whose results are missing, and note their commit and time."""
    output.mkdir(parents=True, exist_ok=True)
    for command in commands():
        words = shlex.split(command)
        done = output / words[-1] / DONE
        if words[0] != "compare" and done.is_file():
            continue
        began = time.perf_counter()
        words = [word.replace("DATA", str(data)) for word in words]
        program = [sys.executable, str(ROOT / "simulation.py"), *words]
        print(shlex.join(program), flush=True)
        subprocess.run(program, cwd=output, check=True)
        seconds = round(time.perf_counter() - began)
        write_json(done, {"commit": provenance()["commit"], "seconds": seconds})


def row_of(row: MethodResult) -> list[str]:
    """Return a row of a task's table."""
    entries = row.entries
    result = f"{100 * float(entries['accuracy']):.2f}"
    deviation = f"{100 * float(entries['accuracy-std-seeds']):.2f}"
    worst = f"{100 * float(entries['accuracy-worst-decile']):.1f}"
    names = "difference", "effect", "wins/ties/losses", "p"
    tests = [str(entries.get(name, "")) for name in names]
    return [f"`{row.method}`", f"{result} ± {deviation}", worst, *tests]


def body_of(comparison: Comparison, output: Path) -> str:
    """Return the page below its heading."""
    lines = "\n".join(f"flwr-frl {command}" for command in commands())
    parts = [TEXT, f"```sh\n{lines}\n```"]
    heads = ["method", "accuracy (%)", "worst tenth", "difference", "effect"]
    heads += ["wins/ties/losses", "p"]
    for name, rows in comparison.tasks.items():
        parts += [f"## {name}", markdown(heads, [row_of(row) for row in rows])]
    parts += ["## Mean ranks", str(comparison.ranking), f"![ranks]({NAME}-ranks.svg)"]
    table = (output / "paper" / "table.tex").read_text(encoding="utf-8")
    parts += ["## The table for LaTeX", f"```latex\n{table.strip()}\n```"]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def data_of(comparison: Comparison, output: Path) -> dict[str, Any]:
    """Return the numbers of the page."""
    tasks = {
        name: {
            row.method: {
                "accuracy": row.result,
                "seeds": list(row.seeds.values()),
                "p": row.on_clients.p if row.on_clients else None,
                "difference": row.on_clients.difference if row.on_clients else 0.0,
            }
            for row in rows
        }
        for name, rows in comparison.tasks.items()
    }
    done = [read_json(output / folder / DONE) for folder in COMMANDS]
    return {
        "commits": sorted({each["commit"] for each in done}),
        "seconds": sum(each["seconds"] for each in done),
        "tasks": tasks,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("results") / NAME)
    options = parser.parse_args()
    output = options.output.absolute()
    carry_out(output, options.data_dir.absolute())
    comparison = compare(*(output / name for name in COMMANDS), baseline="fedrep")
    shutil.copy(output / "paper" / "ranks.svg", RESULTS / f"{NAME}-ranks.svg")
    data = data_of(comparison, output)
    commits = f"Runs are at commits {', '.join(data['commits'])}."
    body = f"{body_of(comparison, output)}\n{commits}\n"
    write(NAME, "FedRep and eight other methods", body, data)


if __name__ == "__main__":
    main()
