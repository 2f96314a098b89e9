"""Draw the README's figure: the accuracy of twenty clients with one or two digits each.

``python -m docs.heads RESULTS`` draws ``docs/heads.svg`` from the results of
``python simulation.py fedavg fedrep --output RESULTS``.
"""

import csv
import json
import sys
from pathlib import Path
from statistics import fmean

PICTURE = Path(__file__).parent / "heads.svg"
ALGORITHMS = {
    "fedavg": "one global model (FedAvg)",
    "fedrep": "personal heads (FedRep)",
}
LAST = 10
STYLE = """
    .ground { fill: #ffffff; } .text { fill: #1f2328; } .small { fill: #57606a; }
    .global { fill: #9a6700; } .heads { fill: #0969da; } .line { stroke: #8c959f; }
    @media (prefers-color-scheme: dark) {
      .ground { fill: #0d1117; } .text { fill: #e6edf3; } .small { fill: #9198a1; }
      .global { fill: #d29922; } .heads { fill: #4493f8; } .line { stroke: #656c76; }
    }
"""
LEFT, STEP, FLOOR, HEIGHT = 60, 38, 220, 140


def accuracies(folder: Path, algorithm: str) -> dict[str, float]:
    """Return each client's mean accuracy over the last rounds of an algorithm."""
    by_client: dict[str, list[float]] = {}
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            is_of_client = row["algorithm"] == algorithm and row["client"]
            if row["metric"] == "accuracy" and is_of_client:
                by_client.setdefault(row["client"], []).append(float(row["value"]))
    return {name: fmean(values[-LAST:]) for name, values in by_client.items()}


def picture(data: dict[str, dict[str, float]], digits: dict[str, str]) -> str:
    """Return the figure: two bars for each client, labelled with its digits."""
    names = list(digits)
    width = LEFT + STEP * len(names) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 300" '
        'font-family="system-ui, sans-serif" font-size="13" role="img" '
        'aria-label="Accuracy of twenty clients with one global model and with '
        'personal heads">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{width}" height="300" rx="8"/>',
    ]
    for i, (algorithm, kind) in enumerate((("fedavg", "global"), ("fedrep", "heads"))):
        mean = 100 * fmean(data[algorithm].values())
        x = LEFT + 330 * i
        lines += [
            f'<rect class="{kind}" x="{x}" y="22" width="14" height="14" rx="2"/>',
            f'<text class="text" x="{x + 22}" y="34">{ALGORITHMS[algorithm]}: '
            f'<tspan font-weight="700">{mean:.0f} %</tspan></text>',
        ]
    for percent in (0, 50, 100):
        y = FLOOR - HEIGHT * percent / 100
        lines += [
            f'<line class="line" x1="{LEFT - 6}" x2="{width - 20}" y1="{y:g}" '
            f'y2="{y:g}" stroke-width="{1 if percent == 0 else 0.4}"/>',
            f'<text class="small" x="{LEFT - 12}" y="{y + 4:g}" text-anchor="end">'
            f"{percent} %</text>",
        ]
    for i, name in enumerate(names):
        for j, (algorithm, kind) in enumerate(
            (("fedavg", "global"), ("fedrep", "heads"))
        ):
            height = HEIGHT * data[algorithm][name]
            lines.append(
                f'<rect class="{kind}" x="{LEFT + STEP * i + 4 + 14 * j}" '
                f'y="{FLOOR - height:.1f}" width="12" height="{height:.1f}"/>'
            )
        lines.append(
            f'<text class="text" x="{LEFT + STEP * i + 17}" y="{FLOOR + 20}" '
            f'text-anchor="middle">{digits[name]}</text>'
        )
    middle = (LEFT + width) // 2
    lines += [
        f'<text class="small" x="{middle}" y="272" text-anchor="middle">'
        "Accuracy of each client on its own test data. The labels are the digits that "
        "the client has.</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Draw the figure."""
    data: dict[str, dict[str, float]] = {}
    digits: dict[str, str] = {}
    for algorithm in ALGORITHMS:
        folder = Path(sys.argv[1])
        data[algorithm] = accuracies(folder, algorithm)
        path = folder / algorithm / "clients.json"
        clients = json.loads(path.read_text(encoding="utf-8"))
        digits = {n: " ".join(c["class-counts"]) for n, c in clients.items()}
    PICTURE.write_text(picture(data, digits), encoding="utf-8")


if __name__ == "__main__":
    main()
