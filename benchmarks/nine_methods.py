"""FedRep compared with eight other methods by the product's own commands.

``python -m benchmarks.nine_methods --data-dir DATA`` runs the commands of
``nine_methods.toml`` and writes ``results/nine_methods.md`` with a table of each.
Commands whose results are in the output folder are not repeated. DATA is torchvision's
root with MNIST; its folder ``natural`` has the data of ``natural_tasks.py``.
"""

import argparse
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.common import markdown, provenance, write
from flwr_frl import compare
from flwr_frl.results.methods import Comparison
from flwr_frl.results.results import read_json, write_json
from flwr_frl.results.tables import cells

NAME = "nine_methods"
ROOT = Path(__file__).resolve().parents[1]
# File that a finished command leaves in its folder
DONE = "done.json"
# Columns that the page leaves out; times were measured on a busy machine
LEFT_OUT = {"seconds", "accuracy-global", "alpha", "accuracy-std-clients"}


def carry_out(command: str, output: Path, data: Path) -> None:
    """Run a command of ``flwr-frl``, and note its commit."""
    words = [word.replace("DATA", str(data)) for word in shlex.split(command)]
    done = output / words[-1] / DONE
    if done.is_file():
        return
    print(command, flush=True)
    program = [sys.executable, str(ROOT / "simulation.py"), *words]
    subprocess.run(program, cwd=output, check=True)
    write_json(done, {"commit": provenance()["commit"]})


def body_of(config: dict[str, Any], comparisons: dict[str, Comparison]) -> str:
    """Return the page below its heading."""
    commands = [*config["runs"].values(), config["compare"]]
    lines = "\n".join(f"flwr-frl {command}" for command in commands)
    parts = [config["text"], f"```sh\n{lines}\n```"]
    for name, comparison in comparisons.items():
        entries = {
            row.method: {n: v for n, v in row.entries.items() if n not in LEFT_OUT}
            for row in comparison.rows
        }
        heads, *rows = cells(entries)
        parts += [f"## {name}", markdown(heads, rows), comparison.legend]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("results") / NAME)
    options = parser.parse_args()
    output, data = options.output.absolute(), options.data_dir.absolute()
    output.mkdir(parents=True, exist_ok=True)
    config = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    folders = [output / name for name in config["runs"]]
    for command in config["runs"].values():
        carry_out(command, output, data)
    comparisons = {each.name: compare(each, baseline="fedrep") for each in folders}
    commits = sorted({read_json(folder / DONE)["commit"] for folder in folders})
    body = body_of(config, comparisons)
    body += f"\nRuns are at commits {', '.join(commits)}.\n"
    tasks: dict[str, Any] = {}
    for name, comparison in comparisons.items():
        for row in comparison.rows:
            test = {"p": row.on_clients.p} if row.on_clients else {}
            numbers = {
                "accuracy": row.result,
                "seeds": list(row.seeds.values()),
                **test,
            }
            tasks.setdefault(name, {})[row.method] = numbers
    write(NAME, "FedRep and eight other methods", body, {"tasks": tasks})


if __name__ == "__main__":
    main()
