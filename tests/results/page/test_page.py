"""The results page for complete, damaged, empty and missing folders."""

import base64
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from page_folders import CLIENTS, ROWS, write

from flwr_frl.results.page.document import page, write_page
from flwr_frl.results.page.folder import Results

# Markup, control characters and a right-to-left override
HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e\x00\u2028\"'&amp;<img src=x>"


class Reader(HTMLParser):
    """Collects the cells of tables, the text, and all tags with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict]] = []
        self.text, self._rows, self._cell = "", [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self._rows = self.tables.setdefault(dict(attrs)["id"], [])
        if tag == "tr":
            self._rows.append([])
        if tag in ("td", "th"):
            self._rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        self._cell &= tag not in ("td", "th")

    def handle_data(self, data):
        self.text += data
        if self._cell:
            self._rows[-1][-1] += data


def read(folder) -> Reader:
    return Reader(page(Results(folder)))


def test_runs_table(tmp_path):
    write(tmp_path)
    assert read(tmp_path / "fedrep").tables["runs"][1][0] == "fedrep"
    head, row = read(tmp_path).tables["runs"]
    assert head[:4] == ["run", "latest accuracy", "round", "training loss"]
    assert row[:7] == [
        *("fedrep", "75.00 %", "2 of 10 running, 16 s left", "1"),
        *("6.0", "1.5", "4 s"),
    ]


def test_run_without_its_process_is_shown_as_stopped(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    for host, process, state in (
        (platform.node(), os.getpid(), "running, 16 s left"),
        (platform.node(), ended.pid, "stopped"),
        ("another machine", ended.pid, "running, 16 s left"),
    ):
        write(tmp_path, host=host, process=process)
        assert read(tmp_path).tables["runs"][1][2] == f"2 of 10 {state}"


def test_clients_table(tmp_path):
    write(tmp_path)
    head, first, second = read(tmp_path).tables["clients-fedrep"]
    assert head == [
        *("client", "last seen", "last round", "accuracy", "examples", "test examples"),
        *("rejected", "unanswered", "node", "last problem"),
    ]
    assert first == [
        *("pi-1", "connected", "2", "75.00 %", "1,234", "5", "0", "0"),
        *("9007199254740993", ""),
    ]
    assert second == [
        *("pi-2", "2023-11-14 22:13:20 UTC", "1", "-", "7", "5", "1", "0"),
        *("", "is bad"),
    ]


def test_all_runs_in_the_folder_are_shown(tmp_path):
    names = ["fedavg", "earlier-1a2b/fedrep", "seed-1/fedavg"]
    # An archived run of a search over seeds
    names.append("fedper/point-0/seed-1/earlier-1a2b/fedper")
    for name in names:
        write(tmp_path, name)
    shown = [row[0] for row in read(tmp_path).tables["runs"][1:]]
    assert sorted(shown) == sorted(names)


def test_charts_of_accuracy_by_cost_and_of_updates(tmp_path):
    write(tmp_path)
    assert "By cost" not in page(Results(tmp_path))
    first = {"seconds-simulated": 0.5, "dropped": 0, "staleness": [0, 0]}
    second = {"seconds-simulated": 2.5, "dropped": 2, "staleness": [2]}
    rows = [ROWS[0] | first, ROWS[1] | second]
    clients = [CLIENTS[0] | {"updates": 3}, CLIENTS[1] | {"updates": 0}]
    write(tmp_path, "fedbuff", rows=rows, clients=clients)
    text = page(Results(tmp_path))
    for dot in (
        "fedbuff, simulated time 2.5: 75 %",
        "fedbuff, client updates 5: 75 %",
        "fedbuff, MB, down and up 7.5: 75 %",
        "fedrep, MB, down and up 7.5: 75 %",
        "staleness 0: 66.7%",
        "staleness 1: 0.0%",
        "staleness 2: 33.3%",
        "clients, from the fewest updates to the most 1: 100.0%",
    ):
        assert f"<title>{dot}</title>" in text, dot


@pytest.mark.parametrize("staleness", [HOSTILE, [HOSTILE], [-1, 1e9], [10**30], None])
def test_damaged_staleness_is_left_out(tmp_path, staleness):
    rows = [row | {"seconds-simulated": 1.0, "staleness": staleness} for row in ROWS]
    write(tmp_path, "fedbuff", rows=rows)
    text = page(Results(tmp_path))
    assert "By cost" in text
    assert "by staleness" not in text


def test_names_are_shown_as_text(tmp_path):
    clients = [{**CLIENTS[0], "client": HOSTILE, "reason": HOSTILE, "node": HOSTILE}]
    rows = [{**ROWS[0], HOSTILE: 1.0}, {**ROWS[1], HOSTILE: 2.0}]
    write(tmp_path, "<b>run", rows, clients, measure=HOSTILE)
    text = page(Results(tmp_path))
    reader = Reader(text)
    assert text.count("<script") == 1
    assert not {tag for tag, _ in reader.tags} & {"img", "b", "iframe"}
    written = r"<script>alert(1)</script>\x1b[31m\u202e\x00"
    row = reader.tables["clients-<b>run"][1]
    assert all(row[i].startswith(written) for i in (0, 8, 9))
    assert all(c.isprintable() or c == "\n" for c in text)


@pytest.mark.parametrize(
    "status",
    [
        *("", "{", "[]", "null", "7", "[" * 100_000),
        '{"clients": 7, "rounds": "many", "left": [], "state": {}, "measure": 3}',
        '{"clients": [null, 3, [], {}], "rounds": 1e999, "left": NaN}',
        '{"clients": [{"client": {"a": 1}, "last-seen": 1e99, "quality": "x"}]}',
        '{"clients": [{"last-seen": -1e11, "last-round": 1' + "0" * 400 + "}]}",
    ],
)
def test_a_damaged_status_does_not_hide_the_run(tmp_path, status):
    write(tmp_path)
    (tmp_path / "fedrep" / "status.json").write_text(status)
    row = read(tmp_path).tables["runs"][1]
    assert (row[:2], row[3]) == (["fedrep", "75.00 %"], "1")


STRANGE = {"train-loss": "x", "accuracy": None, "bytes-down": True, "seconds": []}


@pytest.mark.parametrize(
    ("text", "cells"),
    [
        ("[" * 100_000, ["a", "-", "0 of 10"]),
        (f'{{"round": 1{"0" * 400}}}', ["a", "-", "0 of 10"]),
        (json.dumps({"round": 1, **STRANGE, "rejected-clients": [1, {}]}), ["a", "-"]),
        # The last line is still being written.
        (json.dumps(ROWS[0]) + '\n{"round": 3, "accu', ["a", "25.00 %", "1 of 10"]),
    ],
)
def test_undamaged_part_of_a_run_is_shown(tmp_path, text, cells):
    write(tmp_path, "a")
    write(tmp_path, "b")
    (tmp_path / "a" / "metrics.jsonl").write_text(text)
    write_page(tmp_path)
    reader = Reader((tmp_path / "report.html").read_text())
    _, first, second = reader.tables["runs"]
    assert all(map(str.startswith, first, cells))
    assert second[:2] == ["b", "75.00 %"]


def test_empty_or_missing_folder_is_shown_as_no_runs(tmp_path):
    nothing = "No run has written anything here yet."
    assert nothing in read(tmp_path).text
    results = Results(tmp_path / "gone")
    assert nothing in page(results)
    write(tmp_path / "gone")
    assert "fedrep" in Reader(page(results)).tables["runs"][1][0]
    shutil.rmtree(tmp_path / "gone")
    assert nothing in page(results)


def test_only_changed_runs_are_read_again(tmp_path):
    write(tmp_path, "a")
    write(tmp_path, "b")
    results = Results(tmp_path)
    first, (unchanged, _) = page(results), results.runs()
    assert page(results) == first
    write(tmp_path, "b", [*ROWS, {**ROWS[1], "round": 3, "accuracy": 0.5}])
    assert Reader(page(results)).tables["runs"][2][1] == "50.00 %"
    assert results.runs()[0] is unchanged
    shutil.rmtree(tmp_path / "a")
    assert len(Reader(page(results)).tables["runs"]) == 2


def test_the_page_loads_nothing_from_elsewhere(tmp_path):
    folder = tmp_path / "results"
    write(folder)
    write_page(folder)
    text = (folder / "report.html").read_text()
    assert "<h1>results</h1>" in text
    assert str(tmp_path) not in text
    assert "//" not in re.sub(r"data:,", "", text)
    for _, attributes in Reader(text).tags:
        assert not attributes.keys() & {"src", "action", "style", "onclick"}
        assert attributes.get("href", "data:,") == "data:,"
    policy = re.search(r'Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy
    for tag in ("style", "script"):
        body = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    # The page in a file does not poll for updates.
    assert "data-live" not in text.partition("<body")[2].partition(">")[0]
    assert 'data-live="1"' in page(Results(folder), live=True)


def test_thousand_clients_are_shown(tmp_path):
    clients = [{**CLIENTS[0], "client": f"{i:06d}"} for i in range(1000)]
    write(tmp_path, clients=clients)
    text = page(Results(tmp_path))
    reader = Reader(text)
    assert len(reader.tables["clients-fedrep"]) == 1001
    assert "fedrep: 1,000 clients, 1,000 connected" in reader.text
    assert len(text) < 500_000
