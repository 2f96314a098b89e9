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

from flwr_frl.results.page import folder, uplot
from flwr_frl.results.page.document import document, write_page
from flwr_frl.results.page.folder import MOST_POINTS, read_folder

# Markup, control characters and a right-to-left override
HOSTILE = "</script><!--<script>\x1b[31m\u202e\x00\u2028\"'&amp;<img src=x>"
SHOWN = r"</script><!--<script>\x1b[31m\u202e\x00"


def only_run(place) -> dict:
    (run,) = read_folder(place)["runs"]
    return run


def parts(text: str) -> list[tuple[str, dict, str]]:
    """Return the elements of a page: tag, attributes, and text at their beginning."""
    found, inside = [], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            found.append([tag, dict(attrs), ""])
            inside[:] = [found[-1]]

        def handle_data(self, data):
            for part in inside:
                part[2] += data

        def handle_endtag(self, tag):
            inside.clear()

    Reader().feed(text)
    return [tuple(part) for part in found]


def policy_in(text: str) -> str:
    """Return the page's content policy: what it may load and run."""
    return re.search(r'Policy" content="([^"]*)"', text)[1]


def data_in(text: str) -> dict:
    (data,) = (t for _, attributes, t in parts(text) if attributes.get("id") == "data")
    return json.loads(data)


def test_the_page_contains_its_data_and_not_its_path(tmp_path):
    write(tmp_path / "results")
    write_page(tmp_path / "results")
    text = (tmp_path / "results" / "report.html").read_text()
    assert data_in(text) == read_folder(tmp_path / "results")
    assert "<h1>results</h1>" in text
    assert str(tmp_path) not in text


def test_data_of_a_run(tmp_path):
    write(tmp_path)
    assert only_run(tmp_path / "fedrep")["name"] == "fedrep"
    run = only_run(tmp_path)
    changed = (tmp_path / "fedrep" / "status.json").stat().st_mtime
    assert run.pop("written") == pytest.approx(changed, abs=0.001)
    series, clients = run.pop("series"), run.pop("clients")
    assert run == {
        **{"name": "fedrep", "state": "running", "round": 2, "rounds": 10},
        **{"left": 16.0, "quality": "accuracy", "measure": "accuracy"},
        **{"down": 6.0, "up": 1.5, "staleness": []},
        "costs": {
            "updates": [[2, 3], [0.25, 0.75]],
            "traffic": [[4.0, 7.5], [0.25, 0.75]],
        },
    }
    assert series["accuracy"] == [[1, 2], [0.25, 0.75]]
    assert series["traffic"] == [[1, 2], [4.0, 7.5]]
    # Lists of names are no metrics.
    assert series.keys() == {*ROWS[0], "traffic", "updates"}
    same = CLIENTS[0] | {"rejected": 0, "unanswered": 0, "updates": None}
    assert clients[0] == same
    assert clients[1]["node"] == ""
    assert (clients[1]["quality"], clients[1]["rejected"]) == (None, 1)


def test_a_long_curve_is_thinned_evenly_and_keeps_its_last_point(tmp_path):
    write(tmp_path, rows=[{"round": i, "loss": i / 2} for i in range(1, 10_002)])
    rounds, values = only_run(tmp_path)["series"]["loss"]
    assert rounds == list(range(17, 10_002, 26))
    assert len(rounds) <= MOST_POINTS
    assert values[-1] == 10_001 / 2


