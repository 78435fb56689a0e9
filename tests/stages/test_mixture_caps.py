"""Temperature and caps of a mixture: closed forms, caps that hold to the row, fractions that hold in every window."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ingot.core.errors import UserError
from ingot.data.mixtures import capped, tempered
from ingot.stages.training.timeline import AssumedSize
from tests.stages.test_timeline import _line, _sizes


def test_B7_temperature_is_size_to_the_power_of_its_inverse():
    assert tempered([1, 1], [900, 100], 1) == pytest.approx([0.9, 0.1])
    assert tempered([1, 1], [900, 100], 2) == pytest.approx([0.75, 0.25])
    assert tempered([3, 1], [900, 100], 1e9) == pytest.approx([0.75, 0.25])
    line = _line(_sizes(a=900, b=100), data={"a": 1, "b": 1}, temperature=2, duration="500 steps", batch=2)
    assert line.phases[0].fractions == pytest.approx((0.75, 0.25))
    unknown = _line(data={"a": 1, "b": 1}, temperature=2)
    assert unknown.phases[0].fractions == (0.5, 0.5), "before the sizes are known"


def test_B7_water_filling():
    assert capped([0.5, 0.3, 0.2], [1, 0.1, 1]) == pytest.approx([0.5 / 0.7 * 0.9, 0.1, 0.2 / 0.7 * 0.9])
    assert capped([0.6, 0.4], [0.7, 0.2]) is None
    assert capped([0.6, 0.4], [0.7, 0.3]) == pytest.approx([0.7, 0.3])
    assert capped([0.5, 0.3, 0.2], [1, 0.1, 0.21]) == pytest.approx([0.69, 0.1, 0.21]), "the rest fills the next one"


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 1)), min_size=1, max_size=6))
def test_B7_water_filling_keeps_limits_and_proportions(pairs: list[tuple[float, float]]):
    total = sum(weight for weight, _ in pairs)
    wanted, limits = [w / total for w, _ in pairs], [limit for _, limit in pairs]
    found = capped(wanted, limits)
    if found is None:
        assert sum(limits) < 1 + 1e-9
        return
    assert sum(found) == pytest.approx(1)
    assert all(f <= limit + 1e-9 for f, limit in zip(found, limits, strict=True))
    free = [f / w for f, w, limit in zip(found, wanted, limits, strict=True) if f < limit - 1e-9]
    assert free == pytest.approx([max(free, default=0)] * len(free)), "the free ones in proportion"


def uses(line, source: int, rows: int) -> np.ndarray:
    """How often each row of a source is drawn in the run."""
    drawn = np.zeros(rows, int)
    for phase in line.phases:
        of, row = phase.order.at(0, phase.rows)
        np.add.at(drawn, row[of == source], 1)
    return drawn


@pytest.mark.parametrize("most", [1, 2, 2.5])
def test_B7_caps_hold_to_the_row_and_no_more_is_left_unused_than_needed(most: float):
    line = _line(
        _sizes(a=100_000, b=2_000), data={"a": 0.5, "b": 0.5}, max_epochs={"b": most}, duration="5000 steps", batch=8
    )
    drawn = uses(line, 1, 2_000)
    assert drawn.max() <= np.ceil(most)
    cap = int(most * 2_000)
    assert cap - 8 <= drawn.sum() <= cap
    assert line.epochs(_sizes(a=100_000, b=2_000))["b"] <= most
    fraction = line.phases[0].fractions[1]
    for first in (0, 777, 12_345):
        sources, _ = line.phases[0].order.at(first, 10_000)
        assert abs(Counter(sources.tolist())[1] / 100 - 100 * fraction) < 0.2
    assert line.summary()[0]["capped"] == {"b": 0.5}


def test_B7_a_source_that_lasts_is_not_touched():
    free, line = (
        _line(_sizes(a=10_000, b=500), data={"a": 0.5, "b": 0.5}, duration="100 steps", batch=4, max_epochs=caps)
        for caps in ({}, {"b": 1})
    )
    assert line.phases == free.phases
    assert line.summary()[0]["capped"] == {}


def test_B7_caps_span_phases_and_contexts():
    phases = [
        {"name": "one", "fraction": 0.5, "context": 128},
        {"name": "two", "fraction": 0.5, "context": 256},
    ]

    def sizes(name: str, context: int) -> AssumedSize:
        rows = {"a": 1_000_000, "b": 128_000}[name] // context
        return AssumedSize(float(context), rows * context, rows)

    table = {"data": {"a": 0.9, "b": 0.1}, "duration": "1_000_000 tokens", "batch": 1, "phases": phases}
    line = _line(sizes, **table, max_epochs={"b": 0.6})
    assert 0.58 < line.epochs(sizes)["b"] <= 0.6
    assert line.phases[0].fractions[1] == 0.1, "the first phase takes what it wants"
    assert 0 < line.phases[1].fractions[1] < 0.1
    gone = _line(sizes, **table, max_epochs={"b": 0.3})
    assert gone.phases[1].fractions[1] < 0.002, "a phase without what is used up"


def test_B7_rows_of_unequal_size():
    def sizes(name: str, context: int) -> AssumedSize:
        return {"a": AssumedSize(256.0, 256 * 50_000, 50_000), "b": AssumedSize(40.0, 40 * 3_000, 3_000)}[name]

    line = _line(sizes, data={"a": 0.5, "b": 0.5}, max_epochs={"b": 3}, duration="2M tokens", batch=4)
    assert 9_000 - 10 <= uses(line, 1, 3_000).sum() <= 9_000


def test_B7_when_nothing_is_left_it_is_said():
    with pytest.raises(UserError, match="max_epochs: all corpora are used up before the duration ends"):
        _line(_sizes(a=100), max_epochs={"a": 2}, duration="1000 steps", batch=4)
    with pytest.raises(ValidationError, match="found max_epochs of 'aa', which no mixture has; did you mean 'a'"):
        _line(max_epochs={"aa": 2})
    with pytest.raises(ValidationError, match=r"found max_epochs\.a = 0\.0, expected more than 0"):
        _line(max_epochs={"a": 0})
