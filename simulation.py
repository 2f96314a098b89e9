"""Run algorithms on a task, compare them, write results.

``python simulation.py`` compares FedAvg with FedRep on the bundled digits.
"""

import argparse
import logging
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import Context, RecordDict
from flwr.common.config import parse_config_args
from rich.console import Console
from rich.table import Table

from strategies import (
    ALGORITHMS,
    SRPFL_BASES,
    STRATEGIES,
    Gossip,
    build_strategy,
    server_app,
)
from strategies.grids.simulation import InlineGrid, RayGrid
from strategies.server.checkpoint import Checkpoint
from task.settings import Setting, SettingsError, defaults, require, resolve, unknown

DEFAULT_ALGORITHMS = ("fedavg", "fedrep", "flute")
BACKENDS = ("ray", "inline")
# As in flwr.common.config.parse_config_args.
PAIR = re.compile(r"""\S+?=('[^']*'|"[^"]*"|\S+)""")


def simulate(settings: dict[str, Setting], backend: str = "ray") -> dict[str, Any]:
    """Run one algorithm in simulation.

    Parameters
    ----------
    settings : dict
        All settings.
    backend : {"ray", "inline"}, default "ray"
        ``ray`` uses all cores, ``inline`` this process alone; the numbers are the same.

    Returns
    -------
    dict
        The run's summary, as in ``summary.json``.
    """
    from clients.client_app import make_app

    num_clients = int(settings["num-clients"])
    # The workers run elsewhere.
    settings = {**settings, "output": str(Path(str(settings["output"])).resolve())}
    kind = RayGrid if backend == "ray" else InlineGrid
    grid = kind(make_app(settings), num_clients)
    return server_app.run(grid, settings, lambda: _take_over_clients(settings))


def _take_over_clients(settings: dict[str, Setting]) -> None:
    """Begin with the clients' personal states of the resumed run, or with none."""
    algorithm = str(settings["algorithm"])
    own = Path(str(settings["output"])) / algorithm / "clients"
    former = Path(str(settings["resume"])).resolve() / algorithm / "clients"
    if settings["resume"] and former == own:
        return
    shutil.rmtree(own, ignore_errors=True)
    if settings["resume"] and former.is_dir():
        shutil.copytree(former, own)


def check(algorithms: Sequence[str], settings: dict[str, Setting]) -> None:
    """Check everything that can be checked before a run, and decode the data.

    Parameters
    ----------
    algorithms : sequence of str
        What will run.
    settings : dict
        All settings.

    Raises
    ------
    SettingsError
        If something is unknown, missing or out of its range.
    """
    from clients.client_app import client_class, complete
    from clients.device.state import PersonalState
    from task.tasks.image import TASKS, build_task

    for algorithm in algorithms:
        if algorithm not in ALGORITHMS:
            raise unknown("algorithm", algorithm, ALGORITHMS)
    if settings["task"] not in TASKS:
        raise unknown("task", settings["task"], TASKS)
    server_app.check(settings)
    num_clients = int(settings["num-clients"])
    require(num_clients >= 1, "num-clients", num_clients, "at least 1")
    awaited = int(settings["min-available-nodes"])
    allowed = f"at most {num_clients}, the number of clients"
    require(awaited <= num_clients, "min-available-nodes", awaited, allowed)
    output = Path(str(settings["output"])).absolute()
    existing = next(path for path in (output, *output.parents) if path.exists())
    usable = existing.is_dir() and os.access(existing, os.W_OK)
    require(usable, "output", settings["output"], f"writable; {str(existing)!r} is not")
    for algorithm in algorithms:
        strategy = build_strategy({**settings, "algorithm": algorithm})
        strategy.sample(1, list(range(num_clients)))
        if isinstance(strategy, Gossip):
            strategy.build_graph(num_clients)
        if settings["resume"]:
            directory = Path(str(settings["resume"])) / algorithm
            Checkpoint.read(directory, {**settings, "algorithm": algorithm})
        own = complete({**settings, "algorithm": algorithm})
        nobody = PersonalState(Context(0, 0, {}, RecordDict(), {}))
        client = client_class(own)(build_task(own, num_clients), 0, nobody, own)
        client.get_properties({})


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parse the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Without the program's name; ``sys.argv`` by default.

    Returns
    -------
    namespace, settings
        The arguments and all settings.
    """
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("algorithms", nargs="*", metavar="ALGORITHM")
    parser.add_argument("--backend", default="ray", help="ray (default) or inline")
    parser.add_argument("--run-config", nargs="*", default=[], metavar="'k=v …'")
    parser.add_argument("--list", action="store_true", help="what there is to run")
    parser.add_argument("--verbose", action="store_true", help="show Flower's own log")
    flags = {
        "task": "task",
        "data-dir": "data-dir",
        "clients": "num-clients",
        "classes-per-client": "classes-per-client",
        "rounds": "num-server-rounds",
        "fraction": "fraction-train",
        "seed": "seed",
        "output": "output",
    }
    for flag, name in flags.items():
        default = defaults()[name]
        parser.add_argument(
            f"--{flag}", type=type(default), help=f"default {default!r}"
        )
    namespace = parser.parse_args(arguments)
    given = {
        name: value
        for flag, name in flags.items()
        if (value := getattr(namespace, flag.replace("-", "_"))) is not None
    }
    try:
        config = parse_config_args(namespace.run_config)
        # Flower passes over what it cannot read.
        lines = [line for line in namespace.run_config if not line.endswith(".toml")]
        rest = " ".join(PAIR.sub("", line) for line in lines).strip()
        if rest:
            raise ValueError(f"what is {rest!r}?")
    except Exception as error:
        raise SettingsError(
            f"--run-config {' '.join(namespace.run_config)!r} cannot be read: it must "
            f"be 'name=value …' or a TOML file ({error})"
        ) from None
    # Simulated clients do not come back: when none answers, none will.
    settings = resolve({"max-empty-rounds": 3, **config, **given})
    srpfl = any(name in SRPFL_BASES for name in namespace.algorithms)
    if srpfl and settings["speed-model"] == "none":
        # Here nobody is slow by itself; all are compared by the same clock.
        settings["speed-model"] = "fixed"
    if settings["resume"] and "output" not in {**config, **given}:
        settings["output"] = settings["resume"]
    return namespace, settings


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like all others here."""

    def error(self, message: str) -> NoReturn:
        """Raise the error.

        Parameters
        ----------
        message : str
            What is wrong.

        Raises
        ------
        SettingsError
            Always.
        """
        raise SettingsError(f"{message}; --help shows what is allowed")


