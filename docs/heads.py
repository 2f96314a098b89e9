"""Draw the README's figure: the accuracy of each of twenty clients.

``python -m docs.heads RESULTS`` draws ``docs/heads.svg`` from the results of
``python simulation.py fedavg fedrep --output RESULTS``.
"""

import json
import sys
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt

from flwr_frl.results.figures import looks
from flwr_frl.results.results import METRICS, client_means, read_rows, result_rows

PICTURE = Path(__file__).parent / "heads.svg"
LABELS = {"fedavg": "one global model\n(FedAvg)", "fedrep": "personal heads\n(FedRep)"}
GREY = "#7d8590"
LAST = 10


def accuracies(folder: Path, algorithm: str) -> dict[str, float]:
    """Return each client's mean accuracy over the last rounds, in %."""
    run = folder / algorithm
    final = result_rows(read_rows(run / METRICS), "mean-last", LAST)
    means = client_means(run, "accuracy", {row["round"] for row in final})
    return {name: 100 * mean for name, mean in means.items()}


def main() -> None:
    """Draw the figure: two bars for each client, and the mean of each method."""
    plt.rcParams |= {"svg.hashsalt": "heads", "svg.fonttype": "none"}
    plt.rcParams |= {"text.color": GREY, "font.size": 11}
    _, axes = plt.subplots(figsize=(9, 3.1), layout="constrained")
    results = Path(sys.argv[1])
    colours = {name: colour for name, (colour, _) in looks(LABELS).items()}
    values = {name: accuracies(results, name) for name in LABELS}
    text = (results / "fedrep" / "clients.json").read_text(encoding="utf-8")
    about = json.loads(text)
    clients = sorted(about, key=values["fedavg"].__getitem__)
    for shift, (name, label) in enumerate(LABELS.items()):
        mean, colour = fmean(values[name].values()), colours[name]
        places = [i + 0.4 * shift for i in range(len(clients))]
        axes.bar(places, [values[name][c] for c in clients], 0.36, color=colour)
        axes.plot([-0.4, len(clients) + 0.2], [mean, mean], color=colour, lw=1, ls="--")
        place = len(clients) + 0.4, mean
        text = f"{label}\nmean {mean:.0f} %"
        axes.annotate(text, place, color=colour, va="center", weight="bold")
    digits = [", ".join(about[client]["class-counts"]) for client in clients]
    axes.set_xticks([i + 0.2 for i in range(len(digits))], digits)
    axes.set_yticks([0, 50, 100], ["0 %", "50 %", "100 %"])
    axes.set_xlim(-0.5, len(clients) + 5)
    axes.set_xlabel("the digits that each of the 20 clients has", color=GREY)
    axes.set_ylabel("test accuracy", color=GREY)
    axes.tick_params(colors=GREY, length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.spines[:].set_visible(False)
    plt.savefig(PICTURE, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
