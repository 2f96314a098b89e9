r"""Run and compare algorithms on a task, and write the results.

FedAvg, FedRep and FLUTE on the bundled digits:
  python simulation.py
Two algorithms; http://127.0.0.1:8765/ shows the results during the run:
  python simulation.py fedrep local --clients 10 --rounds 20 --page 8765
Your own images, and settings that have no flag (docs/settings.md):
  python simulation.py fedrep --task image-folder --data-dir photos \
      --run-config 'image-size=32 head-epochs=5'
"""

import os
import sys
from collections.abc import Sequence

from rich.console import Console

from flwr_frl.arguments import parse
from flwr_frl.common.command_line import exit_code
from flwr_frl.common.run_cache import begin_run
from flwr_frl.results.processes import signals_as_ctrl_c
from flwr_frl.strategies.table import ALGORITHMS
from flwr_frl.task.names import MODELS, TASKS


def list_all() -> str:
    """Return the names of all algorithms, tasks and models, one per line."""
    lines = [f"algorithm  {n:<24} {about}" for n, (_, about) in ALGORITHMS.items()]
    lines += [f"task       {name}" for name in TASKS]
    lines += [f"model      {name:<14} {about}" for name, about in MODELS.items()]
    return "\n".join([*lines, "model      any classification model of torchvision"])


@signals_as_ctrl_c()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments without the program's name; ``sys.argv`` by default.

    Returns
    -------
    int
        0 on success, 2 for invalid input or results that could not be written, 3 if a
        run lost most replies of its last rounds, 130 if interrupted. Each failure
        prints one line to standard error.
    """
    # Custom tasks and algorithms are imported from here, as with `python -m`.
    sys.path.append(os.getcwd())
    begin_run()
    return exit_code(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    namespace, overrides = parse(arguments, __doc__)
    if namespace.list:
        Console().out(list_all(), highlight=False)
        return 0
    # Loads torch and Flower, which `--list` and `--help` do without.
    from flwr_frl.commands import execute

    return execute(namespace, overrides)