def list_all() -> str:
    """Return the names of all algorithms, tasks and models, one a line.

    Returns
    -------
    str
        The lines.
    """
    from task.models import MODELS
    from task.tasks.image import TASKS

    lines = []
    for name in ALGORITHMS:
        if name in SRPFL_BASES:
            about = f"SRPFL (Tziotis et al., TMLR 2023) over {SRPFL_BASES[name]}."
        else:
            module = sys.modules[STRATEGIES[name].__module__]
            about = (module.__doc__ or "").splitlines()[0]
        lines.append(f"algorithm  {name:<14} {about}")
    lines += [f"task       {name}" for name in TASKS]
    lines += [f"model      {name:<14} {about}" for name, (_, about) in MODELS.items()]
    return "\n".join([*lines, "model      any classification model of torchvision"])


def show(
    summaries: dict[str, dict[str, Any]], output: object, console: Console
) -> None:
    """Print the final table.

    Parameters
    ----------
    summaries : dict
        By algorithm.
    output : object
        Where the files are.
    console : Console
        Where to print.
    """
    columns = {
        "accuracy": ("accuracy", "{:.2%}"),
        "accuracy-std-clients": ("std over clients", "{:.2%}"),
        "accuracy-global": ("not fine-tuned", "{:.2%}"),
        "distance": ("distance", "{:.4f}"),
        "error": ("error", "{:.4f}"),
        "consensus-distance": ("consensus distance", "{:.3g}"),
        "loss-point": ("cost", "{:.4g}"),
        "constraint": ("largest constraint", "{:.3g}"),
        "rounds": ("rounds", "{}"),
        "seconds": ("seconds", "{:.1f}"),
        "seconds-simulated": ("simulated", "{:.1f}"),
        "bits": ("Mbit of messages", "{:,.3f}"),
        "bytes": ("MB", "{:,.1f}"),
    }
    present = {
        name: column
        for name, column in columns.items()
        if any(name in summary for summary in summaries.values())
    }
    table = Table("algorithm", *(heading for heading, _ in present.values()))
    for algorithm, summary in summaries.items():
        summary = {**summary, "bytes": summary["bytes"] / 1e6}
        if "bits" in summary:
            summary["bits"] /= 1e6
        table.add_row(
            algorithm,
            *(
                form.format(summary[name]) if name in summary else ""
                for name, (_, form) in present.items()
            ),
        )
    console.print(table)
    console.print(f"metrics, clients, summary and plot: {output}", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Without the program's name; ``sys.argv`` by default.

    Returns
    -------
    int
        0, or 2 for bad input, after one line that says what is wrong.
    """
    console = Console()
    try:
        namespace, settings = parse(arguments)
        if namespace.list:
            print(list_all())
            return 0
        require(
            namespace.backend in BACKENDS, "backend", namespace.backend, "ray or inline"
        )
        if not namespace.verbose:
            logging.getLogger("flwr").setLevel(logging.WARNING)
        algorithms = list(dict.fromkeys(namespace.algorithms)) or DEFAULT_ALGORITHMS
        check(algorithms, settings)
        summaries = {
            algorithm: simulate({**settings, "algorithm": algorithm}, namespace.backend)
            for algorithm in algorithms
        }
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(summaries, settings["output"], console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
