"""G2: the sampling settings against transformers' processors, exact enumeration, and extreme values."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ingot.core.errors import UserError
from ingot.infer.generate import generate
from ingot.infer.ops import TorchOps
from ingot.infer.sampling import (
    Candidates,
    Sampling,
    draw,
    inverse_cdf_sample,
    min_p,
    penalise,
    top_k,
    top_p,
    truncate,
    uniforms,
)
from ingot.model.config import ModelSettings
from ingot.model.transformer import build

ROWS, VOCAB = 32, 50


def _full_vocabulary(found: Candidates, vocab: int = VOCAB) -> torch.Tensor:
    """B x V, -inf at the tokens that are excluded."""
    if found.ids_BN is None:
        return found.logits_BN
    nothing_BV = torch.full((len(found.ids_BN), vocab), -torch.inf, dtype=found.logits_BN.dtype)
    return nothing_BV.scatter_reduce(1, found.ids_BN, found.logits_BN, "amax")  # shorter rows are filled up with id 0


def _kept(found: torch.Tensor | Candidates) -> list[set[int]]:
    logits_BV = _full_vocabulary(found) if isinstance(found, Candidates) else found
    return [set(torch.isfinite(row).nonzero()[:, 0].tolist()) for row in logits_BV]


def _row(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
@pytest.mark.parametrize(
    ("k", "p", "least"),
    [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (30, 0.9, 0.02), (VOCAB + 9, 0.3, 0.5), (1, 0.5, 1.0)],
)
def test_G2_logits_and_kept_sets_are_those_of_transformers(temperature, penalty, k, p, least):
    from transformers.generation import logits_process as theirs

    generator = torch.Generator().manual_seed(k)
    logits_BV = 3 * torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64)
    ids_BT = torch.randint(VOCAB, (ROWS, 20), generator=generator)
    seen_BV = torch.zeros(ROWS, VOCAB, dtype=torch.bool).scatter(1, ids_BT, True)
    processors = [theirs.RepetitionPenaltyLogitsProcessor(penalty), theirs.TemperatureLogitsWarper(temperature)]
    processors += [theirs.TopKLogitsWarper(k)] if k else []
    processors += [theirs.TopPLogitsWarper(p)] if p < 1 else []
    processors += [theirs.MinPLogitsWarper(least)] if least else []
    expected_BV = logits_BV
    for processor in processors:
        expected_BV = processor(ids_BT, expected_BV)
    sampling = Sampling(temperature=temperature, top_k=k, top_p=p, min_p=least)
    found_BV = _full_vocabulary(truncate(penalise(logits_BV, seen_BV, penalty) / temperature, sampling))
    assert _kept(found_BV) == _kept(expected_BV)
    torch.testing.assert_close(found_BV, expected_BV, rtol=1e-12, atol=0)
    if k or p < 1 or least:
        assert max(map(len, _kept(found_BV))) < VOCAB


def test_order_is_top_k_then_top_p_then_min_p():
    """Top-p counts what top-k left: .3 is a third of everything, and half of the two likeliest."""
    logits = _row(0.3, 0.3, 0.2, 0.2)
    assert _kept(truncate(logits, Sampling(top_k=2, top_p=0.5))) == [{0}]
    assert _kept(top_k(_full_vocabulary(top_p(Candidates(logits), 0.5)), 2)) == [{0, 1}]  # the other order


def test_equal_tokens_at_the_border():
    tied = _row(0.1, 0.2, 0.2, 0.3, 0.2)
    assert _kept(top_k(tied, 2)) == [{1, 3}]  # exactly k, lower ids first
    assert _kept(top_k(tied, 3)) == [{1, 2, 3}]
    assert _kept(top_k(tied, 9)) == [{0, 1, 2, 3, 4}]
    assert _kept(top_p(Candidates(tied), 0.45)) == [{1, 3}]
    fourths = Candidates(_row(0.25, 0.25, 0.25, 0.25))
    assert _kept(top_p(fourths, 0.5)) == [{0, 1}]  # two hold the half exactly: no third
    assert _kept(min_p(Candidates(_row(0.25, 0.5, 0.125, 0.125)), 0.5)) == [{0, 1}]  # exactly half as likely stays
    assert _kept(min_p(Candidates(tied), 1.0)) == [{3}]
    assert _kept(min_p(Candidates(_row(0.4, 0.2, 0.4)), 1.0)) == [{0, 2}]


@pytest.mark.parametrize("ties", [False, True])
def test_a_large_vocabulary_is_truncated_and_drawn_from_as_sorting_it_says(ties):
    """Candidates found among the likeliest first, tokens by blocks of 256; here by sorting and summing all in fp64."""
    rows, vocab = 40, 3001
    generator = torch.Generator().manual_seed(5)
    peaked = torch.linspace(0.2, 6, rows)[:, None]  # some nuclei are found in the short list, some are not
    logits_BV = peaked * torch.randn(rows, vocab, generator=generator)
    logits_BV = logits_BV.round() if ties else logits_BV
    order_BV = logits_BV.sort(dim=-1, descending=True, stable=True).indices
    p_BV = logits_BV.double().softmax(-1)
    upto_BV = p_BV.gather(1, order_BV).cumsum(-1)
    for k in (1, 50, 256, 3000):
        expected = [set(row[:k].tolist()) for row in order_BV]
        assert [set(row.tolist()) for row in top_k(logits_BV, k).ids_BN] == expected
    sizes = (torch.searchsorted(upto_BV, torch.full((rows, 1), 0.9, dtype=torch.double)) + 1)[:, 0].tolist()
    assert min(sizes) < 100 < 1000 < max(sizes)
    nucleus = top_p(Candidates(logits_BV), 0.9)
    left_BN = nucleus.logits_BN > -torch.inf
    found = [sorted(ids[left].tolist()) for ids, left in zip(nucleus.ids_BN, left_BN, strict=True)]
    assert found == [sorted(row[:size].tolist()) for row, size in zip(order_BV, sizes, strict=True)]
    short = top_p(Candidates(logits_BV[-9:]), 0.9).logits_BN
    assert short.shape[1] == 256  # peaked rows alone need no more
    u_B = torch.rand(rows, generator=generator, dtype=torch.double)
    expected_B = torch.searchsorted(p_BV.cumsum(-1), u_B[:, None], right=True)[:, 0]
    assert inverse_cdf_sample(logits_BV.double(), u_B).tolist() == expected_B.tolist()
    assert nucleus.sample(u_B).tolist() == inverse_cdf_sample(_full_vocabulary(nucleus, vocab), u_B).tolist()


def test_a_nucleus_does_not_depend_on_the_rows_beside_it():
    """A row whose short list lacks a rounding of the probability needs no more tokens beside a row that does."""
    generator = torch.Generator().manual_seed(0)
    peaked, flat = torch.full((1, 3000), -40.0), torch.full((1, 3000), -40.0)
    peaked[0, :100], flat[0, :250] = 2 * torch.randn(100, generator=generator), 0.0
    for p in (1 - 1e-7, 1 - 1e-6, 0.9):
        together = top_p(Candidates(torch.cat((peaked, flat))), p)
        alone = [_kept(_full_vocabulary(top_p(Candidates(row), p), 3000))[0] for row in (peaked, flat)]
        assert _kept(_full_vocabulary(together, 3000)) == alone
        assert len(alone[1]) == round(250 * p)
    assert (
        len(_kept(_full_vocabulary(top_p(Candidates(torch.zeros(1, 4096)), 1 / 32), 4096))[0]) == 128
    )  # equal at the border


def test_blocks_of_a_large_vocabulary_are_drawn_in_proportion():
    """The first, the last and a token between, 10,000 keyed draws, in fp32."""
    logits_V = torch.full((3000,), -torch.inf)
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits_V[[0, 255, 256, 2999]] = p.log()
    u_B = torch.from_numpy(uniforms(1, 2, np.array([(i, 0) for i in range(10_000)]), np.full(10_000, 7)))
    found, counts = inverse_cdf_sample(logits_V.expand(len(u_B), -1), u_B).unique(return_counts=True)
    assert found.tolist() == [0, 255, 256, 2999]
    assert float(((counts - 10_000 * p) ** 2 / (10_000 * p)).sum()) < _quantile(3)
    ends = torch.tensor([0.0, 1 - 2**-52], dtype=torch.double)
    assert inverse_cdf_sample(logits_V.expand(2, -1), ends).tolist() == [0, 2999]


def test_the_likeliest_token_always_stays():
    logits = 5 * torch.randn(200, 30, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(dim=-1).tolist()
    for sampling in (Sampling(top_k=1), Sampling(top_p=1e-12), Sampling(min_p=1.0)):
        assert _kept(truncate(logits, sampling)) == [{token} for token in best]


@pytest.mark.parametrize("tie", [False, True])
def test_G2_top_k_of_one_and_temperature_zero_are_greedy(tie):
    logits = torch.randn(300, 20, generator=torch.Generator().manual_seed(1))
    if tie:
        logits = logits.round()
        assert ((logits == logits.amax(dim=-1, keepdim=True)).sum(dim=-1) > 1).any()
    u = torch.rand(300, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    greedy, _ = draw(logits, Sampling(temperature=0), u)
    assert greedy.tolist() == logits.numpy().argmax(axis=-1).tolist()
    assert draw(logits, Sampling(temperature=1.7, top_k=1), u)[0].tolist() == greedy.tolist()
    assert draw(logits, Sampling(temperature=1.7), u)[0].tolist() != greedy.tolist()


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
def test_a_temperature_near_zero_takes_the_likeliest_and_stays_a_number(temperature):
    logits = 1e4 * torch.randn(50, 20, generator=torch.Generator().manual_seed(1))
    u = torch.rand(50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for sampling in (Sampling(temperature=temperature), Sampling(temperature=temperature, top_p=0.9, top_k=3)):
        ids, logp = draw(logits, sampling, u)
        assert ids.tolist() == logits.argmax(dim=-1).tolist()
        assert logp.tolist() == [0.0] * 50


def test_a_token_without_weight_is_never_picked_at_either_end():
    row = torch.tensor([-torch.inf, -torch.inf, 0.3, -torch.inf, 0.1, -torch.inf]).expand(4, 6)
    u = torch.tensor([0.0, 2.0**-52, 1 - 2.0**-52, 0.999], dtype=torch.float64)
    assert inverse_cdf_sample(row, u).tolist() == [2, 2, 4, 4]


def test_ids_past_the_tokenizers_vocabulary_are_never_drawn():
    logits = torch.zeros(500, 8).index_fill(1, torch.tensor([5, 6, 7]), 4.0)
    u = torch.rand(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for sampling in (Sampling(vocab=5), Sampling(vocab=5, temperature=0), Sampling(vocab=5, top_k=3, top_p=0.9)):
        for greedy in (None, TorchOps(torch.float32, torch.float32).argmax):
            ids, logps = draw(logits, sampling, u, greedy=greedy)
            assert ids.max() < 5
            assert logps.unique().item() == pytest.approx(-math.log(5 + 3 * math.exp(4)))  # of the full table
    assert draw(logits, Sampling(), u)[0].max() == 7


def test_penalty_makes_seen_tokens_less_likely_whatever_the_sign():
    logits = torch.tensor([[2.0, -2.0, 0.0, 1.0]])
    assert penalise(logits, torch.tensor([[True, True, True, False]]), 2.0).tolist() == [[1.0, -4.0, 0.0, 1.0]]


CHI_SETTINGS = Sampling(max_new=2, temperature=0.8, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.8)


def _next(logits, seen, sampling):
    """The distribution of the next token in plain Python, one token at a time, written from the settings' words."""
    z = {}
    for token, logit in enumerate(logits):
        if token in seen:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        z[token] = logit / sampling.temperature
    order = sorted(z, key=lambda token: (-z[token], token))[: sampling.top_k or None]
    weights = {token: math.exp(z[token]) for token in order}
    total, before, kept = sum(weights.values()), 0.0, []
    for token in order:
        if before < sampling.top_p:
            kept.append(token)
        before += weights[token] / total
    kept = [token for token in kept if weights[token] >= sampling.min_p * weights[order[0]]]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def _pairs(model, prompt, sampling, penalise_generated=True):
    """Probability of every two-token continuation."""

    def logits(ids):
        with torch.inference_mode():
            out = model(torch.tensor([ids]))
            return out.head(out.hidden[0, -1]).double().tolist()

    found = {}
    for first, p in _next(logits(prompt), set(prompt), sampling).items():
        seen = {*prompt, first} if penalise_generated else set(prompt)
        for second, q in _next(logits([*prompt, first]), seen, sampling).items():
            found[first, second] = p * q
    return found


