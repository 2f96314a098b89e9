"""The results page: its data, damaged folders, and the server."""

import http.client
import json
import re
import threading

import pytest
from command_line import one_error
from page_folders import CLIENTS, ROWS, write
from refusals import code_of

from flwr_frl.results import uplot
from flwr_frl.results.page import PageServer, document, main, write_page
from flwr_frl.results.page_data import MOST_POINTS, read_folder

HOSTILE = "</script><!--<script>\u2028\"'&amp;<img src=x>"


def only_method(place) -> dict:
    (method,) = read_folder(place)["methods"]
    return method


def columns(table: list[list[str]]) -> dict[str, list[str]]:
    return {heading: values for heading, *values in zip(*table, strict=True)}


def data_in(text: str) -> dict:
    return json.loads(re.search(r'id="data">([^<]*)</script>', text)[1])


def test_the_page_contains_its_data_and_loads_nothing(tmp_path):
    write(tmp_path / "results")
    write_page(tmp_path / "results")
    text = (tmp_path / "results" / "report.html").read_text()
    assert data_in(text) == json.loads(json.dumps(read_folder(tmp_path / "results")))
    assert "<h1>results</h1>" in text
    assert str(tmp_path) not in text
    assert "default-src 'none'" in text
    assert uplot.LICENCE in text


def test_data_of_a_run(tmp_path):
    write(tmp_path, settings={"num-server-rounds": 10, "algorithm": "fedrep"})
    assert only_method(tmp_path / "fedrep")["name"] == "FedRep"
    data = read_folder(tmp_path)
    (method,) = data["methods"]
    assert (method["name"], method["metric"]) == ("FedRep", "accuracy")
    assert method["curves"][0] == [[1, 2], [0.25, 0.75], [0, 0]]
    assert method["curves"][1] == [[1, 2], [2.0, 1.0], [0, 0]]
    table = columns(data["table"])
    # The mean of both rounds, as there are fewer than ten.
    assert table["accuracy"] == ["50.00%"]
    assert table["MB"] == ["7.5"]
    assert table["state"] == ["running: round 2 of 10"]
    assert data["settings"] == "num-server-rounds=10"


def test_seeds_of_a_method_are_one_row_and_a_curve_with_deviations(tmp_path):
    for seed, accuracy in enumerate([0.5, 0.7, 0.9]):
        rows = [{**ROWS[0], "client-metrics": {"a": {"accuracy": accuracy}}}]
        rows[0]["accuracy"] = accuracy
        settings = {"seed": seed, "algorithm": "fedrep", "momentum": 0.6}
        more = {"settings": settings, "state": "finished" if seed < 2 else "running"}
        write(tmp_path, f"seed-{seed}/fedrep", rows, **more)
    data = read_folder(tmp_path)
    # The third seed has not ended.
    (method,) = data["methods"]
    rounds, means, deviations = method["curves"][0]
    assert (rounds, means) == ([1], [pytest.approx(0.6)])
    assert deviations == [pytest.approx(0.02**0.5)]
    assert method["clients"] == {"a": pytest.approx(0.6)}
    table = columns(data["table"])
    assert table["runs"] == ["2"]
    assert table["accuracy"] == ["60.00% ± 14.14%"]
    # Runs with another setting are another method.
    write(tmp_path, "seed-3/fedrep", rows, settings={"seed": 3})
    data = read_folder(tmp_path)
    assert columns(data["table"])["settings"] == ["momentum=0.5", "momentum=0.6"]


def test_methods_are_compared_with_the_best_on_the_clients(tmp_path):
    for name, shift in ("a", 0.0), ("b", -0.1), ("c", -0.001):
        clients = {str(i): {"accuracy": 0.5 + i / 50} for i in range(10)}
        for i, entry in enumerate(clients.values()):
            entry["accuracy"] += shift * (1 if name == "b" or i % 2 else -1)
        mean = sum(entry["accuracy"] for entry in clients.values()) / 10
        rows = [{**ROWS[0], "accuracy": mean - (name == "c") / 100}]
        write(tmp_path, name, [{**rows[0], "client-metrics": clients}])
    table = columns(read_folder(tmp_path)["table"])
    assert table["algorithm"] == ["a", "c", "b"]
    assert table["wins/ties/losses"] == ["", "5/0/5", "0/0/10"]
    # All ten clients are worse: 2 / 2**10, times 2 by Holm.
    assert table["p"][::2] == ["", "0.004"]
    assert float(table["p"][1]) > 0.05


@pytest.mark.parametrize("devices", [True, False])
def test_only_devices_have_connections(tmp_path, devices):
    write(tmp_path, devices=devices)
    table = columns(read_folder(tmp_path)["clients"])
    about = {
        **{"client": ["pi-1", "pi-2"], "examples": ["1234", "7"]},
        "test examples": ["5", "5"],
    }
    if devices:
        then = table["last seen"][1]
        assert re.fullmatch(r"2023-11-1\d \d\d:\d\d", then)
        about |= {"last seen": ["now", then], "last round": ["2", "1"]}
        about |= {"rejected": ["0", "1"], "unanswered": ["0", "0"]}
        about |= {"node": ["9007199254740993", ""], "last problem": ["", "is bad"]}
    assert table == about


