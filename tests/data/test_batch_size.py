"""Rows of a step: a short table that equals the sum over all steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.data.batch_size import constant, ramp

GPT3 = {"start": 16, "end": 1600, "over": 12 * 10**9 // 2048, "by_step": False}
"""32K to 3.2M tokens a step over 12B tokens, in rows of 2,048 (Brown et al. 2020, appendix B)."""


def test_C8_a_ramp_by_hand():
    """1 to 5 rows over 8 rows: 1 + floor(4 R / 8) with R = 0, 1, 2, 4, 7 rows done, and 5 from then on."""
    sizes = ramp(1, 5, 8, by_step=False)
    assert [sizes.rows(step) for step in range(1, 9)] == [1, 1, 2, 3, 4, 5, 5, 5]
    assert [sizes.rows_before(step) for step in range(1, 9)] == [0, 1, 2, 4, 7, 11, 16, 21]
    by_step = ramp(1, 5, 8, by_step=True)  # 1 + floor(4 (step - 1) / 8)
    assert [by_step.rows(step) for step in range(1, 11)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_C8_gpt3_from_32K_to_3_2M_tokens():
    sizes = ramp(**GPT3)
    assert sizes.rows(1) * 2048 == 32_768
    assert sizes.rows(10**6) * 2048 == 3_276_800
    half = sizes.step_of(GPT3["over"] // 2)
    assert sizes.rows(half) == pytest.approx((16 + 1600) / 2, abs=1)  # halfway in tokens, not in steps
    top = sizes.step_of(GPT3["over"])
    assert half > 0.8 * top
    # the ramp dR/dk = 16 + 1584 R / W has grown to 1600 after W / 1584 x ln 100 steps, and R is exponential
    assert top == pytest.approx(12e9 / 2048 / 1584 * 4.605, rel=0.01)
    assert len(sizes.runs) == 1585  # a table as long as the ramp has sizes, whatever the number of steps


ramps = st.tuples(
    st.integers(1, 20), st.integers(1, 40), st.integers(1, 3000), st.booleans(), st.integers(0, 300)
)  # start, growth, over, by step, done


@given(ramps, st.integers(1, 400))
def test_C8_the_table_is_the_sum_over_all_steps(shape: tuple[int, int, int, bool, int], steps: int):
    start, growth, over, by_step, done = shape
    sizes = ramp(start, start + growth, over, by_step, done)
    progress, row = done, 0
    for step in range(1, steps + 1):
        rows = start + growth * min(progress, over) // over
        assert (sizes.rows(step), sizes.rows_before(step)) == (rows, row)
        assert sizes.step_of(row) == sizes.step_of(row + rows - 1) == step
        row, progress = row + rows, progress + (1 if by_step else rows)


def test_a_constant_size():
    sizes = constant(7)
    assert (sizes.rows(10**9), sizes.rows_before(10**9 + 1), sizes.step_of(7 * 10**9 - 1)) == (7, 7 * 10**9, 10**9)
