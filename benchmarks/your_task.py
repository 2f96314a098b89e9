"""Personal and global models on the examples of ``docs/your-task.md`` and text folders.

The guide's own files are written into an empty folder and run from there, for more
rounds than in the guide. The algorithm ``local`` is added for comparison.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.common import RESULTS, markdown, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flwr_frl.results.results import read_rows  # noqa: E402

NAME = "your_task"
FILE = re.compile(r"<!-- file: (.*?) -->\n```\w+\n(.*?)```\n<!-- end -->", re.DOTALL)
ALGORITHMS = ("fedrep", "fedavg", "local")
CONFIG = "evaluate-every=1 evaluate-last=1"
LETTERS = "batch-size=50 learning-rate=0.5 momentum=0.9 head-epochs=2"


class Example(NamedTuple):
    """An example, which is a panel of the figure.

    Parameters
    ----------
    title, metric : str
        Title of the panel, and its metric.
    arguments : str
        Flags of ``simulation.py``.
    config : str
        Value of ``--run-config``.
    algorithms : tuple of str
        Algorithms to run.
    """

    title: str
    metric: str
    arguments: str
    config: str
    algorithms: tuple[str, ...] = ALGORITHMS


PHOTOS = "--task image-folder --data-dir photos --clients 6 --rounds 10"
EXAMPLES = {
    "tables": Example(
        "sensors: predictions within 0.2",
        "near",
        "--task mine.tables:greenhouse --clients 20 --rounds 40",
        "learning-rate=0.05 representation-epochs=5 rows=32",
    ),
    "texts": Example(
        "next letter, a custom GRU",
        "accuracy",
        "--task mine.texts:dialects --clients 8 --rounds 15",
        f"{LETTERS} representation-epochs=2",
    ),
    "folder": Example(
        "next letter, text-folder's LSTM",
        "accuracy",
        "--task text-folder --data-dir texts --clients 8 --rounds 15",
        f"{LETTERS} representation-epochs=2 lstm-width=64 sequence-length=8",
    ),
    "backbone": Example(
        "20 photos, ResNet-18 with weights",
        "accuracy",
        PHOTOS,
        'model="resnet18" weights="backbone.pth" augment=false',
    ),
    "scratch": Example(
        "20 photos, ResNet-18 from scratch",
        "accuracy",
        PHOTOS,
        'model="resnet18" augment=false',
    ),
}


def prepare(home: Path, environment: dict[str, str]) -> None:
    """Write the guide's files, the photos, the backbone and the texts."""
    guide = (ROOT / "docs" / "your-task.md").read_text(encoding="utf-8")
    for name, text in FILE.findall(guide):
        path = home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    texts = (
        "from pathlib import Path; from mine.texts import written\n"
        "Path('texts').mkdir()\n"
        "for i in range(8): Path(f'texts/{i}.txt').write_text(written(i))"
    )
    for words in (["-m", "mine.photos"], ["-c", texts]):
        subprocess.run([sys.executable, *words], cwd=home, env=environment, check=True)


def simulate(name: str, home: Path, environment: dict[str, str], seed: int) -> None:
    """Run an example's algorithms."""
    example = EXAMPLES[name]
    words = [*example.algorithms, *example.arguments.split(), "--fraction", "1"]
    words += ["--seed", str(seed), "--output", name]
    words += ["--run-config", f"{CONFIG} {example.config}"]
    command = [sys.executable, str(ROOT / "simulation.py"), *words]
    subprocess.run(command, cwd=home, env=environment, check=True)


def panels(runs: dict[str, dict[str, list[Any]]]) -> None:
    """Plot a panel for each example."""
    figure = Figure(figsize=(4 * len(runs), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, curves) in zip(
        figure.subplots(1, len(runs)), runs.items(), strict=True
    ):
        example = EXAMPLES[name]
        for algorithm, values in curves.items():
            rounds = range(1, len(values) + 1)
            axes.plot(rounds, values, label=algorithm, marker=".", ms=3)
        axes.set_title(example.title, fontsize=10)
        axes.set_xlabel("round")
        axes.set_ylabel(f"{example.metric}, mean over clients")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(RESULTS / f"{NAME}.png", dpi=110)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    runs: dict[str, dict[str, list[Any]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        paths = os.pathsep.join([str(home), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": directory}
        prepare(home, environment)
        for name, example in EXAMPLES.items():
            simulate(name, home, environment, options.seed)
            runs[name] = {
                algorithm: [
                    row[example.metric]
                    for row in read_rows(home / name / algorithm / "metrics.jsonl")
                ]
                for algorithm in example.algorithms
            }
    rows = [
        (EXAMPLES[name].title, *(f"{100 * curves[a][-1]:.1f}" for a in ALGORITHMS))
        for name, curves in runs.items()
    ]
    body = (
        "In % after the last round, mean over clients; each client is tested on its "
        "own data.\n\n"
        + markdown(["", *ALGORITHMS], rows)
        + f"\n![personal against global]({NAME}.png)\n"
    )
    write(NAME, "Custom tasks: personal and global models", body, {"runs": runs})
    panels(runs)


if __name__ == "__main__":
    main()