def _chi_square(counts, expected, n):
    impossible = sum(c for pair, c in counts.items() if pair not in expected)
    return impossible, sum((counts.get(pair, 0) - n * p) ** 2 / (n * p) for pair, p in expected.items())


def _quantile(df: int) -> float:
    """Chi-square's upper 1e-5 point (Wilson and Hilferty 1931)."""
    return df * (1 - 2 / (9 * df) + 4.265 * math.sqrt(2 / (9 * df))) ** 3


def test_G2_twenty_thousand_draws_follow_the_enumerated_distribution():
    """Both tokens of a continuation, all settings at once; a rule that forgets one setting is far outside."""
    model = build(ModelSettings(depth=1, width=16, heads=2, context=8, tied=False).resolve(8), seed=11)
    with torch.no_grad():
        model.head.weight.mul_(5)
        model.embedding.weight.mul_(8)
    prompt, n = [2, 5, 1], 20_000
    counts: dict[tuple[int, ...], int] = {}
    for completion in generate(model, [prompt], CHI_SETTINGS, samples=n, seed=11):
        pair = tuple(completion.ids.tolist())
        counts[pair] = counts.get(pair, 0) + 1
    expected = _pairs(model, prompt, CHI_SETTINGS)
    assert 8 <= len(expected) < 40
    impossible, statistic = _chi_square(counts, expected, n)
    assert impossible == 0
    assert statistic < _quantile(len(expected) - 1)

    wrong = [replace(CHI_SETTINGS, **change) for change in ({"temperature": 0.9}, {"repetition_penalty": 1.2})]
    wrong += [replace(CHI_SETTINGS, **change) for change in ({"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.25})]
    controls = [_pairs(model, prompt, settings) for settings in wrong]
    controls.append(_pairs(model, prompt, CHI_SETTINGS, penalise_generated=False))
    for control in controls:
        impossible, statistic = _chi_square(counts, control, n)
        assert impossible > 100 or statistic > 3 * _quantile(len(control) - 1)


def test_G2_draws_with_one_stream_of_uniforms_are_uniform_too():
    """The inverse of the cumulative distribution, on a known distribution: 20,000 keyed draws."""
    p = np.array([0.02, 0.48, 0.0, 0.3, 0.2])
    keys = np.array([(row, sample) for row, sample in itertools.product(range(200), range(100))])
    u = torch.from_numpy(uniforms(0, 0, keys, np.full(len(keys), 3)))
    ids = inverse_cdf_sample(torch.from_numpy(p).log().expand(len(keys), 5), u)
    counts = np.bincount(ids.numpy(), minlength=5)
    assert counts[2] == 0
    kept = p > 0
    n = len(keys)
    assert ((counts - n * p)[kept] ** 2 / (n * p[kept])).sum() < _quantile(3)


def test_only_plain_greedy_draws_are_left_to_the_operation():
    """It knows neither the penalty nor the temperature."""
    calls = []

    def greedy(logits_BV, allowed):
        calls.append(allowed)
        return logits_BV.argmax(-1), logits_BV[:, 0]

    logits, u, seen = torch.zeros(2, 8), torch.zeros(2), torch.zeros(2, 8, dtype=torch.bool)
    for sampling in (Sampling(temperature=0), Sampling(temperature=0, vocab=5), Sampling(temperature=0, vocab=99)):
        draw(logits, sampling, None, None, greedy)
    draw(logits, Sampling(), u, None, greedy)
    draw(logits, Sampling(temperature=0, repetition_penalty=1.5), None, seen, greedy)
    assert calls == [8, 5, 8]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new", 0),
        ("temperature", -1.0),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
    ],
)
def test_settings_out_of_range_are_one_sentence(field, value):
    with pytest.raises(UserError) as caught:
        Sampling(**{field: value})
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{field}: found {value}, expected")
