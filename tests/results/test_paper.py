"""The LaTeX table, references and figures of a comparison."""

import shutil
import subprocess

import pytest
from compared_runs import FEDAVG, FEDPER, FEDREP, with_seeds, write_runs

from flwr_frl import compare
from flwr_frl.common.algorithms import ALGORITHMS
from flwr_frl.results.comparison import references, write_paper
from flwr_frl.results.results import task_title

PAPER = r"""\documentclass[twocolumn]{article}
\usepackage{booktabs}
\begin{document}
\begin{table}\centering\input{table}\caption{Results}\end{table}
\nocite{*}\bibliographystyle{plain}\bibliography{references}
\end{document}
"""


def lines_of(output) -> list[str]:
    text = (output / "table.tex").read_text()
    return [line for line in text.splitlines() if "&" in line]


def test_best_results_and_those_that_do_not_differ_are_bold(tmp_path):
    with_seeds(tmp_path, 2, fedavg=FEDAVG, fedrep=FEDREP, fedper=FEDPER)
    write_paper(tmp_path, compare(tmp_path))
    # With eight clients, FedPer differs from FedRep in one, and FedAvg in all.
    assert lines_of(tmp_path) == [
        r"algorithm & accuracy (\%) & worst tenth (\%) & MB & seconds \\",
        r"FedRep & \textbf{68.2 $\pm$ 0.7} & 19.5 $\pm$ 0.7 & 0.0 & 8.0 \\",
        r"FedPer & \textbf{67.0 $\pm$ 0.7} & 19.5 $\pm$ 0.7 & 0.0 & 8.0 \\",
        r"FedAvg & 44.5 $\pm$ 0.7 & 9.5 $\pm$ 0.7 & 0.0 & 8.0 \\",
    ]
    # Bold does not depend on the baseline.
    before = lines_of(tmp_path)
    write_paper(tmp_path, compare(tmp_path, baseline="fedavg"))
    assert lines_of(tmp_path) == before


def test_the_figure_is_as_wide_as_a_column(tmp_path, figures):
    write_paper(tmp_path / "paper", compare(write_runs(tmp_path, fedrep=FEDREP)))
    # 3.3 inches of 72 points
    assert b"/MediaBox [ 0 0 237.6" in (tmp_path / "paper/accuracy.pdf").read_bytes()
    assert (tmp_path / "paper" / "accuracy.png").is_file()


def test_each_algorithm_has_a_reference():
    assert [name for name in ALGORITHMS if not references([name])] == ["local"]
    assert references(["fedrep (slow)"]) == references(["fedrep"])


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="no LaTeX is installed")
def test_the_table_compiles_and_fits_into_a_column(tmp_path):
    methods = {"fedavg-ft": FEDAVG, "My_Rep": FEDREP}
    folders = [write_runs(tmp_path / "a_#%", **methods)]
    folders.append(write_runs(tmp_path / "~^&{z}", **methods))
    write_paper(tmp_path, compare(*folders))
    (tmp_path / "paper.tex").write_text(PAPER)
    command = ("pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper")
    for words in (command, ("bibtex", "paper"), command):
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert "Overfull" not in done.stdout
    assert "Warning" not in (tmp_path / "paper.blg").read_text()


def test_a_task_of_own_data_is_named_by_its_file():
    own = {"task": "table", "data-dir": "/home/me/gait_2024.csv"}
    assert task_title(own) == "gait_2024"
    assert task_title({**own, "task": "cifar10"}) == "cifar10"
    assert task_title({"task": "mine.clinics:heart"}) == "heart"
    assert task_title({"task": "hf:owner/letters"}) == "hf:owner/letters"
    assert task_title({"task": "table", "data-dir": ""}) == "table"
