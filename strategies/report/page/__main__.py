"""Serve a page over a results folder, while runs go on and afterwards.

``python -m flwr_frl.strategies.report.page results`` shows at http://127.0.0.1:8765/
the curves of all runs in the folder and a table of their clients, and brings itself up
to date. Nothing can be changed by it. Without ``--host`` nobody but this machine sees
it: from elsewhere, ``ssh -L 8765:127.0.0.1:8765 SERVER`` brings it to your own.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from flwr_frl.strategies.report.page.serving import LOOPBACK, PageServer
from flwr_frl.task.command_line import Parser
from flwr_frl.task.settings import SettingsError

PORT = 8765


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 after one line that says what is wrong."""
    parser = Parser(
        prog="python -m flwr_frl.strategies.report.page",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a results folder")
    parser.add_argument(
        "--port",
        type=int,
        default=PORT,
        metavar="PORT",
        help=f"default {PORT}; 0 takes a free one",
    )
    text = f"the address to listen on; default {LOOPBACK}, 0.0.0.0 is all there are"
    parser.add_argument("--host", default=LOOPBACK, help=text)
    try:
        options = parser.parse_args(arguments)
        if not options.folder.is_dir():
            raise SettingsError(f"there is no folder {str(options.folder)!r}")
        server = PageServer(options.folder, options.port, options.host)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{server.url} shows {options.folder.absolute()}; Ctrl-C ends it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
