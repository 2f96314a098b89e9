"""The command ``flwr-frl``, which answers ``--list`` before it loads anything else."""

import sys
from collections.abc import Sequence

from flwr_frl.listing import show_list


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, as `flwr_frl.cli.main`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--list"]:
        show_list()
        return 0
    from flwr_frl.cli import main as run

    return run(arguments)
