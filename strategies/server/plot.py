"""The plot of a run."""

from pathlib import Path

from strategies.server.results import METRICS, PLOT, read_rows


def plot(output: Path, algorithms: list[str]) -> None:
    """Draw ``accuracy.png``: quality and training loss of each algorithm by round."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = {name: read_rows(output / name / METRICS) for name in algorithms}
    quality = next(
        (
            name
            for name in ("accuracy", "distance", "error", "loss-point", "loss")
            if any(name in row for rows in runs.values() for row in rows)
        ),
        "accuracy",
    )
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes, metric in ((left, quality), (right, "train-loss")):
        for name, rows in runs.items():
            points = [(row["round"], row[metric]) for row in rows if metric in row]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, marker=".", ms=3)
        axes.set_xlabel("round")
        axes.grid(alpha=0.3)
    left.set_ylabel("accuracy, mean over clients" if quality == "accuracy" else quality)
    right.set_ylabel("training loss")
    if quality == "accuracy":
        left.yaxis.set_major_formatter("{x:.0%}")
    elif quality != "loss-point":
        left.set_yscale("log")
    handles, labels = right.get_legend_handles_labels()
    if handles:
        left.legend(handles, labels)
    figure.savefig(output / PLOT, dpi=150)
