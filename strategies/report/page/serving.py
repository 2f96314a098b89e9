"""The page, served: read-only, and to this machine alone unless told otherwise."""

import contextlib
import gzip
import hashlib
import ipaddress
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log

from flwr_frl.strategies.report.page.document import page
from flwr_frl.strategies.report.page.folder import Results
from flwr_frl.task.settings import Settings, SettingsError

LOOPBACK = "127.0.0.1"


class PageServer(ThreadingHTTPServer):
    """Serves the page over one results folder.

    Parameters
    ----------
    folder : Path
        The folder; it may be made, and deleted, while it is served.
    port : int
        Where; 0 takes a free one.
    host : str, default "127.0.0.1"
        An address of this machine.

    Raises
    ------
    SettingsError
        If nothing can be served there.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int, host: str = LOOPBACK) -> None:
        self.results, self.host = Results(folder), host
        self._lock = threading.Lock()
        if not 0 <= port <= 65535:
            raise SettingsError(f"page is {port}; it must be a port, 0 to 65535")
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            reason = error.strerror or error
            raise SettingsError(
                f"page: nothing can be served on {host}:{port} ({reason}); another "
                "port or host must be taken"
            ) from None

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        return f"http://{self.host}:{self.server_address[1]}/"

    def page(self) -> bytes:
        """Return the page as it is now."""
        # What has been read is kept for all who ask.
        with self._lock:
            return page(self.results, live=True).encode()

    def is_own(self, host: str) -> bool:
        """Return whether a request means this server.

        It does not if it comes by a name of somebody else's that leads here, with which
        a foreign page could read this one.
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
    # One who connects and says nothing is left after so many seconds.
    timeout = 30

    def do_GET(self) -> None:
        """Send the page."""
        self._answer(True)

    def do_HEAD(self) -> None:
        """Send the page's headers."""
        self._answer(False)

    def _answer(self, whole: bool) -> None:
        if not self.server.is_own(self.headers.get("Host", "")):
            self.send_error(403, "this is not its name")
            return
        if self.path.partition("?")[0] != "/":
            self.send_error(404)
            return
        body = self.server.page()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            self._head(304, tag, {})
            return
        headers = {"Content-Type": "text/html; charset=utf-8"}
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 3, mtime=0)
            headers["Content-Encoding"] = "gzip"
        self._head(200, tag, {**headers, "Content-Length": str(len(body))})
        if whole:
            self.wfile.write(body)

    def _head(self, status: int, tag: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        fixed = {
            "ETag": tag,
            "Cache-Control": "no-cache",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
        }
        for name, value in {**fixed, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def served_for(settings: Settings) -> Iterator[None]:
    """Serve the page of a run for as long as the context lasts, if it wants one."""
    if not settings["page"]:
        yield
        return
    output = Path(str(settings["output"])).absolute()
    with served(output, int(settings["page"])) as url:
        log(WARNING, "the page is at %s", url)
        yield


@contextlib.contextmanager
def served(folder: Path, port: int, host: str = LOOPBACK) -> Iterator[str]:
    """Serve the page in a thread for as long as the context lasts; give its address."""
    server = PageServer(folder, port, host)
    # At its end it is looked whether it has ended this often, in seconds.
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()
