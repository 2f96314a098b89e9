"""Line charts as SVG, which need neither a script nor a library in the browser."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

# The size of a chart and its margins, in units of the drawing.
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 20, 12, 34
# The most points of a curve, and the most for which each point has a dot.
MOST_POINTS, MOST_DOTS = 400, 60
COLOURS, DASHES = 8, ("", "6 3", "2 3", "9 3 2 3", "1 5")

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A named curve.

    Parameters
    ----------
    name : str
        The name; any text.
    colour, dash : int
        Indices of its look; dash 0 is a solid line.
    points : sequence of (float, float)
        Rounds and values, by round.
    """

    name: str
    colour: int
    dash: int
    points: Sequence[Point]


class Scale:
    """Map values to positions on an axis.

    Parameters
    ----------
    values : sequence of float
        The values that the axis must cover, at least one.
    start, end : float
        The positions of the smallest and the largest value.
    logarithmic : bool, default False
        Whether the axis is logarithmic; all values must then be positive.
    """

    def __init__(
        self,
        values: Sequence[float],
        start: float,
        end: float,
        logarithmic: bool = False,
    ) -> None:
        self.logarithmic, self.start, self.end = logarithmic, start, end
        low, high = self._warp(min(values)), self._warp(max(values))
        if high - low < 1e-9 * max(1.0, abs(high)):
            margin = abs(high) * 0.1 or 0.1
            low, high = low - margin, high + margin
        self.low, self.high = low, high

    def _warp(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def __call__(self, value: float) -> float:
        """Return the position of a value."""
        share = (self._warp(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """About five round values within the axis."""
        if not self.logarithmic:
            return ticks(self.low, self.high)
        first, last = math.ceil(self.low), math.floor(self.high)
        step = max(1, (last - first) // 5)
        powers = [10.0**i for i in range(first, last + 1, step)]
        return powers if len(powers) > 1 else ticks(10.0**self.low, 10.0**self.high)


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
    form: Callable[[float], str],
    logarithmic: bool = False,
) -> str:
    """Return a chart of curves by round.

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
    """
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return f'<p class="nothing">{escape(title)}: nothing yet</p>'
    rounds = [x for curve in curves for x, _ in curve.points]
    values = [y for curve in curves for _, y in curve.points]
    across = Scale(rounds, LEFT, WIDTH - RIGHT)
    up = Scale(values, HEIGHT - BOTTOM, TOP, logarithmic and min(values) > 0)
    label = f'role="img" aria-label="{escape(title)}"'
    return "".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {label}>',
            *_axes(across, up, form),
            *(_draw(curve, across, up, form) for curve in curves),
            "</svg>",
        ]
    )


def _draw(curve: Curve, across: Scale, up: Scale, form: Callable[[float], str]) -> str:
    # Every n-th point, counted from the last one, which is always drawn.
    step = math.ceil(len(curve.points) / MOST_POINTS)
    points = curve.points[::-1][::step][::-1]
    places = [(f"{across(x):.1f}", f"{up(y):.1f}") for x, y in points]
    colour, name = f"c{curve.colour % COLOURS}", escape(curve.name)
    dash = DASHES[curve.dash % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    path = "M" + "L".join(f"{x} {y}" for x, y in places)
    parts = [
        f'<path class="curve {colour}" d="{path}"{dashed}><title>{name}</title></path>'
    ]
    if len(points) <= MOST_DOTS:
        parts += [
            f'<circle class="dot {colour}" r="2.5" cx="{left}" cy="{top}">'
            f"<title>{name}, round {x:g}: {form(y)}</title></circle>"
            for (x, y), (left, top) in zip(points, places, strict=True)
        ]
    return "".join(parts)


def _axes(across: Scale, up: Scale, form: Callable[[float], str]) -> list[str]:
    bottom, right, parts = HEIGHT - BOTTOM, WIDTH - RIGHT, []
    for tick in up.ticks:
        y = f"{up(tick):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{right}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy=".35em">{form(tick)}</text>')
    for tick in across.ticks:
        if tick == int(tick) and tick >= 0:
            x = f'x="{across(tick):.1f}" y="{bottom + 15}"'
            parts.append(f'<text class="below" {x}>{tick:g}</text>')
    middle = f'x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 4}"'
    parts.append(f'<text class="below" {middle}>round</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    return parts
