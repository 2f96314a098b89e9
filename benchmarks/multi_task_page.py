"""Tables, figures and text of ``benchmarks/multi_task.py``."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, markdown
from flwr_frl.task.compression.per_tensor import (
    Compressor,
    Identity,
    Sign,
    SignTopK,
    TopK,
)
from flwr_frl.task.saddle_point.problems import Float64s

TITLES = {"qcqp": "QCQP (Figure 4.1)", "logistic": "Logistic regression (Figure 4.2)"}
SCHEMES: dict[str, Compressor] = {
    "vanilla": Identity(),
    "TopK": TopK(1),
    "Sign": Sign(),
    "SignTopK": SignTopK(2),
}
FEEDBACK = {"": 0.0, " (bandit)": 1e-4}
# Color and line width; coinciding curves stay visible.
LINES = {
    "vanilla": ("C0", 3.5),
    "TopK": ("C1", 2.5),
    "Sign": ("C2", 1.6),
    "SignTopK": ("C3", 0.8),
}
Results = dict[str, list[dict[str, Any]]]


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return the least-squares slope of log y by log x; None if a y is not positive."""
    if min(y, default=0) <= 0 or len(y) < 3:
        return None
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def slopes(curve: dict[str, list[float]]) -> dict[str, Any]:
    """Return the slopes of a run's time averages.

    The gap is fitted over the last decade of iterations, and the violation over
    iterations from 10 on in which it is positive.
    """
    t, last = np.array(curve["iteration"]), curve["iteration"][-1]
    late = t >= last / 10
    violation = np.array(curve["largest-average"])
    positive = np.flatnonzero(violation > 0)
    end = positive[-1] + 1 if len(positive) else 0
    fitted = (t >= 10) & (violation > 0) & (np.arange(len(t)) < end)
    return {
        "gap": slope(t[late], np.abs(curve["gap-average"])[late]),
        "violation": slope(t[fitted], violation[fitted]),
        "met-from": int(t[end]) if end < len(t) else None,
    }


def number(value: float | None, digits: int = 2) -> str:
    """Format a number for a table."""
    return "-" if value is None else f"{value:.{digits}g}"


def mean_of(runs: Sequence[dict[str, Any]], key: str) -> str:
    """Return the mean over the seeds of a curve's last value."""
    return number(float(np.mean([run["end"][key] for run in runs])))


def message_table() -> str:
    """Return the table of message sizes: actual, and as the chapter seems to count."""
    d, index = 10, 4
    bare = {
        "vanilla": 32 * d,
        "TopK": 32 + index,
        "Sign": d,
        "SignTopK": 2 * (1 + index),
    }
    rows = []
    for scheme, operator in SCHEMES.items():
        real = 8 * operator.num_bytes(d)
        rows.append(
            (
                scheme,
                real,
                f"{320 / real:.1f}x",
                bare[scheme],
                f"{320 / bare[scheme]:.1f}x",
            )
        )
    heads = ("scheme", "bits", "factor", "without magnitudes and padding", "factor")
    return markdown(heads, rows)


def target_table(targets: Sequence[str], results: Results) -> str:
    """Return the table of iterations, bits and factors to each target."""
    rows = []
    for label, runs in results.items():
        feedback = " (bandit)" if label.endswith("(bandit)") else ""
        reference, cells = results["vanilla" + feedback], []
        for target in targets:
            pairs = zip(runs, reference, strict=True)
            found = [
                (*own["crossed"][target], other["crossed"][target][1])
                for own, other in pairs
                if target in own["crossed"] and target in other["crossed"]
            ]
            if not found:
                cells.append("not reached")
                continue
            t, bits, vanilla = np.array(found, float).T
            factor = vanilla / bits
            note = "" if len(found) == len(runs) else f"; seeds: {len(found)}"
            cells.append(
                f"{t.mean():.0f}; {bits.mean() / 1e6:.3g}; {factor.mean():.2f}x "
                f"({factor.min():.2f} to {factor.max():.2f}{note})"
            )
        rows.append((label, *cells))
    heads = [f"gap {target}: iterations; Mbit; factor" for target in targets]
    return markdown(("scheme", *heads), rows)


