"""The HTTP server of the page: read-only, and by default for this machine only."""

import contextlib
import gzip
import hashlib
import ipaddress
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log

from flwr_frl.common.settings import Settings, SettingsError
from flwr_frl.results.page.document import document, to_json
from flwr_frl.results.page.folder import Cache, read_folder

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
        self.folder, self.host = folder, host
        self._cache: Cache = {}
        if not 0 <= port <= 65535:
            raise SettingsError(f"page is {port}; expected a port, 0 to 65535")
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise SettingsError(
                f"page is {port}, but {host}:{port} cannot be listened on "
                f"({error.strerror or error}); set another port or host"
            ) from None

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://{self.host}:{self.server_address[1]}/"

    def content(self, path: str) -> tuple[str, str] | None:
        """Return the type and the text of a resource: the page or its data."""
        if path not in ("/", "/data.json"):
            return None
        data = read_folder(self.folder, self._cache) | {"live": True}
        if path == "/":
            return "text/html; charset=utf-8", document(data)
        return "application/json", to_json(data)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that a browser closes before it has read the page."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def accepts_host(self, host: str) -> bool:
        """Return True if a ``Host`` header is an address or a name of this server.

        A foreign name that resolves to this server would let a foreign page read this
        one (DNS rebinding).
        """
        name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
        if name.lower() in ("localhost", self.host.lower()):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "page", ""
    protocol_version = "HTTP/1.1"
    # Idle connections are closed after so many seconds.
    timeout = 30

    def do_GET(self) -> None:
        """Send the page or its data, or 304 if the browser has them already."""
        if not self.server.accepts_host(self.headers.get("Host", "")):
            self.send_error(403, "unknown host name")
            return
        content = self.server.content(self.path.partition("?")[0])
        if content is None:
            self.send_error(404)
            return
        body = content[1].encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        unchanged = self.headers.get("If-None-Match") == tag
        self.send_response(304 if unchanged else 200)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        if not unchanged:
            self.send_header("Content-Type", content[0])
            if "gzip" in self.headers.get("Accept-Encoding", ""):
                body = gzip.compress(body, 3, mtime=0)
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not unchanged:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextlib.contextmanager
def served_for(settings: Settings) -> Iterator[None]:
    """Serve the page of a run while the context lasts, if ``page`` is set."""
    if not settings["page"]:
        yield
        return
    output = Path(str(settings["output"])).absolute()
    with served(output, int(settings["page"])) as url:
        log(WARNING, "the page is at %s", url)
        yield


@contextlib.contextmanager
def served(folder: Path, port: int, host: str = LOOPBACK) -> Iterator[str]:
    """Serve the page in a thread while the context lasts; yield its address."""
    server = PageServer(folder, port, host)
    # The thread checks every 0.1 s whether it should end.
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()
