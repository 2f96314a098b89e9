"""Draw the README's figure: the accuracy of twenty clients with one or two digits each.

``python -m docs.heads RESULTS`` draws ``docs/heads.svg`` from the results of
``python simulation.py fedavg fedrep --output RESULTS``.
"""

import csv
import json
import sys
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt

PICTURE = Path(__file__).parent / "heads.svg"
# Label and colour; all colours can be read on a light and on a dark page.
ALGORITHMS = {
    "fedavg": ("one global model (FedAvg)", "#bf8700"),
    "fedrep": ("personal heads (FedRep)", "#218bff"),
}
GREY = "#7d8590"
LAST = 10


def accuracies(folder: Path, algorithm: str) -> dict[str, float]:
    """Return each client's mean accuracy over the last rounds, in %."""
    by_client: dict[str, list[float]] = {}
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            is_of_client = row["algorithm"] == algorithm and row["client"]
            if row["metric"] == "accuracy" and is_of_client:
                by_client.setdefault(row["client"], []).append(float(row["value"]))
    return {name: 100 * fmean(values[-LAST:]) for name, values in by_client.items()}


def main() -> None:
    """Draw the figure: two bars for each client, labelled with its digits."""
    plt.rcParams |= {"svg.hashsalt": "heads", "svg.fonttype": "none"}
    plt.rcParams |= {"text.color": GREY, "font.size": 11}
    figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
    for shift, (algorithm, (label, colour)) in enumerate(ALGORITHMS.items()):
        results = Path(sys.argv[1])
        by_client = accuracies(results, algorithm)
        text = (results / algorithm / "clients.json").read_text(encoding="utf-8")
        clients = json.loads(text)
        places = [i + 0.4 * shift for i in range(len(clients))]
        label = f"{label}: {fmean(by_client.values()):.0f} %"
        heights = [by_client[name] for name in clients]
        axes.bar(places, heights, 0.36, label=label, color=colour)
    digits = [" ".join(client["class-counts"]) for client in clients.values()]
    axes.set_xticks([i + 0.2 for i in range(len(digits))], digits)
    axes.set_yticks([0, 50, 100], ["0 %", "50 %", "100 %"])
    axes.set_xlabel("the digits that each client has", color=GREY)
    axes.set_ylabel("accuracy on its own test data", color=GREY)
    axes.tick_params(colors=GREY, length=0)
    axes.grid(axis="y", color=GREY, linewidth=0.3)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    plt.savefig(PICTURE, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
