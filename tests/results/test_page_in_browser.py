"""The page in a real browser: its script works, and names are only text."""

import json
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, browser
from page_folders import write as write_run

from flwr_frl.common.algorithms import title
from flwr_frl.results.page import PageServer, write_page
from flwr_frl.results.page_data import read_folder

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed"),
]
HOSTILE = "<img src=x onerror=\"document.title='taken'\">"
METHODS = ("fedrep", "fedavg", "local", "flute", "fedper", "ditto", "apfl", HOSTILE)
DRAWN = """{const canvas = document.querySelector('figure canvas');
    canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
        .data.filter((_, i, all) => i % 4 === 2 && all[i] > all[i - 2] + 99).length}"""


def write(folder: Path, rounds: int, seeds: int = 5) -> None:
    """Write runs of eight methods; the first one is the best."""
    chance = random.Random(0)
    for seed in range(seeds):
        for m, method in enumerate(METHODS):
            rows = []
            for i in range(1, rounds + 1):
                best = 0.9 - m / 10 + chance.random() / 100
                clients = {f"{c:06}": {"accuracy": best - c / 100} for c in range(10)}
                about = {"evaluated": 10, "accuracy": best - 0.045, "train-loss": 1 / i}
                about |= {"round": i, "seconds": 2.0 * i, "client-metrics": clients}
                rows.append({"bytes-down": 10**6, "bytes-up": 10**6, **about})
            entries = [{"client": f"{c:06}", "num-examples": c} for c in range(10)]
            entries[0]["client"] = HOSTILE
            settings = {"algorithm": method, "seed": seed, "num-server-rounds": rounds}
            more = {"state": "finished", "settings": settings}
            write_run(folder, f"seed-{seed}/{method}", rows, entries, **more)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as page:
        yield page
        assert page.complaints() == []
        assert page.value("document.images.length") == 0


def test_the_report_of_eight_methods_and_five_seeds(
    tmp_path: Path, page: Browser
) -> None:
    folder = tmp_path / "results"
    write(folder, 12)
    write_page(folder)
    address = (folder / "report.html").as_uri()
    for width in (400, 1280):
        page.screen(width, 900)
        page.open(address)
        assert page.value("document.documentElement.scrollWidth") == width
        assert page.value(DRAWN) > 100
    assert page.requested() == {address}

    # One row a method, the numbers being those of the journals.
    table = page.value(
        "[...document.querySelectorAll('#methods tr')]"
        ".map(row => [...row.cells].map(cell => cell.innerText))"
    )
    assert table == read_folder(folder)["table"]
    assert [row[0] for row in table[1:]] == [title(name) for name in METHODS]
    rows = [
        json.loads(line)
        for seed in range(5)
        for line in (folder / f"seed-{seed}/fedrep/metrics.jsonl").open()
    ]
    mean = sum(row["accuracy"] for row in rows if row["round"] > 2) / 50
    assert table[1][table[0].index("accuracy")].startswith(f"{mean:.2%} ± ")

    labels = "document.querySelector('#dots figure').chart.series.map(s => s.label)"
    assert page.value(labels) == ["client", *map(title, METHODS)]
    scale = "document.querySelector('figure').chart.scales.y"
    assert page.value(f"[{scale}.min, {scale}.max]") == [0, 1]


def test_the_served_page_follows_its_folder(tmp_path: Path, page: Browser) -> None:
    folder = tmp_path / "results"
    server = PageServer(folder, 0)
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
    write(folder, 3, 1)
    page.screen(1280, 900)
    page.open(server.url)
    # A new round appears without a reload, and the state of the page is kept.
    page.value("window.same = true")
    across = "document.querySelector('figure').chart.data[0]"
    assert page.value(across) == [1, 2, 3]
    write(folder, 4, 1)
    page.wait(f"{across}.length === 4")
    assert page.value("window.same")
    assert page.requested() == {server.url}
    # First the folder is deleted, then the server stops.
    shutil.rmtree(folder)
    page.wait("document.querySelector('#none').textContent")
    assert page.complaints() == []
    server.shutdown()
    server.server_close()
    page.wait("document.body.textContent.includes('connection lost')")
    page.events.clear()
