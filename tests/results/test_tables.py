"""The table of a comparison as cells, LaTeX and HTML."""

import re
from io import StringIO

from rich.console import Console

from flwr_frl.results.tables import cells, latex, legend, terminal

SUMMARIES = {
    "fedavg": {"accuracy": 0.5, "accuracy-global": 0.25, "bytes": 1_500_000},
    "own_50%": {"accuracy": 0.75, "accuracy-std-seeds": 0.0125, "seeds": 3, "r|2": 1.5},
}
ROWS = [
    ["algorithm", "accuracy", "global model", "MB", "r|2"],
    ["fedavg", "50.00%", "25.00%", "1.5", ""],
    ["own_50%", "75.00% ± 1.25%", "", "", "1.5"],
]


def test_rows():
    assert cells(SUMMARIES) == ROWS
    # Losses are shown only without accuracies. Losses and metrics have deviations, too.
    spread = {"loss-std-seeds": 0.5, "r2": 0.25, "r2-std-seeds": 0.125, "seeds": 2}
    assert cells({"fedrep": {"loss": 2.0, **spread}}) == [
        ["algorithm", "loss", "r2"],
        ["fedrep", "2 ± 0.5", "0.25 ± 0.125"],
    ]


def test_number_of_clients_is_shown_beside_the_means():
    summary = {"accuracy": 0.5, "evaluated": 10.0, "auc": 0.75, "auc-clients": 7.0}
    assert cells({"fedavg": {**summary, "lost-replies": 0.0}}) == [
        ["algorithm", "accuracy", "auc"],
        ["fedavg", "50.00%", "0.75 (7 clients)"],
    ]
    lost = {"fedavg": {"lost-replies": 0.0}, "fedrep": {"lost-replies": 0.6}}
    assert [line[1:] for line in cells(lost)] == [["lost replies"], ["0%"], ["60%"]]


def test_details_and_empty_entries_are_left_out():
    summary = {"accuracy": 0.5, "rounds": 4, "p": "", "accuracy-last": 0.5}
    summary["protocol"] = "last evaluated round"
    every = {"fedavg": summary, "local": {**summary, "rounds": 5}}
    assert cells(every)[0] == ["algorithm", "accuracy"]


def test_latex():
    lines = latex(ROWS, bold={(2, 1)}).splitlines()
    assert lines[2] == r"\begin{tabular}{lrrrr}"
    assert lines[4] == r"algorithm & accuracy (\%) & global model (\%) & MB & r|2 \\"
    assert lines[-3] == r"own\_50\% & \textbf{75.00 $\pm$ 1.25} & -- & -- & 1.5 \\"
    assert lines[-1] == r"\end{tabular}}"


def test_the_legend_names_examples_protocols_and_models():
    validated = {n: {**s, "evaluated-on": "validation"} for n, s in SUMMARIES.items()}
    assert "on validation examples" in legend(validated)
    adapted = {"protocol": "last evaluated round", "tested-model": "adapted"}
    received = {"protocol": "mean of last 3 rounds", "tested-model": "adapted"}
    text = legend({"fedavg-ft": adapted, "fedavg": received, "moon": received})
    assert "last evaluated round (fedavg-ft)" in text
    assert "mean of last 3 rounds (fedavg, moon); tested model: adapted;" in text


def test_a_table_fits_into_the_terminal(monkeypatch):
    def lines(width, is_terminal=True):
        console = Console(file=StringIO(), width=width, force_terminal=is_terminal)
        monkeypatch.setattr("flwr_frl.results.tables.Console", lambda: console)
        plain = re.sub(r"\x1b\[[\d;]*m", "", terminal(ROWS))
        return [line.split() for line in plain.splitlines() if line.strip()]

    every = [" ".join(row).split() for row in ROWS]
    assert [line for line in lines(80) if "─" not in line[0]] == every
    head, _, _, own, more = lines(40)
    assert (head, own) == (["algorithm", "accuracy"], every[2][:4])
    assert more[-4:] == ["global", "model,", "MB,", "r|2."]
    # Files and pipes receive all columns.
    assert lines(40, False)[-1] == every[2]
