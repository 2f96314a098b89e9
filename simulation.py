"""Run the command line from a checkout: ``python simulation.py`` is ``flwr-frl``."""

import sys

from flwr_frl.cli import main

if __name__ == "__main__":
    sys.exit(main())
