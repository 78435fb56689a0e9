"""Rewards to advantages (ALGORITHMS 2.3 and 2.4): against definitions, loops and enumeration."""

import itertools
import math

import pytest
import torch

from ingot.objectives.advantages import (
    adapt_beta,
    explained_variance,
    gae,
    group_advantages,
    last_positions,
    sum_to_end,
    token_rewards,
    whiten,
)

B, T = 16, 11


def _ragged(seed: int = 0):
    """Rewards, values, mask of B rows with 0 to T - 2 labelled positions somewhere in the row."""
    draw = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, B, T, generator=draw, dtype=torch.float64)
    mask = torch.zeros(B, T, dtype=torch.bool)
    for row in range(B):
        start = row % 4
        mask[row, start : start + min(row, T - 2 - start)] = True
    return rewards, values, mask


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
@pytest.mark.parametrize("bootstrap", [False, True])
def test_2_3_gae_equals_its_definition(gamma, lam, bootstrap):
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, written out in O(T^2)."""
    rewards, values, mask = _ragged()
    after = torch.randn(B, dtype=torch.float64) if bootstrap else torch.zeros(B, dtype=torch.float64)
    found = gae(rewards, values, mask, after, gamma, lam)
    for row in range(B):
        places = mask[row].nonzero().squeeze(1).tolist()
        for i, t in enumerate(places):
            expected = 0.0
            for power, u in enumerate(places[i:]):
                following = values[row, u + 1] if u != places[-1] else after[row]
                expected += (gamma * lam) ** power * (rewards[row, u] + gamma * following - values[row, u])
            assert found[row, t].item() == pytest.approx(float(expected), rel=1e-12, abs=1e-12)
    assert (found[~mask] == 0).all()


def test_2_3_gae_with_lambda_1_is_the_return_less_the_value_and_with_0_one_step():
    rewards, values, mask = _ragged(1)
    after = torch.zeros(B, dtype=torch.float64)
    monte_carlo = sum_to_end(rewards, mask) - values.where(mask, torch.zeros(()).double())
    torch.testing.assert_close(gae(rewards, values, mask, after, 1.0, 1.0), monte_carlo, rtol=0, atol=1e-12)
    one = gae(rewards, values, mask, after, 1.0, 0.0)
    last = last_positions(mask)
    row = 9
    t = int(last[row])
    assert one[row, t] == rewards[row, t] - values[row, t]
    assert one[row, t - 1] == rewards[row, t - 1] + values[row, t] - values[row, t - 1]


def test_2_3_the_score_is_on_the_last_token_of_the_completion():
    _, penalty, mask = _ragged(2)
    scores = torch.arange(1.0, B + 1, dtype=torch.float64)
    found = token_rewards(scores, penalty, mask)
    for row in range(B):
        places = mask[row].nonzero().squeeze(1)
        expected = torch.zeros(T, dtype=torch.float64)
        expected[places] = -penalty[row, places]
        if len(places):
            expected[places[-1]] += scores[row]
        assert torch.equal(found[row], expected)


def test_2_3_source_error_a_score_one_place_late_biases_the_stop_token():
    """What other packages do: their advantage of the stop token is off by (1 - lambda) (R - V(after the end))."""
    lam, score = 0.95, 1.0
    mask = torch.tensor([[True, True, True, False]])
    values = torch.tensor([[0.3, 0.5, 0.2, 0.4]], dtype=torch.float64)
    zero = torch.zeros(1, 4, dtype=torch.float64)
    right = gae(token_rewards(torch.tensor([score]).double(), zero, mask), values, mask, zero[:, 0], 1.0, lam)
    late_mask = torch.ones(1, 4, dtype=torch.bool)
    late = gae(token_rewards(torch.tensor([score]).double(), zero, late_mask), values, late_mask, zero[:, 0], 1.0, lam)
    assert (right - late)[0, 2].item() == pytest.approx((1 - lam) * (score - 0.4), abs=1e-12)


def test_2_3_whitening_is_over_all_tokens_of_the_step():
    x, _, mask = _ragged(3)
    found = whiten(x, mask)
    assert found[mask].mean().item() == pytest.approx(0, abs=1e-12)
    assert found[mask].var(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert (found[~mask] == 0).all()
    torch.testing.assert_close(whiten(3 * x + 5, mask), found, rtol=0, atol=1e-7)
    by_row = torch.stack([whiten(x[row : row + 1], mask[row : row + 1])[0] for row in range(B)])
    assert (by_row - found)[mask].abs().max() > 0.1  # the control: each row by itself is something else
    assert (whiten(torch.ones(B, T), mask) == 0).all()
    assert (whiten(x, torch.zeros_like(mask)) == 0).all()


def test_2_3_explained_variance():
    returns, noise, mask = _ragged(4)
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full_like(returns, 2.0), returns, mask).abs() < 1e-12
    assert explained_variance(returns + 3, returns, mask) == pytest.approx(1, abs=1e-12)
    assert explained_variance(noise, returns, mask) < 0.5
    assert not explained_variance(returns, torch.ones_like(returns), mask).isfinite()


def test_2_3_adaptive_kl_rises_above_its_target_and_falls_below():
    """beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon), by hand."""
    assert adapt_beta(0.1, kl=6.6, target=6.0, rows=100, horizon=1000) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert adapt_beta(0.1, kl=60.0, target=6.0, rows=100, horizon=1000) == pytest.approx(0.1 * 1.02)
    assert adapt_beta(0.1, kl=0.0, target=6.0, rows=100, horizon=1000) == pytest.approx(0.1 * 0.98)
    assert adapt_beta(0.1, kl=0.0, target=6.0, rows=64, horizon=10) == pytest.approx(0.1 * 0.8)  # and not -0.028
    beta = 0.1
    for _ in range(100):
        beta = adapt_beta(beta, kl=60.0, target=6.0, rows=100, horizon=10_000)
    assert beta / 0.1 == pytest.approx(math.exp(0.2), rel=2e-3)


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("baseline", ["mean", "others"])
@pytest.mark.parametrize(("score", "group"), [(10.1, 7), (37.7, 12), (100.1, 12), (1000.3, 3)])
def test_equal_rewards_are_no_signal_however_they_round(baseline, standardise, score, group):
    scores = torch.full((2, group), score)
    scores[1, 0] = math.nan
    assert group_advantages(scores, baseline, standardise).tolist() == [[0.0] * group] * 2


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("baseline", ["mean", "others"])
def test_2_4_group_advantages_against_loops(baseline, standardise):
    scores = torch.randn(6, 5, dtype=torch.float64)
    scores[1, 2] = scores[3, 0] = scores[3, 1] = math.nan
    scores[4, 1:] = math.nan  # one is left: nothing to compare with
    scores[5] = math.nan
    found = group_advantages(scores, baseline, standardise)
    for p, i in itertools.product(range(6), range(5)):
        known = [float(s) for s in scores[p] if not s.isnan()]
        if scores[p, i].isnan() or len(known) == 1:
            assert found[p, i] == 0
            continue
        r = float(scores[p, i])
        base = sum(known) / len(known) if baseline == "mean" else (sum(known) - r) / (len(known) - 1)
        scale = torch.tensor(known, dtype=torch.float64).std().item() + 1e-4 if standardise else 1.0
        assert found[p, i].item() == pytest.approx((r - base) / scale, rel=1e-9)


def test_2_4_a_group_of_equals_has_no_signal():
    """Not rounding noise divided by itself."""
    for baseline in ("mean", "others"):
        assert group_advantages(torch.full((2, 8), 0.1), baseline, True).abs().max() < 1e-3


@pytest.mark.parametrize("G", [2, 3, 4])
def test_G2_grpo_has_the_factor_g_minus_1_over_g_and_rloo_factor_1(G):
    """A 4-armed bandit, all 4^G groups enumerated: E[gradient] against the gradient of E[reward]."""
    logits = torch.tensor([0.3, -0.5, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([1.0, 0.2, -0.7, 2.0], dtype=torch.float64)
    (exact,) = torch.autograd.grad((logits.softmax(0) * reward).sum(), logits)
    arms = torch.tensor(list(itertools.product(range(4), repeat=G)))
    logp = logits.log_softmax(0)
    chance = logp.detach()[arms].sum(1).exp()
    for baseline, factor in (("mean", (G - 1) / G), ("others", 1.0)):
        advantages = group_advantages(reward[arms], baseline, standardise=False)
        surrogate = (chance * (advantages * logp[arms]).mean(1)).sum()
        (found,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
        torch.testing.assert_close(found, factor * exact, rtol=0, atol=1e-9)
    standardised = group_advantages(reward[arms], "mean", standardise=True)  # the control: no constant factor at all
    (found,) = torch.autograd.grad((chance * (standardised * logp[arms]).mean(1)).sum(), logits, retain_graph=True)
    ratio = found / exact
    assert ratio.max() - ratio.min() > 1e-3 or G == 2
    assert (ratio - (G - 1) / G).abs().min() > 1e-3


@pytest.mark.parametrize(("p", "G", "signal"), [(0.02, 8, 0.149), (0.02, 16, 0.276), (0.1, 8, 0.570), (0.5, 8, 0.992)])
def test_2_4_how_many_groups_have_a_signal(p, G, signal):
    """1 - p^G - (1 - p)^G, measured on all 2^G outcomes of a binary reward where they are few enough."""
    assert 1 - p**G - (1 - p) ** G == pytest.approx(signal, abs=1e-3)
    if G == 8:
        outcomes = torch.tensor(list(itertools.product((0.0, 1.0), repeat=G)), dtype=torch.float64)
        chance = (p**outcomes * (1 - p) ** (1 - outcomes)).prod(1)
        has = group_advantages(outcomes, "mean", False).abs().amax(1) > 1e-6
        assert chance[has].sum().item() == pytest.approx(signal, abs=1e-3)