def end_table(results: Results) -> str:
    """Return the table of final values."""
    keys = {
        "gap": "gap, x",
        "gap-average": "gap, average",
        "distance": "distance, x",
        "distance-average": "distance, average",
        "edge": "g of one edge, x",
        "largest": "largest g, x",
        "largest-average": "largest g, average",
    }
    if "accuracy" in results["vanilla"][0]["end"]:
        keys["accuracy"] = "test accuracy"
    rows = [
        (
            label,
            *(mean_of(runs, key) for key in keys),
            number(float(np.mean([run["seconds"] for run in runs]))),
        )
        for label, runs in results.items()
    ]
    return markdown(("scheme", *keys.values(), "seconds"), rows)


def slope_table(results: Results, sweep: Results) -> str:
    """Return the table of fitted slopes, with a number for each seed."""
    rows = []
    for label, runs in results.items():
        fits = [run["slopes"] for run in runs]
        swept = sweep.get(label, [])
        rows.append(
            (
                label,
                ", ".join(number(fit["gap"]) for fit in fits),
                ", ".join(number(fit["violation"]) for fit in fits),
                ", ".join(str(fit["met-from"] or "never") for fit in fits),
                ", ".join(number(one["slope"]) for one in swept) or "-",
                number(max(one["gaps"][0] for one in swept)) if swept else "-",
                number(max(max(one["largest"][1:]) for one in swept)) if swept else "-",
            )
        )
    heads = (
        "scheme",
        "gap in one run",
        "violation in one run",
        "no violation from iteration",
        "gap by horizon",
        "largest gap at the shortest",
        "largest g at the others",
    )
    return markdown(heads, rows)


def plot(name: str, results: Results) -> None:
    """Draw the first seed's curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    axes = figure.subplots(2, 3)
    last = ("accuracy", "test accuracy") if name == "logistic" else None
    panels = [
        ("iteration", "gap", "relative cost gap |F(x) - F*| / |F*|"),
        ("iteration", "distance", "distance ‖x - x*‖ / ‖x*‖"),
        ("iteration", "edge", "constraint value of one edge"),
        ("bits", "gap", "relative cost gap"),
        ("bits", "distance", "distance"),
        ("iteration", *(last or ("gap-average", "relative cost gap, time average"))),
    ]
    for panel, (x, key, label) in zip(axes.flat, panels, strict=True):
        for scheme, runs in results.items():
            curve = runs[0]["curve"]
            y = np.abs(curve[key]) if "gap" in key else curve[key]
            style = ":" if "bandit" in scheme else "-"
            color, width = LINES[scheme.split()[0]]
            panel.plot(curve[x], y, style, color=color, label=scheme, lw=width)
        panel.set(xlabel=x + ("s" if x == "iteration" else " sent"), ylabel=label)
        panel.set_xscale("log")
        if key == "edge":
            panel.set_yscale("symlog", linthresh=1)
            panel.axhline(0, color="grey", lw=0.8)
        elif key != "accuracy":
            panel.set_yscale("log")
        panel.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7)
    figure.savefig(RESULTS / f"multi_task-{name}.png", dpi=130)


def statements(results: Results) -> str:
    """Return the statements that the page should show, with their numbers."""

    def ends(label: str, key: str) -> Float64s:
        return np.array([run["end"][key] for run in results[label]])

    lines = []
    for feedback in FEEDBACK:
        reference = ends("vanilla" + feedback, "gap-average")
        ratios = {
            s: ends(s + feedback, "gap-average") / reference for s in list(SCHEMES)[1:]
        }
        largest = max(ends(s + feedback, "largest-average").max() for s in SCHEMES)
        told = ", ".join(
            f"{s} {r.min():.3f} to {r.max():.3f}" for s, r in ratios.items()
        )
        which = "bandit" if feedback else "sample"
        lines.append(
            f"- {which} feedback: final gap of the time average over that of vanilla: "
            f"{told}"
        )
        lines.append(
            f"- {which} feedback: largest constraint value of the final time average, "
            f"over all schemes, seeds and edges: {largest:.2g}, "
            + (
                "so the constraints are met"
                if largest <= 0
                else "so the constraints are not met"
            )
        )
    bandit = ends("vanilla (bandit)", "gap-average") / ends("vanilla", "gap-average")
    lines.append(
        "- final gap of the time average, bandit over sample feedback, vanilla: "
        f"{bandit.min():.2f} to {bandit.max():.2f}"
    )
    return "\n".join(lines)


def body(data: dict[str, Any], seeds: Sequence[int]) -> str:
    """Return the page that explains and shows the numbers."""
    text = rf"""30 nodes, d = 10, the ball of radius 20, η = 0.001, δ = 100, ζ = 0.0001
