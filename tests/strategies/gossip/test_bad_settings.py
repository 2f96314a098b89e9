"""Bad gossip settings yield a one-line error, and nothing is written."""

import pytest

from flwr_frl import cli

# Run configs whose last setting is invalid, and its value as the error shows it
BAD_VALUES = [
    ("graph='erdos-renyi' edge-probability=0.0", "0.0"),
    *((f"consensus-step={value}", f"'{value}'") for value in (1.5, -0.1, 0.0, "nan")),
    *((f"local-steps={value}", str(value)) for value in (0, 1.5)),
    ("compressor='topk'", "'topk'"),
    ("compressor-k=1.5", "1.5"),
    ("compressor='qsgd' compressor-levels=32768", "32768"),
    ("trigger='1:2'", "'1:2'"),
    ("learning-rate-schedule='cosine'", "'cosine'"),
    ("max-missed-rounds=0", "0"),
]
BAD_SETTINGS = [
    ("graph='rign'", "unknown graph 'rign'; did you mean 'ring'?"),
    ("graph='nowhere.txt'", "unknown graph 'nowhere.txt'; known: complete, erdos-"),
    ("graph='torus'", "the number of nodes of a torus is 5"),
    *(
        (text, f"{text.split()[-1].partition('=')[0].split('-')[-1]} is {value}")
        for text, value in BAD_VALUES
    ),
]


def assert_refused(algorithms, config, line, tmp_path, capfd, clients=5) -> None:
    capfd.readouterr()
    arguments = [*algorithms, "--run-config", f"model='logistic' {config}"]
    arguments += ["--backend", "inline", "--rounds", "1", "--clients", str(clients)]
    assert cli.main([*arguments, "--output", "out"]) == 2
    out, err = capfd.readouterr()
    assert out.strip() == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert line in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "line"), BAD_SETTINGS, ids=lambda value: value)
def test_bad_setting_fails_with_a_one_line_error(
    text, line, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    assert_refused(["squarm-sgd"], text, line, tmp_path, capfd)


def test_graph_of_one_node_is_an_error(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    line = "the number of nodes is 1"
    assert_refused(["dpsgd"], "partition='iid'", line, tmp_path, capfd, clients=1)
