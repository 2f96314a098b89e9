"""The web page of a results folder, during and after the runs.

A run writes it as ``report.html``, a file that holds its data as JSON and a script that
shows them. ``python -m flwr_frl.results.page results`` serves the page of any folder at
http://127.0.0.1:8765/, where it updates itself. The served page is read-only. Only this
machine can reach it; from another machine, use ``ssh -L 8765:127.0.0.1:8765 SERVER``.
"""

import contextlib
import sys
from collections.abc import Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flwr_frl.common.command_line import Parser, exit_code
from flwr_frl.common.errors import require
from flwr_frl.common.files import write_atomically
from flwr_frl.results import uplot
from flwr_frl.results.page_data import read_folder
from flwr_frl.results.page_script import SCRIPT, STYLE
from flwr_frl.results.results import PAGE, strict_json

LOOPBACK, PORT = "127.0.0.1", 8765

# Nothing is loaded from elsewhere, and nothing is sent.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
)


def document(folder: Path) -> str:
    """Return the page of a results folder as HTML."""
    data = read_folder(folder)
    title = escape(data["folder"])
    # A name with ``<`` could end the script element.
    text = strict_json(data).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}: federated runs</title>
<style>{uplot.STYLE}{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p id="connection" role="status"></p>
<p id="none" role="status"></p>
<p>Task: <span id="task"></span></p>
<p>Settings that differ from the defaults: <span id="settings"></span></p>
<h2>Methods</h2>
<div id="methods" class="box"></div>
<p id="legend"></p>
<div id="charts" class="charts"></div>
<h2>Clients</h2>
<div id="dots"></div>
<div id="clients" class="box"></div>
<script type="application/json" id="data">{text}</script>
<script>/*{uplot.LICENCE}*/{uplot.SCRIPT}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def write_page(output: Path) -> None:
    """Write ``report.html`` about all runs in a results folder."""
    write_atomically(output / PAGE, document(output).encode())


class PageServer(ThreadingHTTPServer):
    """Serve the page of one results folder.

    Parameters
    ----------
    folder : Path
        The folder. It may be created and deleted while it is served.
    port : int
        The port, 0 to 65535; 0 picks a free port.

    Raises
    ------
    SettingsError
        If the port cannot be listened on.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            allowed = f"a port that can be listened on ({error})"
            require(False, "port", port, allowed)
        self.url = f"http://{LOOPBACK}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that a browser closes before it has read the page."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    # Seconds after which an idle connection is closed.
    timeout = 30

    def do_GET(self) -> None:
        """Send the page, whatever the path."""
        # A foreign name that resolves to this server would let a foreign page read this
        # one (DNS rebinding).
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if name not in (LOOPBACK, "localhost"):
            self.send_error(403, "unknown host name")
            return
        body = document(self.server.folder).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after printing one line for invalid input."""
    return exit_code(lambda: _serve(arguments))


def _serve(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m flwr_frl.results.page", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the results folder")
    text = "the port to listen on (default %(default)s); 0 picks a free port"
    parser.add_argument("--port", type=int, default=PORT, help=text)
    options = parser.parse_args(arguments)
    folder = options.folder.absolute()
    require(folder.is_dir(), "DIR", str(folder), "a folder of results")
    with PageServer(folder, options.port) as server:
        print(f"{server.url} shows {folder}; stop with Ctrl-C", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