def test_long_curves_are_thinned_and_keep_their_last_round(tmp_path):
    begun = {name: value for name, value in ROWS[0].items() if name != "accuracy"}
    rows = [{**begun, "round": i, "train-loss": i / 2} for i in range(1, 1002)]
    rows[9] |= {"evaluated": 1, "accuracy": 0.5}
    write(tmp_path, rows=rows)
    accuracy, loss = only_method(tmp_path)["curves"]
    assert MOST_POINTS // 2 <= len(loss[0]) <= MOST_POINTS
    assert [values[-1] for values in loss] == [1001, 500.5, 0]
    assert accuracy == [[10], [0.5], [0]]


def test_runs_are_found_in_all_folders_the_deepest_last(tmp_path):
    # The last one is an archived run of a search over seeds.
    archived = "fedper/point-0/seed-1/earlier-1a2b/fedper"
    names = ["fedavg", "earlier-1a2b/fedrep", "fedper/point-0/fedper", archived]
    for name in names[::-1]:
        write(tmp_path, name)
    found = [method["name"] for method in read_folder(tmp_path)["methods"]]
    assert found == ["FedAvg", *names[1:3], archived.replace("seed-1/", "")]


def test_names_are_data_and_never_markup(tmp_path):
    clients = [{**CLIENTS[0], "client": HOSTILE, "reason": HOSTILE, "node": HOSTILE}]
    rows = [{**row, HOSTILE: 1.0} for row in ROWS]
    settings = dict.fromkeys(("algorithm", "task", HOSTILE), HOSTILE)
    write(tmp_path / "<b>", "<b>run", rows, clients, settings=settings)
    text = document(tmp_path / "<b>")
    ours = document(tmp_path / "nothing")
    assert text.count("<") == ours.count("<")
    assert data_in(text) == json.loads(json.dumps(read_folder(tmp_path / "<b>")))


@pytest.mark.parametrize("status", [None, "", "{", "[]", "7", "[" * 100_000])
def test_a_run_with_a_missing_or_damaged_status_has_no_clients(tmp_path, status):
    write(tmp_path)
    path = tmp_path / "fedrep" / "status.json"
    path.write_text(status) if status is not None else path.unlink()
    data = read_folder(tmp_path)
    assert columns(data["table"])["accuracy"] == ["50.00%"]
    assert data["clients"] == [["client"]]


@pytest.mark.parametrize(
    ("file", "text", "left"),
    [
        # The last line is still being written.
        ("metrics", json.dumps(ROWS[0]) + '\n{"round": 3, "accu', [0.25]),
        ("metrics", "[" * 100_000, []),
        ("metrics", json.dumps({"round": 1, "bytes-down": "x"}) + "\n", None),
        ("status", '{"settings": {"seed": []}}', None),
        ("status", '{"clients": 5}', None),
        ("status", '{"clients": [{"node": null}]}', None),
    ],
)
def test_a_damaged_run_does_not_hide_others(tmp_path, file, text, left):
    write(tmp_path, "a")
    write(tmp_path, "b")
    ending = "jsonl" if file == "metrics" else "json"
    (tmp_path / "a" / f"{file}.{ending}").write_text(text)
    curves = {m["name"]: m["curves"] for m in read_folder(tmp_path)["methods"]}
    assert curves.pop("b")[0][1] == [0.25, 0.75]
    found = {name: accuracy[1] for name, (accuracy, _) in curves.items()}
    assert found == ({} if left is None else {"a": left})


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
    assert data_in(ask(server)[1])["methods"][0]["curves"][0][0] == [1, 2, 3]


def test_only_the_page_is_served_and_only_locally(server, tmp_path):
    assert server.server_address[0] == "127.0.0.1"
    for path in ("/fedrep/metrics.jsonl", "/../etc/passwd", "/%2e%2e/x"):
        assert ask(server, path=path) == (200, document(tmp_path))
    for method in ("HEAD", "POST", "PUT", "DELETE"):
        assert ask(server, method)[0] == 501
    # Foreign host names that resolve to this server (DNS rebinding).
    for host in ("evil.example:8765", "127.0.0.1.evil.example", "192.0.2.1", ""):
        assert ask(server, Host=host)[0] == 403
    for host in ("localhost", "127.0.0.1:9"):
        assert ask(server, Host=host)[0] == 200


def test_port_in_use_is_an_error(server, tmp_path, capsys):
    port = server.server_address[1]
    assert code_of(PageServer, tmp_path, port) == "port"
    assert main([str(tmp_path), "--port", str(port)]) == 2
    assert f"port is {port}; expected a" in one_error(capsys.readouterr().err)


@pytest.mark.parametrize(
    "arguments", [["nowhere"], [".", "--port", "70000"], [".", "--port", "x"], []]
)
def test_bad_input_prints_one_line(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    one_error(capsys.readouterr().err)
