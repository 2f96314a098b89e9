"""The commands of the command line: compare algorithms, or tune their settings."""

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from flwr_frl.common.settings import Settings, SettingsError, defaults, require
from flwr_frl.results.methods import compare
from flwr_frl.results.page import served_for
from flwr_frl.results.processes import counted
from flwr_frl.results.results import failure
from flwr_frl.results.search import Space, space_of
from flwr_frl.results.sweep import TUNED, Sweep, have_begun, tune
from flwr_frl.results.tables import DETAILS, cells, legend, terminal
from flwr_frl.running import carry_out, hidden_info, output_of, sweep_of

DEFAULT_ALGORITHMS = ("fedavg", "fedrep", "flute")


def execute(namespace: Namespace, overrides: Settings) -> int:
    """Make the runs that a command line asks for, and show their results.

    Parameters
    ----------
    namespace : Namespace
        The arguments.
    overrides : mapping
        The settings among them.

    Returns
    -------
    int
        0 on success, 2 if an algorithm has no results, 3 if a run lost most replies of
        its last rounds, 130 if interrupted.

    Raises
    ------
    SettingsError
        If something is invalid, or results could not be written.
    """
    backend, jobs = namespace.backend, namespace.jobs
    valid = jobs == 1 or (jobs > 1 and backend != "ray")
    allowed = "at least 1, and 1 with ray, which uses all cores for each run"
    require(valid, "jobs", jobs, allowed)
    backend = "inline" if jobs > 1 else backend
    output, tuning = output_of(overrides), namespace.command == "tune"
    overrides = {**overrides, "output": output}
    chosen = overrides.get("algorithm")
    default = [str(chosen)] if chosen else [*DEFAULT_ALGORITHMS]
    algorithms = list(dict.fromkeys(namespace.algorithms)) or default

    sweep = sweep_of(algorithms, backend, namespace.seeds, jobs)
    summaries: Mapping[str, Any]
    errors = list[SettingsError]()
    try:
        with nullcontext() if namespace.verbose else hidden_info():
            if tuning:
                space = space_of(" ".join(namespace.grid), namespace.trials)
                summaries = _tune(algorithms, space, overrides, sweep)
            else:
                runs, errors = carry_out(algorithms, overrides, sweep)
                summaries = {name: run.summary for name, run in runs.items()}
    except KeyboardInterrupt:
        hint = f"; continue with --run-config 'resume=\"{output}\"'"
        begun = tuning or have_begun(Path(output), algorithms)
        print(f"interrupted{hint if begun else ''}", file=sys.stderr)
        return 130
    if tuning:
        text = terminal(cells(summaries, "test", DETAILS)) + legend(summaries, "test")
        files = TUNED
    else:
        # Runs have resolved the folder, too.
        text = str(compare(Path(output).resolve()))
        files = "metrics, clients, summary, table and figures"
    print(text)
    Console().print(f"{files}: {output}", soft_wrap=True, markup=False)
    # Failures are printed last.
    sys.stdout.flush()
    reasons = [failure(name, summary) for name, summary in summaries.items()]
    for reason in filter(None, [*reasons, *errors]):
        print(f"error: {reason}", file=sys.stderr)
    return 2 if errors else 3 if any(reasons) else 0


def _tune(
    algorithms: Sequence[str], space: Space, overrides: Settings, sweep: Sweep
) -> dict[str, Any]:
    """Tune algorithms on a grid and return the summaries of the best points."""
    former, output = str(overrides.get("resume", "")), Path(str(overrides["output"]))
    exists = not former or Path(former).is_dir()
    require(exists, "resume", former, "a folder of results")
    # Each algorithm also has a test run of its best point.
    num_runs = len(algorithms) * (space.budget + 1) * (sweep.count or 1)
    with served_for({**defaults(), **overrides}), counted(num_runs):
        tuned = tune(algorithms, space, overrides, output.resolve(), sweep)
    print(f"each algorithm has a budget of {space.budget} points")
    for name, entry in tuned.items():
        picked = " ".join(f"{n}={value}" for n, value in entry["picked"].items())
        print(f"{name}: {picked} is the best of {len(entry['points'])} points")
        for setting, edge in entry["at-edge"].items():
            value = entry["picked"][setting]
            text = f"{setting}={value} is the {edge} of the grid; try values beyond it"
            print(f"{name}: {text}")
    return {name: entry["test"] for name, entry in tuned.items()}
