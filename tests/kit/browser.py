"""A headless Chromium, as packaged by Debian, driven over DevTools pipes."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""


class Browser:
    """One page of a browser."""

    def __init__(self, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def connect() -> None:
            # Chromium reads commands from descriptor 3 and writes replies to 4.
            os.dup2(to_read, 13)
            os.dup2(to_write, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        options = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage")
        # uPlot refuses the language of the locale C.
        options += ("hide-scrollbars", "remote-debugging-pipe", "accept-lang=en-US")
        self.process = subprocess.Popen(
            [CHROMIUM, *(f"--{o}" for o in options), f"--user-data-dir={profile}"],
            preexec_fn=connect,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(answer["error"]["message"])
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            if not data:
                raise EOFError("the browser has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def screen(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < deadline, f"waited {seconds} s for {expression}"
            time.sleep(0.1)

    def complaints(self) -> list[str]:
        """Return the errors of the page, including violations of its content policy."""
        self.value("0")
        errors = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                errors.append(str(event["params"]["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded":
                errors.append(str(event["params"]["entry"]["text"]))
        return errors

    def requested(self) -> set[str]:
        return {
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        }


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    page = Browser(profile)
    try:
        yield page
    finally:
        with contextlib.suppress(Exception):
            page.call("Browser.close")
        page.process.kill()
        page.process.wait(10)
