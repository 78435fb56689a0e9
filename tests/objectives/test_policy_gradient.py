"""Policy losses on a model small enough to enumerate: V = 4 tokens, up to L = 3 of them, one of which may end it.

The policy is a table of logits for every prefix, so expectations are sums over all completions and gradients of exact
quantities come from autograd.
"""

import itertools

import pytest
import torch

from ingot.objectives.advantages import gae, sum_to_end, token_rewards
from ingot.objectives.policy import KLS, aggregate, clipped, k1, k2, k3, log_ratios, per_row, policy_loss, value_loss

V, L = 4, 3
PREFIXES = [p for n in range(L) for p in itertools.product(range(V), repeat=n)]
BETA = 0.7


class Tree:
    """All completions of up to L tokens; where `stop` is a token, it ends them early."""

    def __init__(self, stop: int | None):
        completions: list[tuple[int, ...]] = []
        for full in itertools.product(range(V), repeat=L):
            cut = full.index(stop) + 1 if stop is not None and stop in full else L
            if full[:cut] not in completions:
                completions.append(full[:cut])
        self.completions = completions
        self.tokens = torch.tensor([[*c, *[0] * (L - len(c))] for c in completions])
        self.mask = torch.tensor([[t < len(c) for t in range(L)] for c in completions])
        self.state = torch.tensor([[PREFIXES.index(c[: min(t, len(c) - 1)]) for t in range(L)] for c in completions])

    def logps(self, logits: torch.Tensor) -> torch.Tensor:
        """ln p of every token of every completion, [N, L]."""
        return torch.where(self.mask, logits.log_softmax(-1)[self.state, self.tokens], 0.0)

    def chance(self, logits: torch.Tensor) -> torch.Tensor:
        return self.logps(logits).sum(1).exp()


def _draw(seed: int) -> torch.Tensor:
    return torch.randn(len(PREFIXES), V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits)[0]


@pytest.fixture(params=[None, 0], ids=["fixed length", "with a stop token"])
def tree(request) -> Tree:
    return Tree(request.param)


def test_the_tree_is_whole():
    assert len(Tree(None).completions) == 64
    assert len(Tree(0).completions) == 1 + 3 + 9 * 4
    for stop in (None, 0):
        assert Tree(stop).chance(_draw(0)).sum().item() == pytest.approx(1, abs=1e-12)


def _values(tree: Tree, logits, reference, reward, beta) -> torch.Tensor:
    """The exact value of every state under the policy: what still comes, k1 penalties included; [N, L]."""
    logps, ref, chance = tree.logps(logits), tree.logps(reference), tree.chance(logits)
    rewards = token_rewards(reward, beta * (logps - ref), tree.mask)
    future = sum_to_end(rewards, tree.mask)
    values = torch.zeros(len(PREFIXES), dtype=torch.float64)
    for s in range(len(PREFIXES)):
        here = (tree.state == s) & tree.mask
        weight = torch.where(here, chance[:, None], 0.0)
        if weight.sum() > 0:
            values[s] = (weight * future).sum() / weight.sum()
    return torch.where(tree.mask, values[tree.state], 0.0)


@pytest.mark.parametrize("lam", [1.0, 0.95])
def test_2_3_the_expected_gradient_of_the_surrogate_is_that_of_the_objective(tree, lam):
    """At theta_old, E[grad of the clipped surrogate] = grad of J = E[R] - beta KL(policy || reference), to 1e-8.

    With lambda 1 for any value function; with lambda 0.95 for the true one.
    """
    logits = _draw(1).requires_grad_()
    reference, reward = _draw(2), torch.randn(len(tree.completions), dtype=torch.float64)
    chance = tree.chance(logits)
    divergence = (chance * (tree.logps(logits) - tree.logps(reference)).sum(1)).sum()
    exact = _gradient((chance * reward).sum() - BETA * divergence, logits)

    old = tree.logps(logits).detach()
    penalty = BETA * k1(old, tree.logps(reference))
    values = _draw(3)[:, 0][tree.state] if lam == 1 else _values(tree, logits.detach(), reference, reward, BETA)
    rewards = token_rewards(reward, penalty, tree.mask)
    advantages = gae(rewards, values, tree.mask, torch.zeros(len(reward), dtype=torch.float64), 1.0, lam)
    ratio = log_ratios(tree.logps(logits), old, tree.mask).exp()
    loss = per_row(policy_loss(ratio, advantages, 0.2, 0.2), tree.mask)
    found = _gradient((tree.chance(logits).detach() * loss).sum(), logits)
    torch.testing.assert_close(-found, exact, rtol=0, atol=1e-8)


