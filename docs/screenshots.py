"""Take the screenshot of the report page: ``python -m docs.screenshots``.

It shows real runs with three clients in a headless Chromium, which Debian's package
``chromium`` installs.
"""

import base64
import sys
import tempfile
from pathlib import Path

from flwr_frl import simulate
from flwr_frl.results.page.document import write_page

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "e2e"))


def main() -> None:
    """Make the runs, and take the screenshot."""
    from browser import browser

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "three-devices"
        for algorithm in ("fedrep", "fedavg"):
            simulate(
                algorithm,
                clients=3,
                rounds=15,
                output=str(folder),
                partition="dirichlet",
                fraction=1.0,
                backend="inline",
                evaluate_every=1,
                head_epochs=1,
            )
        write_page(folder)
        with browser(Path(place) / "profile") as page:
            page.screen(1200, 1180)
            page.open((folder / "report.html").as_uri())
            page.wait("document.querySelectorAll('canvas').length >= 3")
            shot = page.call("Page.captureScreenshot")["data"]
            (HERE / "page-devices.png").write_bytes(base64.b64decode(shot))


if __name__ == "__main__":
    main()
