"""Positions of axes, curves and bars in charts."""

import re
from html.parser import HTMLParser

import pytest

from flwr_frl.results.page.charts import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Curve,
    axis,
    bars,
    chart,
)


def places(svg: str) -> list[list[tuple[float, float]]]:
    """Return the points of all curves."""
    drawn = re.findall(r'class="curve c\d" d="M([^"]*)"', svg)
    return [
        [tuple(map(float, pair.split())) for pair in path.split("L")] for path in drawn
    ]


def drawn(*points: tuple[float, float], logarithmic: bool = False) -> str:
    return chart("loss", [Curve("a", 0, 0, points)], "{:g}".format, logarithmic)


def test_axis_positions_and_ticks():
    position, ticks = axis([2, 6, 4], 100, 300)
    assert [position(v) for v in (2, 3, 6)] == [100, 150, 300]
    assert ticks == [2, 3, 4, 5, 6]
    position, ticks = axis([0.01, 1], 0, 200, logarithmic=True)
    assert position(0.1) == pytest.approx(100)
    assert ticks == pytest.approx([0.01, 0.1, 1])
    # The range is less than a power of ten.
    assert axis([2, 6], 0, 1, logarithmic=True)[1] == pytest.approx([2, 3, 4, 5, 6])


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-12, 1e200])
def test_single_value_is_centred(value):
    assert axis([value, value], 0, 100)[0](value) == pytest.approx(50)


def test_curve_points():
    (points,) = places(drawn((1, 0.0), (2, 0.5), (3, 1.0)))
    middle = (LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2
    assert points == [(LEFT, BOTTOM), middle, (RIGHT, TOP)]
    # Zero has no logarithm, so the axis is linear.
    (points,) = places(drawn((1, 0.0), (2, 0.5), (3, 1.0), logarithmic=True))
    assert points[1] == middle


def test_a_long_curve_is_thinned_evenly_and_keeps_its_last_point():
    svg = drawn(*((float(i), float(i)) for i in range(10_001)))
    (points,) = places(svg)
    # Every 26th of 10,001 points is kept.
    assert len(points) == 10_001 // 26 + 1
    assert points[-1] == (RIGHT, TOP)
    assert "<circle" not in svg


def test_curves_share_their_axes_and_differ_in_looks():
    curves = [
        Curve("a", 0, 0, [(1, 0), (2, 1)]),
        Curve("b", 1, 1, [(1, 1), (3, 2)]),
        Curve("empty", 2, 0, []),
    ]
    svg = chart("loss", curves, "{:g}".format)
    first, second = places(svg)
    assert first[1][1] == second[0][1]
    assert first[0][0] == second[0][0]
    assert first[1][0] < second[1][0]
    assert svg.count("stroke-dasharray") == 1
    assert "nothing yet" in drawn()


def test_names_are_escaped():
    hostile = '"><script>alert(1)</script>'
    svg = chart(hostile, [Curve(hostile, 0, 0, [(1, 1), (2, 2)])], "{:g}".format)
    seen = set()

    class Tags(HTMLParser):
        def handle_starttag(self, tag, attrs):
            seen.add(tag)

    Tags().feed(svg)
    assert seen == {"svg", "path", "text", "title", "circle"}


def test_bar_heights_and_titles():
    svg = bars("shares", [0.0, 0.25, 0.5], "{:g}".format, "staleness")
    heights = re.findall(r'class="bar.*? height="([\d.]+)"><title>(.*?)<', svg)
    middle, full = (BOTTOM - TOP) / 2, BOTTOM - TOP
    assert [(float(height), title) for height, title in heights] == [
        (0.0, "staleness 0: 0"),
        (middle, "staleness 1: 0.25"),
        (full, "staleness 2: 0.5"),
    ]


def test_axis_other_than_rounds_has_fractional_ticks():
    curves = [Curve("a", 0, 0, [(0.0, 1.0), (1.0, 2.0)])]
    assert ">0.2<" in chart("loss", curves, "{:g}".format, across="time")
    assert ">0.2<" not in chart("loss", curves, "{:.0f}".format)