def test_2_3_a_wrong_value_function_is_a_bias_below_lambda_1(tree):
    """The control of the test above."""
    logits = _draw(1).requires_grad_()
    reward = torch.randn(len(tree.completions), dtype=torch.float64)
    exact = _gradient((tree.chance(logits) * reward).sum(), logits)
    values = _draw(3)[:, 0][tree.state]
    zero = torch.zeros(len(reward), dtype=torch.float64)
    advantages = gae(token_rewards(reward, torch.zeros_like(values), tree.mask), values, tree.mask, zero, 1.0, 0.5)
    found = _gradient((tree.chance(logits).detach() * (advantages * tree.logps(logits)).sum(1)).sum(), logits)
    assert (found - exact).abs().max() > 1e-2


def _states_fixed(tree: Tree, logits, reference, forward: bool) -> torch.Tensor:
    """Sum over positions of the exact KL at the states that the policy reaches, their chances held fixed."""
    p, q = logits.log_softmax(-1), reference.log_softmax(-1)
    kl_S = ((q.exp() * (q - p)) if forward else (p.exp() * (p - q))).sum(-1)
    weight = torch.where(tree.mask, tree.chance(logits).detach()[:, None], 0.0)
    return (weight * kl_S[tree.state]).sum()


def _reverse(tree: Tree, logits, reference) -> torch.Tensor:
    return (tree.chance(logits) * (tree.logps(logits) - tree.logps(reference)).sum(1)).sum()


def test_2_3_kl_table_in_the_loss(tree):
    """k1 -> 0; k2 -> reverse; k3 -> forward; k3 x ratio -> reverse: the gradient of each token's KL."""
    logits, reference = _draw(4).requires_grad_(), _draw(5)
    reverse = _gradient(_states_fixed(tree, logits, reference, forward=False), logits)
    forward = _gradient(_states_fixed(tree, logits, reference, forward=True), logits)
    assert (reverse - forward).abs().max() > 0.05
    for name, expected in (
        ("k1-loss", torch.zeros_like(reverse)),
        ("k2-loss", reverse),
        ("k3-loss", forward),
        ("k3-ratio-loss", reverse),
    ):
        kl = KLS[name]
        logp = tree.logps(logits)
        value = kl.estimate(logp, tree.logps(reference))
        if kl.weighted:
            value = value * (logp - logp.detach()).exp()
        found = _gradient((tree.chance(logits).detach() * per_row(value, tree.mask)).sum(), logits)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_2_3_kl_table_in_the_reward(tree):
    """k1 -> reverse, of whole completions; k3 -> reverse less the forward one of each token; k2 -> neither."""
    logits, reference = _draw(4).requires_grad_(), _draw(5)
    reverse = _gradient(_reverse(tree, logits, reference), logits)
    forward = _gradient(_states_fixed(tree, logits, reference, forward=True), logits)
    found = {}
    for name in ("k1-reward", "k2-reward", "k3-reward"):
        kl_NL = KLS[name].estimate(tree.logps(logits).detach(), tree.logps(reference))
        future = sum_to_end(kl_NL, tree.mask)
        surrogate = tree.chance(logits).detach() * (future * tree.logps(logits)).sum(1)
        found[name] = _gradient(surrogate.sum(), logits)
    torch.testing.assert_close(found["k1-reward"], reverse, rtol=0, atol=1e-9)
    torch.testing.assert_close(found["k3-reward"], reverse - forward, rtol=0, atol=1e-9)
    assert (found["k2-reward"] - reverse).abs().max() > 1e-2
    assert (found["k2-reward"] - forward).abs().max() > 1e-2


