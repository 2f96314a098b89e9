"""Serve a page that shows the runs of a results folder.

``python -m flwr_frl.results.page results`` serves it at
http://127.0.0.1:8765/, with curves of all runs and a table of their clients. The page
is read-only and updates itself. By default only this machine can reach it; from another
machine, use ``ssh -L 8765:127.0.0.1:8765 SERVER``.
"""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from flwr_frl.common.command_line import Parser, exit_code
from flwr_frl.common.settings import require
from flwr_frl.results.page.serving import LOOPBACK, PageServer

PORT = 8765


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after printing one line for invalid input."""
    return exit_code(lambda: _serve(arguments))


def _serve(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m flwr_frl.results.page", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the results folder")
    text = "the port to listen on (default %(default)s); 0 picks a free port"
    parser.add_argument("--port", type=int, default=PORT, metavar="PORT", help=text)
    text = "the address to listen on (default %(default)s); 0.0.0.0 is all addresses"
    parser.add_argument("--host", default=LOOPBACK, help=text)
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    require(folder.is_dir(), "DIR", str(folder), "a folder of results")
    server = PageServer(folder, options.port, options.host)
    print(f"{server.url} shows {folder}; stop with Ctrl-C", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
