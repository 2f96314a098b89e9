"""The results page: its data, damaged folders, and the server."""

import http.client
import json
import re
import socket
import threading
from urllib.request import urlopen

import pytest
from command_line import one_error
from page_folders import CLIENTS, ROWS, write
from refusals import code_of

from flwr_frl.results import uplot
from flwr_frl.results.page import (
    MOST_POINTS,
    PageServer,
    document,
    main,
    read_folder,
    served_for,
    write_page,
)

HOSTILE = "</script><!--<script>\u2028\"'&amp;<img src=x>"


def only_run(place) -> dict:
    (run,) = read_folder(place)["runs"]
    return run


def data_in(text: str) -> dict:
    return json.loads(re.search(r'id="data">([^<]*)</script>', text)[1])


def test_the_page_contains_its_data_and_loads_nothing(tmp_path):
    write(tmp_path / "results")
    write_page(tmp_path / "results")
    text = (tmp_path / "results" / "report.html").read_text()
    assert data_in(text) == read_folder(tmp_path / "results")
    assert "<h1>results</h1>" in text
    assert str(tmp_path) not in text
    assert "default-src 'none'" in text
    assert uplot.LICENCE in text


def test_data_of_a_run(tmp_path):
    write(tmp_path)
    assert only_run(tmp_path / "fedrep")["name"] == "fedrep"
    run = only_run(tmp_path)
    columns, clients = run.pop("columns"), run.pop("clients")
    assert run == {
        **{"name": "fedrep", "state": "running", "rounds": 10},
        **{"left": 16.0, "quality": "accuracy"},
    }
    assert columns["accuracy"] == [0.25, 0.75]
    assert columns["MB"] == [4.0, 7.5]
    assert columns["updates"] == [2, 3]
    assert columns.keys() == {*ROWS[0], "MB", "updates"}
    assert clients[0] == CLIENTS[0] | {"rejected": 0, "unanswered": 0}
    assert (clients[1]["quality"], clients[1]["rejected"]) == (None, 1)


def test_a_long_run_is_thinned_to_evaluated_rows_and_its_last_one(tmp_path):
    rows = [{"round": i, "loss": i / 2} for i in range(1, 1002)]
    rows[9] |= {"evaluated": 1, "accuracy": 0.5}
    write(tmp_path, rows=rows)
    columns = only_run(tmp_path)["columns"]
    assert len(columns["round"]) <= MOST_POINTS
    assert columns["round"][-1] == 1001
    assert columns["accuracy"].count(0.5) == 1


def test_runs_are_found_in_all_folders_the_deepest_last(tmp_path):
    # The last one is an archived run of a search over seeds.
    archived = "fedper/point-0/seed-1/earlier-1a2b/fedper"
    names = ["fedavg", "earlier-1a2b/fedrep", "seed-1/fedavg", archived]
    for name in names[::-1]:
        write(tmp_path, name)
    assert [run["name"] for run in read_folder(tmp_path)["runs"]] == names


def test_names_are_data_and_never_markup(tmp_path):
    clients = [{**CLIENTS[0], "client": HOSTILE, "reason": HOSTILE, "node": HOSTILE}]
    rows = [{**row, HOSTILE: 1.0} for row in ROWS]
    write(tmp_path / "<b>", "<b>run", rows, clients, measure=HOSTILE)
    text = document(tmp_path / "<b>")
    ours = document(tmp_path / "nothing")
    assert text.count("<") == ours.count("<")
    assert data_in(text) == read_folder(tmp_path / "<b>")


@pytest.mark.parametrize("status", [None, "", "{", "[]", "7", "[" * 100_000])
def test_a_run_with_a_missing_or_damaged_status_has_no_clients(tmp_path, status):
    write(tmp_path)
    path = tmp_path / "fedrep" / "status.json"
    path.write_text(status) if status is not None else path.unlink()
    run = only_run(tmp_path)
    assert (run["state"], run["rounds"]) == ("", None)
    assert run["clients"] == []


@pytest.mark.parametrize(
    ("text", "accuracy"),
    [
        # The last line is still being written.
        (json.dumps(ROWS[0]) + '\n{"round": 3, "accu', [0.25]),
        ("[" * 100_000, None),
        (json.dumps({"round": 1, "bytes-down": "x"}) + "\n", "left out"),
    ],
)
def test_a_damaged_run_does_not_hide_others(tmp_path, text, accuracy):
    write(tmp_path, "a")
    write(tmp_path, "b")
    (tmp_path / "a" / "metrics.jsonl").write_text(text)
    runs = {run["name"]: run for run in read_folder(tmp_path)["runs"]}
    assert runs["b"]["columns"]["accuracy"] == [0.25, 0.75]
    found = runs["a"]["columns"].get("accuracy") if "a" in runs else "left out"
    assert found == accuracy


@pytest.fixture
def server(tmp_path):
    write(tmp_path)
    server = PageServer(tmp_path, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def ask(server, method="GET", path="/", **headers):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def test_the_served_page_follows_the_folder(server, tmp_path):
    assert ask(server) == (200, document(tmp_path))
    write(tmp_path, rows=[*ROWS, {**ROWS[1], "round": 3}])
    assert data_in(ask(server)[1])["runs"][0]["columns"]["round"] == [1, 2, 3]


def test_only_the_page_is_served_and_only_locally(server, tmp_path):
    assert server.server_address[0] == "127.0.0.1"
    for path in ("/fedrep/metrics.jsonl", "/../etc/passwd", "/%2e%2e/x"):
        assert ask(server, path=path) == (200, document(tmp_path))
    for method in ("HEAD", "POST", "PUT", "DELETE"):
        assert ask(server, method)[0] == 501
    # Foreign host names that resolve to this server (DNS rebinding).
    for host in ("evil.example", "evil.example:8765", "127.0.0.1.evil.example", ""):
        assert ask(server, Host=host)[0] == 403
    for host in ("localhost", "127.0.0.1:9", "[::1]:80", "192.0.2.1"):
        assert ask(server, Host=host)[0] == 200


def test_port_in_use_is_an_error(server, tmp_path, capsys):
    port = server.server_address[1]
    assert code_of(PageServer, tmp_path, port) == "page"
    assert main([str(tmp_path), "--port", str(port)]) == 2
    assert f"127.0.0.1:{port} cannot" in one_error(capsys.readouterr().err)


@pytest.mark.parametrize(
    "arguments", [["nowhere"], [".", "--port", "70000"], [".", "--port", "x"], []]
)
def test_bad_input_prints_one_line(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    one_error(capsys.readouterr().err)


def test_page_is_served_only_during_a_run(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    settings, address = {"output": str(tmp_path / "later")}, f"http://127.0.0.1:{port}/"
    with served_for({"page": port, **settings}), urlopen(address, timeout=10) as answer:
        assert data_in(answer.read().decode())["runs"] == []
    PageServer(tmp_path, port).server_close()
    with served_for({"page": 0, "output": "x"}):
        pass
