"""Line charts as SVG, which need neither a script nor a library in the browser."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

# The size of a chart and its margins, in units of the drawing.
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 540, 12, 266
# The most points of a curve, and the most for which each point has a dot.
MOST_POINTS, MOST_DOTS = 400, 60
COLOURS, DASHES = 8, ("", "6 3", "2 3", "9 3 2 3", "1 5")

Point = tuple[float, float]
# Formats a number.
Format = Callable[[float], str]


class Curve(NamedTuple):
    """A named curve.

    Parameters
    ----------
    name : str
        The name; any text.
    colour, dash : int
        Indices of its look; dash 0 is a solid line.
    points : sequence of (float, float)
        Positions across (rounds, for example) and values, by position.
    """

    name: str
    colour: int
    dash: int
    points: Sequence[Point]


def line(path: str, colour: int, dash: int, name: str = "") -> str:
    """Return a path with the look of a curve, and a name that is shown on demand."""
    pattern = DASHES[dash % len(DASHES)]
    dashed = f' stroke-dasharray="{pattern}"' if pattern else ""
    about = f'class="curve c{colour % COLOURS}" d="{path}"{dashed}'
    return f"<path {about}><title>{escape(name)}</title></path>"


def axis(
    values: Sequence[float], start: float, end: float, logarithmic: bool = False
) -> tuple[Callable[[float], float], list[float]]:
    """Return an axis: the position of a value, and about five round values.

    Parameters
    ----------
    values : sequence of float
        The values that the axis must cover, at least one.
    start, end : float
        The positions of the smallest and the largest value.
    logarithmic : bool, default False
        Whether the axis is logarithmic; all values must then be positive.
    """
    warp = math.log10 if logarithmic else float
    low, high = warp(min(values)), warp(max(values))
    if high - low < 1e-9 * max(1.0, abs(high)):
        margin = abs(high) * 0.1 or 0.1
        low, high = low - margin, high + margin

    def position(value: float) -> float:
        return start + (warp(value) - low) / (high - low) * (end - start)

    if not logarithmic:
        return position, ticks(low, high)
    powers = range(math.ceil(low), math.floor(high) + 1)
    if len(powers) < 2:
        return position, ticks(10.0**low, 10.0**high)
    return position, [10.0**i for i in powers[:: max(1, (len(powers) - 1) // 5)]]


def ticks(low: float, high: float) -> list[float]:
    """Return about five multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def chart(
    title: str,
    curves: Sequence[Curve],
    form: Format,
    logarithmic: bool = False,
    across: str = "round",
) -> str:
    """Return a chart of curves, by round if nothing else is named.

    Parameters
    ----------
    title : str
        The title, for screen readers.
    curves : sequence of Curve
        The curves, in the order in which they are drawn.
    form : callable
        Formats a value.
    logarithmic : bool, default False
        Whether the vertical axis is logarithmic, if all values are positive.
    across : str, default "round"
        Label of the horizontal axis.
    """
    points = [point for curve in curves for point in curve.points]
    if not points:
        return f'<p class="nothing">{escape(title)}: nothing yet</p>'
    positions, values = zip(*points, strict=True)
    right, columns = axis(positions, LEFT, RIGHT)
    up, lines = axis(values, BOTTOM, TOP, logarithmic and min(values) > 0)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    ]
    for tick in lines:
        place = f"{up(tick):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {place}H{RIGHT}"/>')
        label = f'x="{LEFT - 6}" y="{place}" dy=".35em"'
        parts.append(f"<text {label}>{form(tick)}</text>")
    if across == "round":
        columns = [n for n in columns if n == int(n) >= 0]
    below = [(right(n), BOTTOM + 15, f"{n:g}") for n in columns]
    for left, top, text in [*below, ((LEFT + RIGHT) / 2, HEIGHT - 4, escape(across))]:
        parts.append(f'<text class="below" x="{left:.1f}" y="{top}">{text}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>')
    for curve in curves:
        # Every n-th point, counted from the last one, which is always drawn.
        step = math.ceil(len(curve.points) / MOST_POINTS) or 1
        drawn = curve.points[::-1][::step][::-1]
        places = [(f"{right(x):.1f}", f"{up(y):.1f}") for x, y in drawn]
        if places:
            path = "M" + "L".join(map(" ".join, places))
            parts.append(line(path, curve.colour, curve.dash, curve.name))
        dots = zip(drawn, places, strict=True) if len(drawn) <= MOST_DOTS else ()
        for (x, y), (cx, cy) in dots:
            where = f"{escape(across)} {x:g}: {form(y)}"
            parts.append(
                f'<circle class="dot c{curve.colour % COLOURS}" r="2.5" cx="{cx}" '
                f'cy="{cy}"><title>{escape(curve.name)}, {where}</title></circle>'
            )
    return "".join([*parts, "</svg>"])


def bars(title: str, values: Sequence[float], form: Format, across: str) -> str:
    """Return a chart of bars at 0, 1, 2, … from the left.

    Parameters
    ----------
    title : str
        The title, for screen readers.
    values : sequence of float
        Heights of the bars, at least one, not negative.
    form : callable
        Formats a height.
    across : str
        Label of the horizontal axis.
    """
    width = (RIGHT - LEFT) / len(values)
    up, lines = axis([0, max(values)], BOTTOM, TOP)
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    parts = [f'{head} aria-label="{escape(title)}">']
    for tick in lines:
        place = f"{up(tick):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {place}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{place}" dy=".35em">{form(tick)}</text>')
    step = math.ceil(len(values) / 12)
    for i, value in enumerate(values):
        left, top = LEFT + i * width, up(value)
        size = f'width="{0.8 * width:.1f}" height="{BOTTOM - top:.1f}"'
        about = f"{escape(across)} {i}: {form(value)}"
        place = f'class="bar c0" x="{left + 0.1 * width:.1f}" y="{top:.1f}"'
        parts.append(f"<rect {place} {size}><title>{about}</title></rect>")
        if i % step == 0:
            where = f'x="{left + width / 2:.1f}" y="{BOTTOM + 15}"'
            parts.append(f'<text class="below" {where}>{i}</text>')
    middle = f'x="{(LEFT + RIGHT) / 2:.1f}" y="{HEIGHT - 4}"'
    parts.append(f'<text class="below" {middle}>{escape(across)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/></svg>')
    return "".join(parts)
