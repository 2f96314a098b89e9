"""Curves and bars: where things are, by hand."""

import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from flwr_frl.strategies.report.page.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Curve,
    Scale,
    bars,
    curves,
    thinned,
    ticks,
)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (3, 47, [10, 20, 30, 40]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (0.911, 0.934, [0.915, 0.92, 0.925, 0.93]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_a_scale_by_hand():
    scale = Scale([2, 6, 4], 100, 300)
    assert [scale(v) for v in (2, 3, 6)] == [100, 150, 300]
    upwards = Scale([0, 1], 300, 100)
    assert upwards(0.25) == 250
    logarithmic = Scale([0.01, 1], 0, 200, logarithmic=True)
    assert logarithmic(0.1) == pytest.approx(100)
    assert logarithmic.marks == pytest.approx([0.01, 0.1, 1])


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-12, 1e200])
def test_a_single_value_is_in_the_middle(value):
    assert Scale([value, value], 0, 100)(value) == pytest.approx(50)


def test_rounds_are_whole():
    assert Scale([1, 3], 0, 1, whole=True).marks == [1, 2, 3]


def test_thinned_points_are_even_and_keep_the_last():
    points = [(float(i), 0.0) for i in range(10_001)]
    kept = [x for x, _ in thinned(points)]
    assert len(kept) <= 400
    assert kept[-1] == 10_000
    assert {b - a for a, b in pairwise(kept)} == {26}
    assert thinned(points[:400]) == points[:400]


def places(svg: str) -> list[list[tuple[float, float]]]:
    """The points of all curves."""
    drawn = re.findall(r'class="curve c\d" d="M([^"]*)"', svg)
    return [
        [tuple(map(float, pair.split())) for pair in path.split("L")] for path in drawn
    ]


def test_a_curve_by_hand():
    points = [(1, 0.0), (2, 0.5), (3, 1.0)]
    svg = curves("accuracy", [Curve("a", 0, 0, points)], "{:g}".format)
    middle = (LEFT + WIDTH - RIGHT) / 2
    bottom = HEIGHT - BOTTOM
    (found,) = places(svg)
    expected = [(LEFT, bottom), (middle, (TOP + bottom) / 2), (WIDTH - RIGHT, TOP)]
    for place, hoped in zip(found, expected, strict=True):
        assert place == pytest.approx(hoped)
    assert svg.count("<circle") == 3
    assert "<title>a, round 2: 0.5</title>" in svg


def test_curves_share_their_axes_and_differ_in_looks():
    shown = [Curve("a", 0, 0, [(1, 0), (2, 1)]), Curve("b", 1, 1, [(1, 1), (3, 2)])]
    svg = curves("loss", shown, "{:g}".format)
    first, second = places(svg)
    assert first[1][1] == second[0][1]
    assert first[0][0] == second[0][0]
    assert first[1][0] < second[1][0]
    assert 'class="curve c1"' in svg
    assert svg.count("stroke-dasharray") == 1


def test_many_points_have_no_dots():
    points = [(i, i / 2) for i in range(200)]
    svg = curves("loss", [Curve("a", 0, 0, points)], "{:g}".format)
    assert "<circle" not in svg
    assert len(places(svg)[0]) == 200


def test_nothing_yet():
    assert "nothing yet" in curves("loss", [Curve("a", 0, 0, [])], "{:g}".format)


def test_a_zero_has_no_logarithm():
    curve = Curve("a", 0, 0, [(1, 0.0), (2, 1.0), (3, 0.5)])
    svg = curves("error", [curve], "{:g}".format, logarithmic=True)
    (found,) = places(svg)
    assert found[2][1] == pytest.approx((TOP + HEIGHT - BOTTOM) / 2)


def test_bars_by_hand():
    # Twentieths of [0, 1]: 0.5 is in the eleventh, 1 in the last.
    svg = bars("accuracy", [0.0, 0.01, 0.5, 1.0], "{:.2f}".format)
    titles = re.findall(r"<title>([^<]*)</title>", svg)
    assert len(titles) == 20
    assert titles[0] == "0.00 to 0.05: 2"
    assert titles[10] == "0.50 to 0.55: 1"
    assert titles[19] == "0.95 to 1.00: 1"
    heights = [float(h) for h in re.findall(r'class="bar".*?height="([\d.]+)"', svg)]
    full = HEIGHT - BOTTOM - TOP
    assert heights[0] == pytest.approx(full)
    assert heights[10] == heights[19] == pytest.approx(full / 2)
    assert sum(heights) == pytest.approx(2 * full)


@pytest.mark.parametrize("values", [[3.0, 3.0], [-2.0, 5.0]])
def test_bars_of_what_is_no_share(values):
    titles = re.findall(r"<title>[^<]*: (\d+)</title>", bars("x", values, str))
    assert sum(map(int, titles)) == 2


def test_a_name_is_text():
    hostile = '"><script>alert(1)</script>'
    svg = curves(hostile, [Curve(hostile, 0, 0, [(1, 1), (2, 2)])], "{:g}".format)

    class Tags(HTMLParser):
        seen: set[str] = set()  # noqa: RUF012

        def handle_starttag(self, tag, attrs):
            self.seen.add(tag)

    Tags().feed(svg)
    assert Tags.seen == {"svg", "path", "text", "title", "circle"}