def test_2_3_kl_table_near_the_reference_k3_in_the_reward_does_nothing():
    tree, reference = Tree(None), _draw(5)
    logits = (reference + 1e-3 * _draw(4)).requires_grad_()
    sizes = {}
    for name in ("k1-reward", "k3-reward"):
        future = sum_to_end(KLS[name].estimate(tree.logps(logits).detach(), tree.logps(reference)), tree.mask)
        sizes[name] = _gradient((tree.chance(logits).detach() * (future * tree.logps(logits)).sum(1)).sum(), logits)
    assert sizes["k3-reward"].norm() < 0.01 * sizes["k1-reward"].norm()


def test_2_3_kl_estimators_k1_and_k3_are_unbiased_and_k2_is_not(tree):
    logits, reference = _draw(6), _draw(7)
    logps, ref, chance = tree.logps(logits), tree.logps(reference), tree.chance(logits)
    exact = _reverse(tree, logits, reference)
    means = {k: (chance * per_row(k(logps, ref), tree.mask)).sum().item() for k in (k1, k2, k3)}
    assert means[k1] == pytest.approx(exact.item(), abs=1e-12)
    assert means[k3] == pytest.approx(exact.item(), abs=1e-12)
    assert abs(means[k2] - exact.item()) > 1e-2
    assert (k2(logps, ref) >= 0).all()
    assert (k3(logps, ref) >= -1e-15).all()


def test_2_3_the_clipped_policy_loss_by_hand():
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.1, 1.5]).double().repeat(2)
    advantages = torch.tensor([1.0] * 5 + [-1.0] * 5).double()
    expected = torch.tensor([-0.5, -0.9, -1.0, -1.1, -1.2, 0.8, 0.9, 1.0, 1.1, 1.5]).double()
    torch.testing.assert_close(policy_loss(ratio, advantages, 0.2, 0.2), expected)
    assert clipped(ratio, advantages, 0.2, 0.2).tolist() == [False] * 4 + [True, True] + [False] * 4
    assert policy_loss(torch.tensor(1.25), torch.tensor(1.0), 0.2, 0.28) == -1.25  # an own border above
    free = ratio.clone().requires_grad_()
    policy_loss(free, advantages, 0.2, 0.2).sum().backward()
    assert ((free.grad == 0) == clipped(ratio, advantages, 0.2, 0.2)).all()


def test_2_3_the_clipped_value_loss_by_hand():
    """1/2 max of both squares; a value that moved too far has no gradient unless it moved away from the return."""
    values = torch.tensor([0.1, 0.5, -0.5]).double().requires_grad_()
    old, returns = torch.zeros(3).double(), torch.tensor([1.0, 1.0, 1.0]).double()
    loss = value_loss(values, old, returns, 0.2)
    torch.testing.assert_close(loss, 0.5 * torch.tensor([0.81, 0.64, 2.25]).double())
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([-0.9, 0.0, -1.5]).double())


def test_2_3_ratios_are_cut_before_they_overflow():
    mask = torch.ones(1, 2, dtype=torch.bool)
    log = log_ratios(torch.tensor([[0.0, -500.0]]), torch.tensor([[-500.0, 0.0]]), mask)
    assert log.tolist() == [[20.0, -20.0]]
    assert k3(torch.tensor(-900.0), torch.tensor(0.0)).isfinite()


def test_2_4_gspo_has_one_ratio_a_sequence():
    mask = torch.tensor([[False, True, True, True], [True, True, False, False]])
    logp, old = torch.randn(2, 2, 4, dtype=torch.float64)
    found = log_ratios(logp, old, mask, per_sequence=True)
    for row in range(2):
        expected = (logp - old)[row][mask[row]].mean()
        torch.testing.assert_close(found[row], expected.expand(4))


def test_2_4_aggregation_against_loops():
    x = torch.randn(5, 6, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([6, 1, 3, 0, 2])[:, None]
    rows = [x[i][mask[i]] for i in range(5)]
    kept = [r for r in rows if len(r)]
    counts = {"token": int(mask.sum()), "sequence": len(kept)}
    for how, expected in (
        ("token", torch.cat(rows).mean()),
        ("sequence", torch.stack([r.mean() for r in kept]).mean()),
        ("constant", torch.stack([r.sum() / 10 for r in kept]).mean()),
    ):
        term = aggregate(x, mask, how, 10)
        assert (term.sum / counts[term.unit]).item() == pytest.approx(expected.item(), rel=1e-12)