def test_run_without_its_process_is_shown_as_stopped(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    for host, process, state, left in (
        (platform.node(), os.getpid(), "running", 16.0),
        (platform.node(), ended.pid, "stopped", None),
        ("another machine", ended.pid, "running", 16.0),
    ):
        write(tmp_path, host=host, process=process)
        run = only_run(tmp_path)
        assert (run["state"], run["left"]) == (state, left)


def test_runs_are_found_in_all_folders_the_deepest_last(tmp_path):
    # The last one is an archived run of a search over seeds.
    archived = "fedper/point-0/seed-1/earlier-1a2b/fedper"
    names = ["fedavg", "earlier-1a2b/fedrep", "seed-1/fedavg", archived]
    for name in names[::-1]:
        write(tmp_path, name)
    assert [run["name"] for run in read_folder(tmp_path)["runs"]] == names


def test_costs_and_staleness(tmp_path):
    costs = [
        {"seconds-simulated": 0.5, "dropped": 0, "staleness": [0, 0]},
        {"seconds-simulated": 2.5, "dropped": 2, "staleness": [2]},
    ]
    rows = [row | cost for row, cost in zip(ROWS, costs, strict=True)]
    clients = [c | {"updates": n} for c, n in zip(CLIENTS, (3, 0), strict=True)]
    write(tmp_path, "fedbuff", rows=rows, clients=clients)
    run = only_run(tmp_path)
    assert run["costs"]["seconds-simulated"] == [[0.5, 2.5], [0.25, 0.75]]
    assert run["costs"]["updates"] == [[2, 5], [0.25, 0.75]]
    assert run["staleness"] == [2, 0, 1]
    assert [client["updates"] for client in run["clients"]] == [3, 0]


@pytest.mark.parametrize("staleness", [HOSTILE, [HOSTILE], [-1, 1e9], [10**30], None])
def test_damaged_staleness_is_left_out(tmp_path, staleness):
    write(tmp_path, rows=[row | {"staleness": staleness} for row in ROWS])
    assert only_run(tmp_path)["staleness"] == []


def test_run_without_a_status_is_shown(tmp_path):
    write(tmp_path)
    (tmp_path / "fedrep" / "status.json").unlink()
    final = {"pi-1": {"accuracy": 0.5, "num-examples": 3, "last-round": 2}}
    (tmp_path / "fedrep" / "clients.json").write_text(json.dumps(final))
    run = only_run(tmp_path)
    assert (run["state"], run["round"], run["rounds"]) == ("", 2, None)
    (client,) = run["clients"]
    assert client["client"] == "pi-1"
    values = [client[n] for n in ("last-round", "quality", "num-examples")]
    assert values == [2, 0.5, 3]


def test_names_are_data_and_never_markup(tmp_path):
    clients = [{**CLIENTS[0], "client": HOSTILE, "reason": HOSTILE, "node": HOSTILE}]
    rows = [{**row, HOSTILE: 1.0} for row in ROWS]
    write(tmp_path / "<b>", "<b>run", rows, clients, measure=HOSTILE)
    text = document(read_folder(tmp_path / "<b>"))
    ours = document(read_folder(tmp_path / "nothing"))
    assert [tag for tag, _, _ in parts(text)] == [tag for tag, _, _ in parts(ours)]
    assert all(c.isprintable() or c == "\n" for c in text)
    data = data_in(text)
    (run,) = data["runs"]
    assert (data["folder"], run["name"]) == ("<b>", "<b>run")
    (client,) = run["clients"]
    strange = run["series"].keys() - {*ROWS[0], "traffic", "updates"}
    for name in (*strange, client["client"], client["node"], client["reason"]):
        assert name.startswith(SHOWN)
    assert policy_in(text) == policy_in(ours)


@pytest.mark.parametrize(
    "status",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        '{"clients": 7, "rounds": "many", "left": [], "state": {}, "measure": 3}',
        '{"clients": [null, 3, [], {}], "rounds": 1e999, "left": NaN}',
        '{"clients": [{"client": {"a": 1}, "last-seen": 1e99, "quality": "x"}]}',
        '{"clients": [{"last-seen": -1e11, "last-round": 1' + "0" * 400 + "}]}",
        "[" * 100_000,
    ],
)
def test_a_damaged_status_does_not_hide_the_run(tmp_path, status):
    write(tmp_path)
    (tmp_path / "fedrep" / "status.json").write_text(status)
    write_page(tmp_path)
    (run,) = data_in((tmp_path / "report.html").read_text())["runs"]
    assert run["series"]["accuracy"] == [[1, 2], [0.25, 0.75]]
    assert (run["state"], run["rounds"], run["left"]) == ("", None, None)


STRANGE = {"train-loss": "x", "accuracy": None, "bytes-down": True, "seconds": []}


@pytest.mark.parametrize(
    ("text", "last", "accuracy"),
    [
        ("[" * 100_000, 0, None),
        (f'{{"round": 1{"0" * 400}}}', 0, None),
        (json.dumps({"round": 1, **STRANGE, "rejected-clients": [1, {}]}), 1, None),
        # The last line is still being written.
        (json.dumps(ROWS[0]) + '\n{"round": 3, "accu', 1, [[1], [0.25]]),
    ],
)
def test_undamaged_part_of_a_run_is_shown(tmp_path, text, last, accuracy):
    write(tmp_path, "a")
    write(tmp_path, "b")
    (tmp_path / "a" / "metrics.jsonl").write_text(text)
    first, second = read_folder(tmp_path)["runs"]
    assert (first["name"], first["round"]) == ("a", last)
    assert first["series"].get("accuracy") == accuracy
    assert second["series"]["accuracy"] == [[1, 2], [0.25, 0.75]]


def test_only_changed_runs_are_read_again(tmp_path, monkeypatch):
    place, cache, read = tmp_path / "results", {}, []
    assert read_folder(place, cache)["runs"] == []
    original = folder.read_rows
    monkeypatch.setattr(folder, "read_rows", lambda p: read.append(p) or original(p))
    write(place, "a")
    write(place, "b")
    assert read_folder(place, cache) == read_folder(place, cache)
    assert len(read) == 2
    write(place, "b", [*ROWS, {**ROWS[1], "round": 3, "accuracy": 0.5}])
    runs = read_folder(place, cache)["runs"]
    assert [run["round"] for run in runs] == [2, 3]
    assert len(read) == 3
    shutil.rmtree(place / "a")
    assert [run["name"] for run in read_folder(place, cache)["runs"]] == ["b"]
    shutil.rmtree(place)
    assert read_folder(place, cache)["runs"] == []


def test_the_page_loads_nothing_from_elsewhere(tmp_path):
    write(tmp_path)
    text = document(read_folder(tmp_path))
    elements = parts(text)
    for _, attributes, _ in elements:
        assert not attributes.keys() & {"src", "action", "style", "onclick"}
        assert attributes.get("href", "data:,") == "data:,"
    policy = policy_in(text)
    assert "default-src 'none'" in policy
    for tag, attributes, body in elements:
        if tag in ("script", "style") and not attributes:
            digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
            assert re.search(rf"{tag}-src [^;]*'sha256-{re.escape(digest)}'", policy)
    # The page as a file does not ask for later data.
    assert "live" not in data_in(text)
    assert uplot.LICENCE in text


def test_thousand_clients_are_shown(tmp_path):
    clients = [{**CLIENTS[0], "client": f"{i:06d}"} for i in range(1000)]
    write(tmp_path, clients=clients)
    assert len(only_run(tmp_path)["clients"]) == 1000
    assert len(document(read_folder(tmp_path))) < 500_000
