"""Held-out likelihood: every token once, units, intervals."""

import copy
import math

import numpy as np
import pytest
import torch

from ingot.evaluate.bootstrap import ratio
from ingot.evaluate.likelihood import Likelihood, comparison, likelihood
from ingot.model.config import ModelSettings
from ingot.model.losses import cross_entropy
from ingot.model.transformer import build

T, V = 12, 32


def test_D1_nats_bits_and_perplexity():
    four = Likelihood(np.array([4 * math.log(20)]), np.array([4]), np.array([8.0]), all_tokens=True)
    rows = {r["metric"]: r["value"] for r in four.rows()}
    assert rows == pytest.approx({"loss_nats": math.log(20), "perplexity": 20, "bits_per_byte": math.log2(20) / 2})


def test_the_perplexity_of_a_model_that_diverged_is_a_number():
    (loss, perplexity, _) = Likelihood(np.array([900.0]), np.array([1]), np.array([1.0]), all_tokens=True).rows()
    assert loss["value"] == 900
    assert 1e307 < perplexity["value"] < math.inf


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.9])
def test_D1_every_held_out_token_is_scored_once(make_store, overlap):
    draw = np.random.default_rng(0)
    store = make_store([draw.integers(0, V, n).tolist() for n in (5, 40, 17)], vocab=V)
    model = build(ModelSettings(depth=1, width=32, heads=2, context=T).resolve(V), seed=0)
    found = likelihood(model, store, overlap, rows_per_batch=3)
    assert found.tokens.tolist() == [4, 40, 17]
    assert found.bytes.tolist() == [5, 40, 17]
    large = build(ModelSettings(depth=1, width=32, heads=2, context=100).resolve(V), seed=0)
    ids = torch.from_numpy(store.ids.read(0, 62).astype(np.int64))[None]
    with torch.no_grad():
        out = large(ids[:, :-1])
        nll, _ = cross_entropy(out.hidden, out.head, ids[:, 1:])
    assert likelihood(large, store, overlap, 3).nats.sum() == pytest.approx(nll.item(), rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_does_not_diverge_from_itself(make_store, family):
    """Whatever mode it was left in: dropout would make two models of one."""
    store = make_store([np.random.default_rng(0).integers(0, V, 40).tolist()], vocab=V)
    model = build(ModelSettings(family=family, depth=1, width=32, heads=2, context=T, dropout=0.5).resolve(V), seed=0)
    same = comparison(model.train(), copy.deepcopy(model).train(), store, 0.5, 3)
    assert same.kl["value"] == pytest.approx(0, abs=1e-6)
    other = build(model.config, seed=1)
    assert comparison(model.train(), other, store, 0.5, 3).kl["value"] > 1e-4
    assert comparison(model, other, store, 0.5, 3, context=4) != comparison(model, other, store, 0.5, 3)


def test_conversations_beyond_the_context_are_counted_and_not_in_n(make_store):
    documents = [list(range(1, 9)), list(range(1, 20)), list(range(1, 31))]
    masks = [[0] * 4 + [1] * 4, [0] * 6 + [1] * 13, [0] * 20 + [1] * 10]
    model = build(ModelSettings(depth=1, width=32, heads=2, context=T).resolve(V), seed=0)
    found = likelihood(model, make_store(documents, masks, vocab=V), 0.5, rows_per_batch=3)
    rows = {row["metric"]: row for row in found.rows()}
    assert rows["left_out_conversations"]["value"] == 1
    assert rows["left_out_tokens"]["value"] == 30 + 19 - (T + 1)
    assert rows["response_loss_nats"]["n"] == (found.tokens > 0).sum() == 2
    nothing = likelihood(model, make_store(documents[2:], masks[2:], vocab=V), 0.5, rows_per_batch=3)
    assert [row["metric"] for row in nothing.rows()] == ["left_out_conversations", "left_out_tokens"]
    whole = likelihood(model, make_store(documents[:1], masks[:1], vocab=V), 0.5, rows_per_batch=3)
    assert [row["metric"] for row in whole.rows()] == ["response_loss_nats", "perplexity"]


def test_ratio_is_of_sums_and_holds_its_value():
    r = ratio(np.array([1.0, 9.0]), np.array([1, 3]))
    assert (r["value"], r["n"]) == (2.5, 2)
    assert r["low"] <= 2.5 <= r["high"]
