"""D1: cross-entropy over labelled positions, in chunks, and exactly nothing from the others."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.model import lm_head
from ingot.model.lm_head import LMHead
from ingot.model.losses import IGNORE, cross_entropy, cross_entropy_terms, token_logps
from ingot.train.divergences import kl_divergence

D, V = 5, 11


def _case(ignored: float = 0.4, dtype=torch.float64, B=3, T=7):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, dtype=dtype, requires_grad=True)
    labels = torch.randint(V, (B, T), generator=generator)
    labels[torch.rand(B, T, generator=generator) < ignored] = IGNORE
    return hidden, weight, labels


def _loss_and_gradients(hidden, weight, labels, **options):
    nll, count = cross_entropy(hidden, LMHead(weight), labels, **options)
    return nll, count, *torch.autograd.grad(nll, (hidden, weight))


def test_D1_equals_the_definition():
    hidden, weight, labels = _case()
    nll, count, *_ = _loss_and_gradients(hidden, weight, labels)
    expected = 0.0
    for h, label in zip(hidden.reshape(-1, D), labels.reshape(-1).tolist(), strict=True):
        if label != IGNORE:
            p = torch.softmax(h @ weight.T, dim=0)
            expected -= math.log(p[label].item())
    assert nll.item() == pytest.approx(expected, rel=1e-12)
    assert count == (labels != IGNORE).sum()


def test_D1_uniform_logits_cost_ln_V():
    for vocab, nats in ((65, 4.174), (50_257, 10.82)):
        labels = torch.zeros(64, 64, dtype=torch.long)
        nll, count = cross_entropy(torch.zeros(64, 64, 1), LMHead(torch.zeros(vocab, 1)), labels)
        assert count == 4096
        assert nll.item() / 4096 == pytest.approx(nats, abs=5e-3)
    assert math.exp(4.0) == pytest.approx(54.6, abs=0.01)


@pytest.mark.parametrize("max_logits", [1, V, 3 * V, 5 * V + 1])
def test_D1_chunked_equals_whole(max_logits):
    whole = _loss_and_gradients(*_case())
    chunked = _loss_and_gradients(*_case(), max_logits=max_logits)
    for a, b in zip(chunked, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_D1_a_few_rows_at_a_time_equal_torchs_cross_entropy(dtype, monkeypatch):
    """Logits become the gradient where they lie, in their own precision; columns past the vocabulary are not read."""
    monkeypatch.setitem(lm_head.SOFTMAX_CHUNK, "cpu", 3 * V)
    filled = torch.full((20, V + 3), torch.nan, dtype=dtype)
    filled[:, :V] = 3 * torch.randn(20, V, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(20) % V
    wide = filled[:, :V].to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    expected = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(lm_head.nll_(filled.clone(), labels, V, needs_grad=False), expected, rtol=0, atol=0)
    torch.testing.assert_close(lm_head.nll_(filled, labels, V, needs_grad=True), expected, rtol=0, atol=0)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(filled[:, :V], wide.grad.to(dtype), rtol=4 * eps, atol=eps)
    assert not filled[:, V:].any()


@pytest.mark.parametrize("max_logits", [3 * V, 1 << 20])
def test_D1_every_position_may_count_differently(max_logits):
    """Losses of preferences and of policies scale each label's gradient by itself."""
    hidden, weight, labels = _case()
    scale = torch.randn(labels.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logps = token_logps(hidden, LMHead(weight), labels, max_logits=max_logits)
    found = torch.autograd.grad((logps.exp() * scale).sum(), (hidden, weight))
    p = torch.softmax(hidden @ weight.T, -1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    expected = torch.autograd.grad((p * scale * (labels != IGNORE)).sum(), (hidden, weight))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_D1_a_frozen_side_gets_no_gradient(frozen):
    hidden, weight, labels = _case(ignored=0.0)
    whole = dict(zip(("hidden", "weight"), _loss_and_gradients(hidden, weight, labels)[2:], strict=True))
    sides = {"hidden": hidden.detach().clone(), "weight": weight.detach().clone()}
    learned = next(side for name, side in sides.items() if name != frozen).requires_grad_()
    cross_entropy(sides["hidden"], LMHead(sides["weight"]), labels)[0].backward()
    assert sides[frozen].grad is None
    torch.testing.assert_close(learned.grad, whole["weight" if frozen == "hidden" else "hidden"])


def test_D1_logits_are_kept_once_and_in_the_heads_precision():
    hidden, weight, labels = _case(ignored=0.0, dtype=torch.float32)
    kept = []

    def note(tensor):
        kept.append((tensor.numel(), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        cross_entropy(hidden, LMHead(weight), labels)
    assert [dtype for size, dtype in kept if size == labels.numel() * V] == [torch.bfloat16]


class _Largest(TorchDispatchMode):
    """Notes the rows of every matrix of logits that is made."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab, self.rows = vocab, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and out.shape[1] == self.vocab:
            self.rows.append(len(out))
        return out


def test_D1_logits_are_never_larger_than_the_budget():
    hidden, weight, labels = _case(ignored=0.0)
    for max_logits, rows, times in ((4 * V, 4, 2), (1 << 20, labels.numel(), 1)):
        with _Largest(V) as seen:
            cross_entropy(hidden, LMHead(weight), labels, max_logits=max_logits)[0].backward()
        assert max(seen.rows) == rows
        assert sum(seen.rows) == times * labels.numel()  # once again backward where they were not kept


def test_D1_ignored_positions_change_nothing_to_the_bit():
    for max_logits in (4 * V, 1 << 20):
        hidden, weight, labels = _case(dtype=torch.float32)
        first = _loss_and_gradients(hidden, weight, labels, max_logits=max_logits)
        with torch.no_grad():
            hidden[labels == IGNORE] = 1e30
        second = _loss_and_gradients(hidden, weight, labels, max_logits=max_logits)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)
        assert not first[2][labels == IGNORE].any()


def test_D1_another_ignore_index():
    hidden, weight, labels = _case()
    first = _loss_and_gradients(hidden, weight, labels)
    second = _loss_and_gradients(hidden, weight, torch.where(labels == IGNORE, -1, labels), ignore=-1)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_D1_all_ignored_is_zero_with_zero_gradients():
    hidden, weight, labels = _case()
    nll, count, *gradients = _loss_and_gradients(hidden, weight, torch.full_like(labels, IGNORE))
    assert nll == 0
    assert count == 0
    for gradient in gradients:
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_D1_gradcheck():
    hidden, weight, labels = _case(B=1, T=4)
    for max_logits in (2 * V, 1 << 20):
        assert torch.autograd.gradcheck(
            lambda h, w, m=max_logits: cross_entropy(h, LMHead(w), labels, max_logits=m)[0], (hidden, weight)
        )


def test_D1_half_precision_logits_get_a_float32_softmax():
    hidden, weight, labels = _case(dtype=torch.bfloat16)
    logps = token_logps(hidden, LMHead(weight), labels)
    assert logps.dtype == torch.float32
    torch.testing.assert_close(logps.exp().sum(), logps.double().exp().sum().float())


def test_token_logps_at_a_temperature():
    hidden, weight, labels = _case()
    logps = token_logps(hidden, LMHead(weight), labels, temperature=0.5)
    expected = torch.log_softmax(hidden @ weight.T / 0.5, dim=-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(logps, expected.masked_fill(labels == IGNORE, 0.0), rtol=1e-12, atol=1e-12)


def test_D1_a_tied_head_of_N_0_02_would_start_0_154_too_high():
    g = torch.Generator().manual_seed(0)
    hidden = torch.nn.functional.rms_norm(torch.randn(4, 64, 768, generator=g), (768,))
    weight = 0.02 * torch.randn(2048, 768, generator=g)
    nll, n = cross_entropy(hidden, LMHead(weight), torch.randint(2048, (4, 64), generator=g))
    assert (nll / n).item() - math.log(2048) == pytest.approx(0.154, abs=0.08)


# -- the parts of regularised losses ---------------------------------------------------------------------------------


def _plain_reference(hidden, weight, labels, smoothing, z_weight):
    """Label smoothing and z-loss by the definition, in float64: a full target distribution, no chunks, no masks."""
    kept = labels != IGNORE
    logits = hidden[kept] @ weight.T
    target = torch.full_like(logits, smoothing / V)
    target[torch.arange(len(target)), labels[kept]] += 1 - smoothing
    logp = logits - logits.exp().sum(-1, keepdim=True).log()
    return -(target * logp).sum(), z_weight * logits.exp().sum(-1).log().square().sum()


@pytest.mark.parametrize("max_logits", [1, 3 * V, 1 << 20])
def test_D1_smoothing_and_z_loss_equal_the_definition_with_their_gradients(max_logits):
    hidden, weight, labels = _case()
    smoothed, z = _plain_reference(hidden, weight, labels, 0.1, 1e-2)
    expected = torch.autograd.grad(smoothed + z, (hidden, weight))
    nll, uniform, z_squared = cross_entropy_terms(hidden, LMHead(weight), labels, max_logits=max_logits)
    assert (nll + 0.1 * (uniform - nll)).item() == pytest.approx(smoothed.item(), rel=1e-12)
    assert 1e-2 * z_squared.item() == pytest.approx(z.item(), rel=1e-12)
    total = nll + 0.1 * (uniform - nll) + 1e-2 * z_squared
    for found, right in zip(torch.autograd.grad(total, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-12)
    torch_own = torch.nn.functional.cross_entropy(
        (hidden @ weight.T).reshape(-1, V), labels.reshape(-1), label_smoothing=0.1, reduction="sum"
    )
    assert (nll + 0.1 * (uniform - nll)).item() == pytest.approx(torch_own.item(), rel=1e-12)
    assert nll.item() == pytest.approx(cross_entropy(hidden, LMHead(weight), labels)[0].item(), rel=1e-12)


def test_D1_masked_positions_get_exactly_no_gradient_from_smoothing_or_z_loss():
    for max_logits in (4 * V, 1 << 20):
        hidden, weight, labels = _case(dtype=torch.float32)
        parts = cross_entropy_terms(hidden, LMHead(weight), labels, max_logits=max_logits)
        (gradient,) = torch.autograd.grad(sum(parts), hidden)
        assert not gradient[labels == IGNORE].any()
        assert gradient[labels != IGNORE].any(-1).all()
        nothing = cross_entropy_terms(hidden, LMHead(weight), torch.full_like(labels, IGNORE))
        assert [p.item() for p in nothing] == [0, 0, 0]
        assert not torch.autograd.grad(sum(nothing), hidden)[0].any()


def test_D1_last_position_only_gives_one_signal_where_all_give_T():
    """004: B x T = 4,096 predictions at 64 x 64, 4 x 8 = 32; a loss at the last position keeps one in T of them."""
    for B, T in ((64, 64), (4, 8)):
        hidden, weight, labels = _case(ignored=0.0, B=B, T=T)
        last = labels.clone()
        last[:, :-1] = IGNORE
        signals = []
        for target in (labels, last):
            (gradient,) = torch.autograd.grad(cross_entropy(hidden, LMHead(weight), target)[0], hidden)
            signals.append(int(gradient.any(-1).sum()))
        assert signals == [B * T, B]


def test_D1_nats_bits_and_perplexity():
    """GPT-3's perplexity of about 20 is 3 nats or 4.3 bits a token; a uniform guess costs log2 V bits."""
    assert math.log(20) == pytest.approx(3.0, abs=5e-3)
    assert math.log(20) / math.log(2) == pytest.approx(4.32, abs=5e-3)
    assert [round(math.exp(n), 1) for n in (4.0, 3.0, 2.5, 2.0, 1.5)] == [54.6, 20.1, 12.2, 7.4, 4.5]
    nll, count = cross_entropy(torch.zeros(4, 8, 1), LMHead(torch.zeros(64, 1)), torch.zeros(4, 8).long())
    assert count == 32
    assert nll.item() / 32 / math.log(2) == pytest.approx(6.0)


# -- kl_divergence -----------------------------------------------------------------------------------------------------


def _pair():
    hidden, weight, labels = _case()
    old, old_weight = torch.randn_like(hidden) * 2, torch.randn_like(weight)
    return hidden, weight, old.requires_grad_(), old_weight.requires_grad_(), labels


@pytest.mark.parametrize("max_logits", [V, 4 * V, 10_000])
def test_2_7_the_kl_to_a_reference_is_exact_over_the_vocabulary(max_logits):
    """Value and gradients are the definition's in any chunking; the reference gets none."""
    hidden, weight, old, old_weight, labels = _pair()
    with _Largest(V) as seen:
        kl = kl_divergence(hidden, LMHead(weight), old, LMHead(old_weight), labels, max_logits=max_logits)
    found = torch.autograd.grad(kl.sum(), (hidden, weight))
    p, q = (old @ old_weight.T).softmax(-1), (hidden @ weight.T).softmax(-1)
    expected = torch.where(labels == IGNORE, 0, (p * (p.log() - q.log())).sum(-1))
    torch.testing.assert_close(kl, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(found, torch.autograd.grad(expected.sum(), (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    assert max(seen.rows) * V <= max_logits
    assert (kl >= 0).all()


def test_2_8_ids_that_fill_up_a_table_are_left_out_of_the_kl():
    hidden, weight, old, old_weight, labels = _pair()
    padded = torch.cat([old_weight, 9 * torch.ones(8, old_weight.shape[1], dtype=old_weight.dtype)])
    kl = kl_divergence(hidden, LMHead(weight), old, LMHead(old_weight), labels)
    torch.testing.assert_close(kl_divergence(hidden, LMHead(weight), old, LMHead(padded), labels), kl)


def test_2_7_the_kl_of_a_model_to_itself_is_zero_and_so_is_its_gradient():
    hidden, weight, *_, labels = _pair()
    kl = kl_divergence(hidden, LMHead(weight), hidden.detach(), LMHead(weight), labels)
    assert kl.abs().max() < 1e-14
    assert torch.autograd.grad(kl.sum(), hidden)[0].abs().max() < 1e-14