for bandit feedback, TopK with k = 1, SignTopK with k = 2 (with k = 1 it would equal
TopK with a longer message). Seeds {list(seeds)}: each has its own graph, costs,
constraints, initial point and samples, and numbers are means over seeds. All schemes of
a seed see the same samples. x is the point of the last iteration; the time average is
the output of the algorithms. Gaps are signed: an x that violates its constraints may be
below F\*.

The chapter leaves some choices open. Here, raw parameters start at N(0, I). A_i is
drawn once for each node, as are mean and variance of b, and each iteration draws a new
b. The true models of the logistic regression are a common direction of length 1 plus
0.5 times an individual one, so that no constraint is active at the optimum.

## Bits of a message

{message_table()}
Bits are those of the actual messages: whole bytes, with the magnitude of Sign and
SignTopK in 32 bits, counted once per sender regardless of its number of neighbours. The
first exchange is not compressed. The chapter's factors of 7 and 30 for TopK and Sign
are near the last column, which counts indices, signs and TopK's entry, but neither
magnitudes nor the padding to whole bytes. Its factor of 50 for SignTopK is larger, and
only k = 1 (5 bits, 64x) would reach it. However, magnitudes must be sent, and with d =
10 they are most of a message: Sign saves a factor of 4 d / (4 + d / 8), which exceeds
30 only from d = 480. All schemes need nearly the same number of iterations, so the
factors to a gap are close to those of the messages.
"""
    for name, part in data["problems"].items():
        text += f"""
## {TITLES[name]}

Edge probability {part["edge-probability"]}, {part["iterations"]} iterations.

First iteration at which the relative cost gap of x is at most the given value (checked
at every tenth), the bits that all nodes have sent by then, and the reduction of bits
relative to vanilla with the same feedback (mean and range over seeds, with the number
of seeds if not all reach the gap):

{target_table(part["targets"], part["results"])}
At the end:

{end_table(part["results"])}
{statements(part["results"])}

The table has slopes on a log-log scale, one for each seed. *In one run*, at constant η,
they are those of the gap of the time average over the last decade of iterations, and of
its largest constraint value from iteration 10 until it is no longer above 0. *By
horizon* is that of the gap of the time average after T =
{", ".join(map(str, part["lengths"]))} iterations with η = a/√T (a = 0.224, the
chapter's η at 50,000), as in Theorem 3. The shortest is excluded from the fit, because
its long steps may not suit delayed entries and the theorem is for a large T. The theory
predicts -1/2 for the gap and -1/4 for the violation, which is 0 from some iteration on.

{slope_table(part["results"], part["horizons"])}
![{TITLES[name]}](multi_task-{name}.png)
"""
    return (
        text
        + f"""
The curves are those of seed {seeds[0]}, with solid lines for sample feedback and dotted
lines for bandit feedback. Seconds are for the iterations of one run on one core,
without measurements; all runs together took {data["seconds"]} s.
"""
    )
