"""The page in a real browser: its script works, and names are only text."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, browser
from page_folders import write as write_run

from flwr_frl.results.page import PageServer, write_page

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not CHROMIUM, reason="there is no chromium"),
]
HOSTILE = "<img src=x onerror=\"document.title='taken'\">"


def write(folder: Path, rounds: int) -> None:
    rows = [
        {"round": i, "seconds": 2.0 * i, "train-loss": 1 / i, "accuracy": 1 - 0.5 / i}
        for i in range(1, rounds + 1)
    ]
    names = [HOSTILE, *(f"pi-{i}" for i in range(1, 20))]
    clients = [
        {"client": name, "node": str(i), "quality": (i * 7 % 20) / 20, "last-round": i}
        for i, name in enumerate(names)
    ]
    write_run(folder, rows=rows, clients=clients)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    server = PageServer(tmp_path / "results", 0)
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
    yield server
    server.server_close()


def test_the_page_works_in_a_browser(tmp_path: Path, server: PageServer) -> None:
    folder = tmp_path / "results"
    write(folder, 3)
    with browser(tmp_path / "profile") as page:
        page.screen(390, 844)
        page.open(server.url)
        # The curves are drawn, and nothing is wider than the screen of a telephone.
        drawn = """{const canvas = document.querySelector('figure canvas');
            canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
                .data.filter((_, i, all) => i % 4 === 2 && all[i] > all[i - 2] + 99)
                .length}"""
        assert page.value(drawn) > 100
        assert page.value("document.documentElement.scrollWidth") == 390
        page.screen(1200, 900)

        # Names are displayed as text.
        cell = "document.querySelector('#clients tbody td').textContent"
        assert page.value(cell) == f"fedrep: {HOSTILE}"
        assert page.value("document.images.length") == 0

        # Sorting by accuracy, and searching
        names = """[...document.querySelectorAll('#clients tbody tr')]
            .map(row => row.cells[0].textContent.slice(8))"""
        page.value("document.querySelectorAll('#clients th button')[3].click()")
        page.value("document.querySelectorAll('#clients th button')[3].click()")
        by_quality = sorted(range(1, 20), key=lambda i: -(i * 7 % 20))
        expected = [f"pi-{i}" for i in by_quality]
        assert page.value(names) == [*expected, HOSTILE]
        page.value(
            "{const s = document.querySelector('#clients input');"
            "s.focus(); s.value = 'PI-1'; s.oninput()}"
        )
        expected = [name for name in expected if "pi-1" in name]
        assert len(expected) == 11
        assert page.value(names) == expected

        # A new round appears without a reload, and the state of the page is kept.
        page.value("window.same = true")
        across = "document.querySelector('figure').chart.data[0]"
        assert page.value(across) == [1, 2, 3]
        page.value(
            "{const s = document.querySelector('#across');"
            "s.value = 'seconds'; s.onchange()}"
        )
        assert page.value(across) == [2, 4, 6]
        write(folder, 4)
        page.wait(f"{across}.length === 4")
        assert page.value("window.same")
        assert page.value(names) == expected
        assert page.value("document.activeElement.value") == "PI-1"
        assert page.requested() == {server.url}
        assert page.complaints() == []

        # First the folder is deleted, then the server stops.
        shutil.rmtree(folder)
        page.wait("!document.querySelector('#none').hidden")
        server.shutdown()
        server.server_close()
        page.wait("document.body.textContent.includes('connection lost')")

        # The page as a file shows the same, and requests no other resource.
        write(folder, 5)
        write_page(folder)
        page.events.clear()
        page.open((folder / "report.html").as_uri())
        assert page.value(f"{across}.length") == 5
        assert page.requested() == {(folder / "report.html").as_uri()}
        assert page.complaints() == []
