"""Charts: the positions of curves, worked by hand."""

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
    chart,
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
    assert logarithmic.ticks == pytest.approx([0.01, 0.1, 1])
    # Less than a power of ten.
    assert Scale([2, 6], 0, 1, logarithmic=True).ticks == pytest.approx([2, 3, 4, 5, 6])


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-12, 1e200])
def test_a_single_value_is_in_the_middle(value):
    assert Scale([value, value], 0, 100)(value) == pytest.approx(50)


def test_only_whole_rounds_are_labelled():
    svg = chart("loss", [Curve("a", 0, 0, [(1, 0.5), (3, 1.5)])], "y{:g}".format)
    labels = re.findall(r'class="below"[^>]*>(\d[^<]*)<', svg)
    assert labels == ["1", "2", "3"]


def test_a_long_curve_is_thinned_evenly_and_keeps_its_last_point():
    points = [(float(i), float(i)) for i in range(10_001)]
    (drawn,) = places(chart("loss", [Curve("a", 0, 0, points)], "{:g}".format))
    assert len(drawn) == 10_001 // 26 + 1
    assert drawn[-1] == (WIDTH - RIGHT, TOP)
    steps = [b[0] - a[0] for a, b in pairwise(drawn)]
    assert steps == pytest.approx(
        [26 * (WIDTH - RIGHT - LEFT) / 10_000] * 384, abs=0.11
    )


def places(svg: str) -> list[list[tuple[float, float]]]:
    """The points of all curves."""
    drawn = re.findall(r'class="curve c\d" d="M([^"]*)"', svg)
    return [
        [tuple(map(float, pair.split())) for pair in path.split("L")] for path in drawn
    ]


def test_a_curve_by_hand():
    points = [(1, 0.0), (2, 0.5), (3, 1.0)]
    svg = chart("accuracy", [Curve("a", 0, 0, points)], "{:g}".format)
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
    svg = chart("loss", shown, "{:g}".format)
    first, second = places(svg)
    assert first[1][1] == second[0][1]
    assert first[0][0] == second[0][0]
    assert first[1][0] < second[1][0]
    assert 'class="curve c1"' in svg
    assert svg.count("stroke-dasharray") == 1


def test_many_points_have_no_dots():
    points = [(i, i / 2) for i in range(200)]
    svg = chart("loss", [Curve("a", 0, 0, points)], "{:g}".format)
    assert "<circle" not in svg
    assert len(places(svg)[0]) == 200


def test_nothing_yet():
    assert "nothing yet" in chart("loss", [Curve("a", 0, 0, [])], "{:g}".format)


def test_a_zero_has_no_logarithm():
    curve = Curve("a", 0, 0, [(1, 0.0), (2, 1.0), (3, 0.5)])
    svg = chart("error", [curve], "{:g}".format, logarithmic=True)
    (found,) = places(svg)
    assert found[2][1] == pytest.approx((TOP + HEIGHT - BOTTOM) / 2)


def test_a_name_is_text():
    hostile = '"><script>alert(1)</script>'
    svg = chart(hostile, [Curve(hostile, 0, 0, [(1, 1), (2, 2)])], "{:g}".format)

    class Tags(HTMLParser):
        seen: set[str] = set()  # noqa: RUF012

        def handle_starttag(self, tag, attrs):
            self.seen.add(tag)

    Tags().feed(svg)
    assert Tags.seen == {"svg", "path", "text", "title", "circle"}
