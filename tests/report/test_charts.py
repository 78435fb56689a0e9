"""Charts: thinning keeps extremes, NaN is shown, nothing is large, ticks are round."""

import html
import json
import math
import re

import pytest

from ingot.report.html.axes import log_ticks, tick_labels, ticks
from ingot.report.html.charts import MAX_BUCKETS, Series, line_chart, smoothed, thinned


def chart(*series: Series, **more) -> str:
    return str(line_chart("Loss", series, "step", "nats", **more))


def path(svg: str) -> str:
    (found,) = re.findall(r'class="line s0" d="([^"]*)"', svg)
    return found


def test_axes_have_names_and_units():
    svg = chart(Series("train", [(0, 8.3), (10, 4.0)]), references={"ln V": 8.318})
    assert ">step</text>" in svg
    assert ">nats</text>" in svg
    assert "ln V = 8.318" in svg


def data(svg: str) -> dict:
    (attribute,) = re.findall("data-chart='([^']*)'", svg)
    return json.loads(html.unescape(attribute))


def test_the_page_has_the_values_that_a_reader_points_at():
    points = [(0, 8.3), (10, 4.25), (20, 3.123456)]
    (raw, mean) = data(chart(Series("train", points, smooth=0.5)))["series"]
    assert raw["points"] == [[0, 8.3], [10, 4.25], [20, 3.1235]]
    assert (raw["raw"], mean["name"], mean["raw"]) == (True, "train, mean", False)
    assert mean["points"][1][1] == pytest.approx((4.25 + 0.5 * 8.3) / 1.5, abs=1e-4)


def test_a_chart_says_its_content_to_those_who_do_not_see_it():
    assert 'aria-label="Loss: train from 8.3 to 4"' in chart(Series("train", [(10, 4.0), (0, 8.3)]))


def test_one_point_is_visible():
    svg = chart(Series("train", [(7, 3.5)]))
    assert 'class="dot s0"' in svg
    assert "nan" not in svg


@pytest.mark.parametrize("points", [[], [(1, math.nan)]])
def test_nothing_finite_says_so(points):
    assert "no data yet" in chart(Series("train", points))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_breaks_the_line_and_is_marked(bad):
    svg = chart(Series("train", [(1, 3.0), (2, 2.9), (3, bad), (4, 2.8), (5, 2.7)]))
    assert path(svg).count("M") == 2
    assert svg.count("✕") == 1
    assert data(svg)["series"][0]["points"][2] == [3, str(bad)]  # JSON has no NaN
    assert not re.search(r"(cx|cy|x1|y1)=(nan|inf)", svg)


def test_hundred_thousand_points_stay_small_and_keep_the_spike():
    points = [(i, math.sin(i / 9000)) for i in range(100_000)]
    points[54_321] = (54_321, 77.0)
    svg = chart(Series("norm", points, smooth=0.9))
    assert len(svg) < 30_000
    assert (54_321, 77.0) in thinned(points)
    assert len(thinned(points)) <= 3 * MAX_BUCKETS + 2


def test_thinning_keeps_a_nan():
    points = [(float(i), 1.0) for i in range(10_000)]
    points[777] = (777.0, math.nan)
    assert any(math.isnan(y) for _, y in thinned(points))


def test_running_mean_starts_at_the_first_value_and_skips_nan():
    out = smoothed([(0, 4.0), (1, 4.0), (2, math.nan), (3, 4.0)], 0.9)
    assert [round(y, 12) for _, y in out if math.isfinite(y)] == [4.0, 4.0, 4.0]
    assert math.isnan(out[2][1])


def test_constant_series_and_log_axis():
    assert "<path" in chart(Series("lr", [(0, 1e-3), (5, 1e-3)]), from_zero=True)
    svg = chart(Series("train", [(0, 9.0), (1, 8.0), (1000, 3.0)]), log_x=True)
    assert (
        len(re.findall("[ML]", path(svg))) == 3
    )  # a start of its own, and two points: there is no 0 on a logarithmic axis
    assert ">1k</text>" in svg


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (1.47, 4.4), (0, 5000), (-3, 7), (6e-5, 6.1e-4), (2.0, 2.00001), (0.0012, 0.00126), (1e9, 1.02e9)],
)
def test_ticks_are_few_round_and_inside(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 6
    assert all(low - 1e-9 <= t <= high + 1e-9 for t in found)
    assert len(set(tick_labels(found))) == len(found)


def test_log_ticks():
    assert log_ticks(1, 5000) == [1, 10, 100, 1000]
    assert log_ticks(1, 60) == [1, 2, 5, 10, 20, 50]


@pytest.mark.parametrize(
    ("value", "label"), [(0, "0"), (0.5, "0.5"), (2000, "2k"), (20_000, "20k"), (3e-4, "3e-4"), (1.5e6, "1.5M")]
)
def test_tick_labels(value, label):
    assert tick_labels([value]) == [label]


def test_names_are_escaped():
    svg = chart(Series("<script>alert('1')</script>", [(0, 1.0), (1, 2.0)]), references={"<b>": 1.0})
    assert data(svg)["series"][0]["name"] == "<script>alert('1')</script>"
    assert "<script" not in svg
    assert "<b>" not in svg
