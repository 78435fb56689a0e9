"""Replay is a share of the mixture: the tokens that a run sees of each source are those that were asked for."""

import numpy as np
import pytest

from ingot.data.batches import Source, make_batch
from ingot.data.packing import BestFit, Concatenated
from ingot.data.sampler import Order

T = 24


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_2_7_realised_token_shares_are_the_asked_ones_within_one_per_cent(make_store, share: float) -> None:
    """By tokens and not by rows: a row of old text has T targets, one of conversations fewer, by its padding."""
    draw = np.random.default_rng(0)
    text = make_store([draw.integers(0, 64, 4000).tolist()])
    talk = [draw.integers(0, 64, n).tolist() for n in draw.integers(13, 19, 500)]  # rarely two in a row
    chat = make_store(talk, masks=[[0] * (len(d) // 2) + [1] * (len(d) - len(d) // 2) for d in talk])
    plans = (Concatenated(np.asarray(text.ends), T), BestFit(np.asarray(chat.ends), T, chat.columns["mask"].read))
    sources = [
        Source("old", text, plans[0], False),
        Source("new", chat, plans[1], True),
    ]
    assert plans[1].row_targets < 0.8 * T
    shares = (share, 1 - share)
    order = Order(tuple(p.rows for p in plans), tuple(s / p.row_targets for s, p in zip(shares, plans, strict=True)), 1)
    source_B, row_B = order.at(0, 10_000)
    tokens = np.zeros(2)
    for s, plan in enumerate(plans):
        index, document = plan.index(row_B[source_B == s])
        follows = (index[:, 1:] >= 0) & ((document[:, 1:] == document[:, :-1]) | (not sources[s].isolate))
        tokens[s] = follows.sum()
    realised = tokens[0] / tokens.sum()
    assert abs(realised - share) < 0.01 * max(share, 0.1)
    by_rows = float((source_B == 0).mean())
    assert abs(by_rows - share) > abs(realised - share)  # the control: rows are in another proportion
    batch = make_batch(sources, *order.at(0, 400))
    assert set(np.unique(batch.source_B)) == {0, 1}
