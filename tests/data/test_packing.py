"""Rows: windows over the stream, and best-fit packing of whole documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import UserError
from ingot.data.packing import PAD, BestFit, Concatenated, OnePerRow, make_row_plan
from ingot.data.sampler import Order


def _all(start: int, stop: int) -> np.ndarray:
    """A mask that learns every token."""
    return np.ones(stop - start, np.uint8)


def _ends(lengths: list[int]) -> np.ndarray:
    return np.cumsum(lengths).astype(np.uint64)


def test_C1_number_of_windows() -> None:
    assert Concatenated(_ends([10_000]), 1024, stride=1).rows == 8_976


def test_C1_six_tokens_context_four_give_two_pairs() -> None:
    index, _ = Concatenated(_ends([6]), 4, stride=1).index(np.array([0, 1]))
    assert index.tolist() == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]


def test_C2_every_valid_offset_is_reachable() -> None:
    """004's randint(len - T - 1) can never draw the last window; the last row here ends at the last token."""
    n, context = 1000, 64
    plan = Concatenated(_ends([n]), context, stride=1)
    index, _ = plan.index(np.arange(plan.rows))
    assert index[0, 0] == 0
    assert index[-1, -1] == n - 1
    assert plan.rows == n - context


def test_C2_source_error_the_last_window_is_drawn() -> None:
    """An epoch of the order draws every offset once. 004's randint never draws the last: its bound is exclusive."""
    n, context = 40, 8
    plan = Concatenated(_ends([n]), context, stride=1)
    _, rows = Order((plan.rows,), (1.0,), seed=1).at(0, plan.rows)
    assert sorted(plan.index(rows)[0][:, 0].tolist()) == list(range(n - context))
    drawn = np.random.default_rng(0).integers(0, n - context - 1, 10_000)
    assert drawn.max() == n - context - 2


def test_C3_rows_of_the_two_splits_share_no_token() -> None:
    """tinyshakespeare, 90/10 at one place: 1,003,854 and 111,540; the held-out rows cover all targets of their part."""
    tokens, cut = 1_115_394, 1_003_854
    assert (int(0.9 * tokens), tokens - cut) == (cut, 111_540)
    train, held_out = Concatenated(_ends([cut]), 64), Concatenated(_ends([tokens - cut]), 64, tail=True)
    assert train.index(np.array([train.rows - 1]))[0].max() < cut
    assert train.rows == (cut - 1) // 64
    assert held_out.targets == 111_539


@given(st.integers(2, 400), st.integers(1, 50), st.integers(1, 60))
def test_windows_with_tail_cover_every_target(tokens: int, context: int, stride: int) -> None:
    stride = min(stride, context)
    plan = Concatenated(_ends([tokens]), context, stride, tail=True)
    index, _ = plan.index(np.arange(plan.rows))
    targets = index[:, 1:]
    assert set(targets[targets != PAD].tolist()) == set(range(1, tokens))
    if stride == context:
        assert (targets != PAD).sum() == tokens - 1 == plan.targets


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(4, 40))
def test_best_fit_loses_no_target_and_splits_no_document_that_fits(lengths: list[int], context: int) -> None:
    ends = _ends(lengths)
    plan = BestFit(ends, context)
    if plan.rows == 0:
        assert max(lengths) < 2
        return
    pieces = [p for row in range(plan.rows) for p in plan.slices(row)]
    targets = sorted(t for p in pieces for t in range(p.start + 1, p.stop))
    starts = np.concatenate([[0], ends[:-1]]).astype(int)
    assert targets == [t for s, e in zip(starts, ends.astype(int), strict=True) for t in range(s + 1, e)]
    assert plan.targets == len(targets)
    for row in range(plan.rows):
        assert sum(p.stop - p.start for p in plan.slices(row)) <= context + 1
    whole = [p for p in pieces if lengths[p.document] <= context + 1]
    assert all(p.stop - p.start == lengths[p.document] for p in whole)


def test_best_fit_is_tight() -> None:
    plan = BestFit(_ends([7, 3, 5, 5, 8, 2]), context=9)
    assert plan.rows == 3
    index, document = plan.index(np.arange(3))
    assert (index != PAD).all()
    assert sorted(map(len, (set(d) for d in document.tolist()))) == [2, 2, 2]


