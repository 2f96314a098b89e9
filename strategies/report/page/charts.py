"""Curves and bars as SVG, which needs no script and no library to be seen."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

# Of the drawing; it is scaled to the width that there is.
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 20, 12, 34
# A curve has at most so many points, and a dot on each where there are few.
MOST_POINTS, MOST_DOTS = 400, 60
COLOURS, DASHES = 8, ("", "6 3", "2 3", "9 3 2 3", "1 5")
BINS = 20

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A named curve.

    Parameters
    ----------
    name : str
        What it is called; any text.
    colour : int
        From 0.
    dash : int
        From 0, which is a solid line.
    points : sequence of (float, float)
        From left to right.
    """

    name: str
    colour: int
    dash: int
    points: Sequence[Point]


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most 400 points, evenly chosen, the last among them."""
    step = math.ceil(len(points) / MOST_POINTS)
    return list(points[::-1][:: max(1, step)][::-1])


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about so many round numbers from low to high."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


class Scale:
    """From values to places on an axis.

    Parameters
    ----------
    values : sequence of float
        All that must be on it, at least one.
    start, end : float
        The places of the least and the largest.
    whole : bool
        Whether only whole numbers are marked.
    logarithmic : bool
        Whether equal ratios are equally long; all values must be positive.
    """

    def __init__(
        self,
        values: Sequence[float],
        start: float,
        end: float,
        whole: bool = False,
        logarithmic: bool = False,
    ) -> None:
        self.logarithmic, self.start, self.end = logarithmic, start, end
        low, high = self._along(min(values)), self._along(max(values))
        if high - low < 1e-9 * max(1.0, abs(high)):
            margin = 0.5 if whole else (abs(high) * 0.1 or 0.1)
            low, high = low - margin, high + margin
        self.low, self.high = low, high
        if logarithmic:
            first, last = math.floor(low), math.ceil(high)
            step = max(1, (last - first) // 5)
            marks = [10.0**i for i in range(first, last + 1, step)]
            if sum(low <= math.log10(mark) <= high for mark in marks) < 2:
                marks = [m * 10.0**i for i in range(first, last) for m in (1, 2, 5)]
            self.marks = [m for m in marks if low <= math.log10(m) <= high]
        else:
            self.marks = [
                m for m in ticks(low, high) if not whole or (m == int(m) and m >= 0)
            ]

    def _along(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        share = (self._along(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def curves(
    title: str,
    shown: Sequence[Curve],
    form: Callable[[float], str],
    logarithmic: bool = False,
) -> str:
    """Return a chart of curves by round."""
    shown = [curve for curve in shown if curve.points]
    if not shown:
        return f'<p class="nothing">{escape(title)}: nothing yet</p>'
    every = [point for curve in shown for point in curve.points]
    logarithmic = logarithmic and all(y > 0 for _, y in every)
    across = Scale([x for x, _ in every], LEFT, WIDTH - RIGHT, whole=True)
    up = Scale([y for _, y in every], HEIGHT - BOTTOM, TOP, logarithmic=logarithmic)
    parts = [_open(title), *_axes(across, up, form, "round")]
    for curve in shown:
        points = thinned(curve.points)
        places = [(across(x), up(y)) for x, y in points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        style = f'class="curve c{curve.colour % COLOURS}"'
        dash = DASHES[curve.dash % len(DASHES)]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        name = escape(curve.name)
        parts.append(f'<path {style} d="{path}"{dashed}><title>{name}</title></path>')
        dots = zip(points, places, strict=True)
        for (x, y), (left, top) in dots if len(points) <= MOST_DOTS else ():
            parts.append(
                f'<circle class="dot c{curve.colour % COLOURS}" r="2.5" '
                f'cx="{left:.1f}" cy="{top:.1f}">'
                f"<title>{name}, round {x:g}: {form(y)}</title></circle>"
            )
    return "".join([*parts, "</svg>"])


def bars(title: str, values: Sequence[float], form: Callable[[float], str]) -> str:
    """Return how often values come, in twenty classes from the least to the largest."""
    low, high = min(values), max(values)
    if all(0 <= value <= 1 for value in values):
        low, high = 0.0, 1.0
    width = (high - low) / BINS or 1.0
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int((value - low) / width))] += 1
    across = Scale([low, low + BINS * width], LEFT, WIDTH - RIGHT)
    up = Scale([0, max(counts)], HEIGHT - BOTTOM, TOP, whole=True)
    parts = [_open(title), *_axes(across, up, lambda y: f"{y:g}", title, form)]
    for i, count in enumerate(counts):
        left, right = across(low + i * width), across(low + (i + 1) * width)
        about = f"{form(low + i * width)} to {form(low + (i + 1) * width)}: {count}"
        parts.append(
            f'<rect class="bar" x="{left + 1:.1f}" y="{up(count):.1f}" '
            f'width="{right - left - 2:.1f}" height="{up(0) - up(count):.1f}">'
            f"<title>{escape(about)}</title></rect>"
        )
    return "".join([*parts, "</svg>"])


def _open(title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    )


def _axes(
    across: Scale,
    up: Scale,
    form: Callable[[float], str],
    name: str,
    form_across: Callable[[float], str] = lambda x: f"{x:g}",
) -> list[str]:
    parts = []
    for mark in up.marks:
        y = f"{up(mark):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy=".35em">{form(mark)}</text>')
    for mark in across.marks:
        x = f"{across(mark):.1f}"
        parts.append(
            f'<text class="below" x="{x}" y="{HEIGHT - BOTTOM + 15}">'
            f"{form_across(mark)}</text>"
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="below" x="{middle:.0f}" y="{HEIGHT - 4}">{escape(name)}</text>'
    )
    bottom = HEIGHT - BOTTOM
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>')
    return parts
