"""The table of a comparison, in three forms."""

from io import StringIO

from rich.console import Console

from flwr_frl.strategies.report.tables import cells, latex, markdown, show, write_tables

SUMMARIES = {
    "fedavg": {"accuracy": 0.5, "accuracy-weighted": 0.25, "bytes": 1_500_000},
    "own_50%": {"accuracy": 0.75, "accuracy-std-seeds": 0.0125, "seeds": 3, "r|2": 1.5},
}
ROWS = [
    ["algorithm", "accuracy", "by examples", "MB", "r|2"],
    ["fedavg", "50.00%", "25.00%", "1.5", ""],
    ["own_50%", "75.00% ± 1.25%", "", "", "1.5"],
]


def test_rows():
    assert cells(SUMMARIES) == ROWS
    assert cells(SUMMARIES, "validation")[0][1] == "validation accuracy"
    without = {"fedrep": {"loss": 0.125, "loss-weighted": 2.0}}
    assert cells(without) == [
        ["algorithm", "test loss", "by examples"],
        ["fedrep", "0.125", "2"],
    ]


def test_losses_and_metrics_of_several_seeds_have_their_deviation():
    spread = {"loss-std-seeds": 0.5, "r2": 0.25, "r2-std-seeds": 0.125, "seeds": 2}
    assert cells({"fedrep": {"loss": 2.0, **spread}}, "validation") == [
        ["algorithm", "validation loss", "r2"],
        ["fedrep", "2 ± 0.5", "0.25 ± 0.125"],
    ]


def test_the_legend_says_which_examples(tmp_path):
    write_tables(tmp_path, SUMMARIES, "validation")
    for name in ("table.md", "table.tex"):
        text = (tmp_path / name).read_text()
        assert "by examples: mean over all validation examples;" in text
        assert "test" not in text


def test_markdown():
    assert markdown(ROWS) == (
        "| algorithm | accuracy | by examples | MB | r\\|2 |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| fedavg | 50.00% | 25.00% | 1.5 |  |\n"
        "| own_50% | 75.00% ± 1.25% |  |  | 1.5 |\n"
    )


def test_latex():
    lines = latex(ROWS).splitlines()
    assert lines[1] == r"\begin{tabular}{lrrrr}"
    assert lines[-3] == r"own\_50\% & 75.00\% $\pm$ 1.25\% &  &  & 1.5 \\"
    assert lines[-1] == r"\end{tabular}"


def test_files(tmp_path):
    write_tables(tmp_path, SUMMARIES, "test")
    text = (tmp_path / "table.md").read_text()
    assert text.startswith(markdown(ROWS))
    assert "accuracy: mean over clients" in text
    assert (tmp_path / "table.tex").read_text().endswith(latex(ROWS))


def test_no_word_is_cut_on_a_narrow_terminal(monkeypatch):
    text = StringIO()
    narrow = Console(file=text, width=60)
    monkeypatch.setattr("flwr_frl.strategies.report.tables.console", lambda: narrow)
    show(SUMMARIES, "test")
    shown = text.getvalue()
    for word in ("algorithm", "accuracy", "examples", "own_50%", "75.00%", "1.25%"):
        assert word in shown


def test_no_column_is_lost_where_they_are_many(monkeypatch):
    text = StringIO()
    narrow = Console(file=text, width=40)
    monkeypatch.setattr("flwr_frl.strategies.report.tables.console", lambda: narrow)
    many = {f"metric-{i}": 0.1234 + i for i in range(12)}
    show({"fedrep": {"accuracy": 0.5, **many}}, "test")
    for name, value in many.items():
        assert name in text.getvalue()
        assert f"{value:.4g}" in text.getvalue()