def test_conversations_are_truncated_and_the_loss_counted() -> None:
    plan = BestFit(_ends([30, 5]), context=9, mask=_all)
    assert (plan.dropped_tokens, plan.dropped) == (20, 0)
    assert max(p.stop - p.start for r in range(plan.rows) for p in plan.slices(r)) == 10


def test_2_1_a_document_whose_answer_is_cut_off_is_left_out_and_counted() -> None:
    """Four conversations, rows of 10: whole; the answer begins at the last place; begins behind it; whole again."""
    lengths, first_learned = [8, 20, 20, 5], [3, 9, 10, 2]
    mask = np.concatenate([np.arange(n) >= f for n, f in zip(lengths, first_learned, strict=True)])
    plan = BestFit(_ends(lengths), 9, mask=lambda start, stop: mask[start:stop])
    shown = {p.document: p.stop - p.start for row in range(plan.rows) for p in plan.slices(row)}
    assert shown == {0: 8, 1: 10, 3: 5}
    assert (plan.dropped, plan.dropped_tokens) == (1, sum(lengths) - sum(shown.values()))
    assert list(plan.rows_of(2)) == []
    whole = BestFit(_ends(lengths), 19, mask=lambda start, stop: mask[start:stop])
    assert (whole.dropped, whole.dropped_tokens) == (0, 0)


def test_2_1_where_every_answer_is_cut_off_one_sentence_says_so() -> None:
    with pytest.raises(UserError, match=r"each of its 2 documents is longer than the context of 9, and its answer"):
        make_row_plan(
            "best-fit", _ends([30, 20]), 9, None, mask=lambda start, stop: 0 * _all(start, stop), what="data.q"
        )


def test_context_longer_than_the_data_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"data.clean: found 10 tokens, expected at least one row of context 64 \(65\)"):
        make_row_plan("concat", _ends([10]), 64, None, mask=None, what="data.clean")
    with pytest.raises(UserError, match=r"packing\.stride: found 9, expected at most the context of 8"):
        make_row_plan("concat", _ends([100]), 8, 9, mask=None, what="data.clean")
    assert make_row_plan("concat", _ends([100]), 8, 8, mask=None, what="data.clean").rows


def test_C1_an_epoch_is_counted_in_tokens_at_any_stride():
    every = Concatenated(_ends([1_000_000]), 1024, stride=1)
    assert every.targets == 999_999
    assert every.rows * 1024 / every.targets == pytest.approx(1024, rel=2e-3)  # each token about T times
    assert Concatenated(_ends([10_000]), 1024).targets == 9 * 1024


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(4, 24), st.integers(1, 30))
def test_the_rows_of_a_document_are_the_rows_that_hold_it(lengths: list[int], context: int, stride: int) -> None:
    ends = _ends(lengths)
    for plan in (Concatenated(ends, context, stride), BestFit(ends, context), BestFit(ends, context, _all)):
        holds: dict[int, list[int]] = {d: [] for d in range(len(lengths))}
        for row in range(plan.rows):
            for document in dict.fromkeys(piece.document for piece in plan.slices(row)):
                holds[document].append(row)
        assert {d: list(plan.rows_of(d)) for d in holds} == holds


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(4, 24), st.integers(1, 30), st.data())
def test_the_rows_of_some_tokens_are_the_rows_that_hold_one(
    lengths: list[int], context: int, stride: int, data: st.DataObject
) -> None:
    ends = _ends(lengths)
    document = data.draw(st.integers(0, len(lengths) - 1))
    start = data.draw(st.integers(int(ends[document]) - lengths[document], int(ends[document]) - 1))
    tokens = start, data.draw(st.integers(start + 1, int(ends[document])))
    for plan in (Concatenated(ends, context, stride), BestFit(ends, context), OnePerRow(ends, 24)):
        holds = [
            row
            for row in range(plan.rows)
            if any(max(p.start, tokens[0]) < min(p.stop, tokens[1]) for p in plan.slices(row))
        ]
        assert list(plan.rows_of(document, tokens)) == holds
