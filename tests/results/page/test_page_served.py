"""The results page over HTTP."""

import http.client
import json
import socket
import threading
from urllib.request import urlopen

import pytest
from command_line import one_error
from page_folders import ROWS, write
from refusals import code_of

from flwr_frl.results.page.__main__ import main
from flwr_frl.results.page.document import document
from flwr_frl.results.page.folder import read_folder
from flwr_frl.results.page.serving import (
    PageServer,
    _Handler,
    served,
    served_for,
)


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
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=names)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_a_closed_connection_prints_nothing(server, monkeypatch, capsys):
    def fail(handler):
        raise ConnectionResetError

    monkeypatch.setattr(_Handler, "do_GET", fail)
    with pytest.raises(http.client.RemoteDisconnected):
        ask(server)
    assert capsys.readouterr().err == ""


def test_the_served_page_and_its_data_are_cached_until_a_run_changes(server, tmp_path):
    answer, body = ask(server)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert body.decode() == document(read_folder(tmp_path) | {"live": True})
    answer, body = ask(server, path="/data.json")
    assert answer.headers["Content-Type"] == "application/json"
    assert json.loads(body) == read_folder(tmp_path) | {"live": True}
    tag = answer.headers["ETag"]
    answer, body = ask(server, path="/data.json", If_None_Match=tag)
    assert (answer.status, body) == (304, b"")
    write(tmp_path, rows=[*ROWS, {**ROWS[1], "round": 3}])
    answer, body = ask(server, path="/data.json", If_None_Match=tag)
    assert answer.status == 200
    assert json.loads(body)["runs"][0]["round"] == 3


def test_only_the_page_and_its_data_are_served_and_only_locally(server):
    assert server.server_address[0] == "127.0.0.1"
    for path in (
        "/fedrep/metrics.jsonl",
        "/fedrep/data.json",
        "/../etc/passwd",
        "/%2e%2e/x",
        "x",
    ):
        assert ask(server, path=path)[0].status in (400, 404)
    for method in ("HEAD", "POST", "PUT", "DELETE"):
        assert ask(server, method)[0].status == 501
    # Foreign host names that resolve to this server (DNS rebinding).
    for host in ("evil.example", "evil.example:8765", "127.0.0.1.evil.example", ""):
        assert ask(server, Host=host)[0].status == 403
    for host in ("localhost", "127.0.0.1:9", "[::1]:80", "192.0.2.1"):
        assert ask(server, Host=host)[0].status == 200


def test_port_in_use_is_an_error(server, tmp_path, capsys):
    port = server.server_address[1]
    assert code_of(PageServer, tmp_path, port) == "page"
    assert main([str(tmp_path), "--port", str(port)]) == 2
    assert f"127.0.0.1:{port} cannot" in one_error(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere"], "'nowhere' is not a folder"),
        ([".", "--port", "70000"], "page is 70000; expected a port, 0 to 65535"),
        ([".", "--port", "x"], "expected an integer, not 'x'"),
        ([".", "--host", "192.0.2.7"], "192.0.2.7:8765 cannot be listened on"),
        ([], "the following arguments are required: DIR"),
    ],
)
def test_bad_input_prints_one_line(arguments, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert line in one_error(capsys.readouterr().err)


def test_page_is_served_only_during_a_run(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    settings, address = {"output": str(tmp_path / "later")}, f"http://127.0.0.1:{port}/"
    with served_for({"page": port, **settings}), urlopen(address, timeout=10) as answer:
        assert b"No run has written" in answer.read()
    with served(tmp_path, port) as url:
        assert url == address
    with served_for({"page": 0, "output": "x"}):
        pass
