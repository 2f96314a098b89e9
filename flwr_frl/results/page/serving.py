"""The HTTP server of the page: read-only, and by default for this machine only."""

import contextlib
import ipaddress
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from logging import WARNING
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flwr.common import log

from flwr_frl.common.settings import Settings, SettingsError, require
from flwr_frl.results.page.document import document
from flwr_frl.results.page.folder import read_folder

LOOPBACK = "127.0.0.1"


class PageServer(ThreadingHTTPServer):
    """Serve the page of one results folder.

    Parameters
    ----------
    folder : Path
        The folder. It may be created and deleted while it is served.
    port : int
        The port, 0 to 65535; 0 picks a free port.
    host : str, default "127.0.0.1"
        An address of this machine.

    Raises
    ------
    SettingsError
        If the address cannot be listened on.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int, host: str = LOOPBACK) -> None:
        require(0 <= port <= 65535, "page", port, "a port, 0 to 65535")
        self.folder, self.host = folder, host
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise SettingsError(
                f"page is {port}, but {host}:{port} cannot be listened on "
                f"({error.strerror or error}); set another port or host"
            ) from None
        self.url = f"http://{host}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that a browser closes before it has read the page."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def accepts_host(self, host: str) -> bool:
        """Return True if a ``Host`` header is an address or a name of this server.

        A foreign name that resolves to this server would let a foreign page read this
        one (DNS rebinding).
        """
        name = urlsplit(f"//{host}").hostname or ""
        try:
            return name in ("localhost", self.host) or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    # Seconds after which an idle connection is closed.
    timeout = 30

    def do_GET(self) -> None:
        """Send the page."""
        if not self.server.accepts_host(self.headers.get("Host", "")):
            self.send_error(403, "unknown host name")
            return
        if self.path.partition("?")[0] != "/":
            self.send_error(404)
            return
        body = document(read_folder(self.server.folder)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextlib.contextmanager
def served_for(settings: Settings) -> Iterator[None]:
    """Serve the page of a run while the context lasts, if ``page`` is set."""
    if not settings["page"]:
        yield
        return
    server = PageServer(Path(str(settings["output"])), int(settings["page"]))
    # The thread checks every 0.1 s whether it should end.
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    log(WARNING, "the page is at %s", server.url)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
