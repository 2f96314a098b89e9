"""Bad gossip settings yield a one-line error, and nothing is written."""

import pytest

from flwr_frl import cli


def run_config(text: str) -> tuple[str, str]:
    return ("--run-config", f"model='logistic' {text}")


BAD_SETTINGS = [
    ("graph='rign'", "unknown graph 'rign'; did you mean 'ring'?"),
    (
        "graph='nowhere.txt'",
        "unknown graph 'nowhere.txt'; known: complete, erdos-renyi",
    ),
    (
        "graph='erdos-renyi' edge-probability=0.0",
        "edge-probability is 0.0",
    ),
    (
        "graph='torus'",
        "the number of nodes of a torus is 5",
    ),
    ("graph='k-regular' graph-degree=1", "graph-degree is 1"),
    ("graph='k-regular' graph-degree=3", "graph-degree is 3"),
    (
        "graph='small-world' rewiring-probability=2.0",
        "rewiring-probability is 2.0",
    ),
    (
        "mixing='max-degree'",
        "mixing is 'max-degree'",
    ),
    *(
        (
            f"consensus-step={value}",
            f"consensus-step is {value}; expected auto, theory",
        )
        for value in (1.5, -0.1, 0.0, "nan")
    ),
    ("local-steps=0", "local-steps is 0"),
    ("local-steps=-3", "local-steps is -3"),
    ("local-steps=1.5", "local-steps is 1.5"),
    (
        "compressor='topk'",
        "compressor is 'topk'",
    ),
    ("compressor-k=0.0", "compressor-k is 0.0"),
    ("compressor-k=1.5", "compressor-k is 1.5"),
    ("compressor-k=-2", "compressor-k is -2.0"),
    ("compressor-k=inf", "compressor-k is inf"),
    ("compressor-k=nan", "compressor-k is nan"),
    (
        "compressor='qsgd' compressor-levels=0",
        "compressor-levels is 0",
    ),
    (
        "compressor='qsgd' compressor-levels=32768",
        "levels is 32768",
    ),
    (
        "trigger='often'",
        "trigger is 'often'",
    ),
    ("trigger='-1'", "trigger is '-1'"),
    ("trigger='1:2'", "trigger is '1:2'"),
    ("trigger='1:2:0'", "trigger is '1:2:0'"),
    (
        "learning-rate-schedule='cosine'",
        "learning-rate-schedule is 'cosine'",
    ),
    ("learning-rate-schedule='inverse:0'", "learning-rate-schedule is 'inverse:0'"),
    ("max-missed-rounds=0", "max-missed-rounds is 0"),
]


def assert_refused(arguments: list[str], line: str, tmp_path, capfd) -> None:
    capfd.readouterr()
    arguments = [*arguments, "--backend", "inline", "--rounds", "1", "--clients", "5"]
    assert cli.main([*arguments, "--output", "out"]) == 2
    out, err = capfd.readouterr()
    assert out.strip() == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert line in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "line"), BAD_SETTINGS, ids=[t for t, _ in BAD_SETTINGS]
)
def test_bad_settings(text, line, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert_refused(["squarm-sgd", *run_config(text)], line, tmp_path, capfd)


@pytest.mark.parametrize("text", ["graph='rign'", "graph='torus'", "local-steps=0"])
def test_nothing_is_run_before_a_bad_setting_of_the_second_algorithm(
    text, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    line = text.split("=")[1].strip("'").replace("torus", "a torus is 5")
    assert_refused(["fedavg", "squarm-sgd", *run_config(text)], line, tmp_path, capfd)


def test_one_node_is_no_graph(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    arguments = ["dpsgd", *run_config("partition='iid'"), "--backend", "inline"]
    assert cli.main([*arguments, "--clients", "1", "--output", "out"]) == 2
    assert "the number of nodes is 1" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
