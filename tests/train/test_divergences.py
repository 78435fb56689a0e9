"""Divergences between a teacher and a student: definitions, gradients, stored teachers, and what others get wrong."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ingot.model.lm_head import LMHead
from ingot.model.losses import IGNORE, token_logps
from ingot.train.divergences import (
    DIVERGENCES,
    Divergence,
    LiveTeacher,
    StoredTeacher,
    buckets,
    distillation_terms,
    log1mexp,
    most_likely,
)

TRL = json.loads((Path(__file__).parent / "trl_jsd.json").read_text())
B, T, D, V = 3, 5, 4, 11
OPTIONS = [
    Divergence(name, temperature, beta)
    for name, beta in (("forward", 0.5), ("reverse", 0.5), ("jsd", 0.3), ("skew", 0.1))
    for temperature in (1.0, 2.5)
]


def _draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _case(seed=0):
    """The student's hidden states and head, those of a teacher of another width, and labels with gaps."""
    student = _draw(B, T, D, seed=seed).requires_grad_(), _draw(V, D, seed=seed + 1).requires_grad_()
    teacher = LiveTeacher(_draw(B, T, D + 2, seed=seed + 2), LMHead(_draw(V, D + 2, seed=seed + 3)))
    labels = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))
    labels[0, :2] = labels[2, 3] = IGNORE
    return *student, teacher, labels


def _defined(p, q, d):
    """The definitions, in probabilities."""
    m = d.beta * p + (1 - d.beta) * q

    def kl(a, b):
        return (a * (a.log() - b.log())).sum(-1)

    value = {
        "forward": lambda: kl(p, q),
        "reverse": lambda: kl(q, p),
        "jsd": lambda: d.beta * kl(p, m) + (1 - d.beta) * kl(q, m),
        "skew": lambda: kl(p, m),
    }[d.name]()
    return d.temperature**2 * value


def _stored(logits, k, temperatures=(1.0,), which=0):
    """A stored teacher of logits B x T x V, without the rounding to fp16."""
    ids, _, tails = most_likely(logits.reshape(-1, V), k, temperatures)
    exact = logits.reshape(-1, V).gather(1, ids)
    shape = logits.shape[:2]
    return StoredTeacher(ids.view(*shape, k), exact.view(*shape, k), tails[:, which].view(shape))


@pytest.mark.parametrize("max_logits", [V, 4 * V, 10_000])
@pytest.mark.parametrize("d", OPTIONS, ids=str)
def test_losses_equal_their_definitions_in_any_chunking(d, max_logits):
    hidden, weight, teacher, labels = _case()
    alpha = 0.3
    loss, nll, found = distillation_terms(hidden, LMHead(weight), labels, teacher, d, alpha, max_logits=max_logits)
    logits = hidden @ weight.T
    p = (teacher.head(teacher.hidden_BTD) / d.temperature).softmax(-1)
    labelled = labels != IGNORE
    expected = torch.where(labelled, _defined(p, (logits / d.temperature).softmax(-1), d), 0)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(nll, -token_logps(hidden, LMHead(weight), labels), rtol=1e-12, atol=1e-12)
    whole = (1 - alpha) * expected - alpha * token_logps(hidden, LMHead(weight), labels)
    torch.testing.assert_close(loss, whole, rtol=1e-11, atol=1e-12)
    ours, theirs = (torch.autograd.grad(x.sum(), (hidden, weight), retain_graph=True) for x in (loss, whole))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("d", OPTIONS, ids=str)
def test_a_student_that_equals_its_teacher_has_loss_and_gradient_zero(d):
    hidden, weight, _, labels = _case()
    live = LiveTeacher(hidden.detach(), LMHead(weight.detach()))
    stored = _stored((hidden @ weight.T).detach(), 3, (d.temperature,))
    for teacher in (live, stored):
        value = distillation_terms(hidden, LMHead(weight), labels, teacher, d, 0.0)[0]
        assert value.abs().max() < 1e-13
        assert all(g.abs().max() < 1e-13 for g in torch.autograd.grad(value.sum(), (hidden, weight)))


@pytest.mark.parametrize("d", OPTIONS, ids=str)
def test_gradients_equal_finite_differences(d):
    hidden, weight, teacher, labels = _case()
    stored = _stored(teacher.head(teacher.hidden_BTD), 3, (d.temperature,))
    for source in (teacher, stored):

        def loss(hidden, weight, source=source):
            return distillation_terms(hidden, LMHead(weight), labels, source, d, 0.3)[0]

        assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_the_square_of_the_temperature_is_in_the_value_and_in_the_gradient():
    """For small logits T^2 KL(p, q) is |z - v|^2 / 2V whatever T (Hinton et al. 2015, eq. 4); without it, 1 / T^2."""
    small, other = 1e-3 * _draw(1, 1, V), 1e-3 * _draw(1, 1, V, seed=5)
    small, other = small - small.mean(), other - other.mean()
    labels = torch.zeros(1, 1, dtype=torch.long)
    teacher = LiveTeacher(other, LMHead(torch.eye(V, dtype=torch.float64)))
    for temperature in (1.0, 2.0, 8.0):
        hidden = small.clone().requires_grad_()
        head = LMHead(torch.eye(V, dtype=torch.float64))
        value = distillation_terms(hidden, head, labels, teacher, Divergence(temperature=temperature), 0.0)[0].sum()
        assert value.item() == pytest.approx((small - other).square().sum().item() / (2 * V), rel=1e-2)
        torch.testing.assert_close(torch.autograd.grad(value, hidden)[0], (small - other) / V, rtol=1e-2, atol=1e-7)


def test_predictions_of_the_position_beside_are_another_loss():
    """What a mask that is shifted by one compares: `labels` are targets, and so are the teacher's values."""
    hidden, weight, _, labels = _case()
    teacher = LiveTeacher(hidden.detach(), LMHead(weight.detach()))
    shifted = LiveTeacher(hidden.detach().roll(1, dims=1), teacher.head)
    mask = torch.full_like(labels, IGNORE)
    mask[:, 1:] = labels[:, :-1]
    right, beside = (
        distillation_terms(hidden, LMHead(weight), labels, t, Divergence(), 0.0)[0] for t in (teacher, shifted)
    )
    assert right.sum() < 1e-12
    assert beside.sum() > 0.1
    found = distillation_terms(hidden, LMHead(weight), mask, shifted, Divergence(), 0.0)[0]
    assert ((found != 0) == (mask != IGNORE)).all()  # positions without a label count nothing
    assert not ((found != 0) == (labels != IGNORE)).all()


def test_a_sum_over_tokens_where_batchmean_divides_by_rows():
    """`F.kl_div(..., reduction="batchmean")` of B x T x V is T times the mean over tokens: the error of the sources."""
    hidden, weight, teacher, _ = _case()
    labels = torch.zeros(B, T, dtype=torch.long)
    total = distillation_terms(hidden, LMHead(weight), labels, teacher, Divergence(), 0.0)[0].sum()
    logq, logp = (hidden @ weight.T).log_softmax(-1), teacher.head(teacher.hidden_BTD).log_softmax(-1)
    batchmean = F.kl_div(logq, logp, reduction="batchmean", log_target=True)
    flat = F.kl_div(logq.view(-1, V), logp.view(-1, V), reduction="batchmean", log_target=True)
    torch.testing.assert_close(total / (B * T), flat)
    torch.testing.assert_close(batchmean, T * total / (B * T))


@pytest.mark.parametrize("case", TRL["cases"], ids=lambda c: f"beta {c['beta']}, T {c['temperature']}")
def test_the_jensen_shannon_divergence_is_trls(case):
    """TRL 0 is our forward and 1 our reverse; it has no T^2. Its numbers, in float64, are in the file."""
    student, teacher = (torch.tensor(TRL[name], dtype=torch.float64) for name in ("student", "teacher"))
    beta, t = case["beta"], case["temperature"]
    d = Divergence({0.0: "forward", 1.0: "reverse"}.get(beta, "jsd"), t, beta or 0.5)
    identity = LMHead(torch.eye(student.shape[-1], dtype=torch.float64))
    labels = torch.tensor(TRL["labels"])
    value = distillation_terms(student, identity, labels, LiveTeacher(teacher, identity), d, 0.0)[0].sum()
    assert value.item() / int((labels != IGNORE).sum()) / t**2 == pytest.approx(case["loss"], rel=1e-12)


# -- stored teachers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", OPTIONS, ids=str)
def test_a_stored_teacher_never_exceeds_the_full_divergence_and_equals_it_with_all_but_one(d):
    """Merging outcomes is a coarsening, so every divergence falls, and it grows with k up to the full value."""
    hidden, weight, teacher, labels = _case()
    full = distillation_terms(hidden, LMHead(weight), labels, teacher, d, 0.0)[0]
    logits = teacher.head(teacher.hidden_BTD)
    values = [
        distillation_terms(hidden, LMHead(weight), labels, _stored(logits, k, (d.temperature,)), d, 0.0)[0]
        for k in range(1, V)
    ]
    for smaller, larger in zip(values, [*values[1:], full], strict=True):
        assert (smaller <= larger + 1e-12).all()
    assert values[0].sum() < 0.9 * full.sum()
    torch.testing.assert_close(values[-1], full, rtol=1e-10, atol=1e-12)


def test_the_tail_is_exact_at_every_stored_temperature_where_renormalised_ones_are_far_off():
    """A vocabulary of 4,096 with Zipf's probabilities; k = 64. One tail for all temperatures is off by more than .3."""
    logits = -1.1 * torch.arange(1, 4097, dtype=torch.float32).log()[None]
    temperatures = (1.0, 2.0, 4.0)
    ids, stored, log_tails = most_likely(logits, 64, temperatures)
    far = 0.0
    for i, t in enumerate(temperatures):
        p = (logits.double() / t).softmax(-1)[0]
        tail = float(1 - p[:64].sum())
        assert float(log_tails[0, i].exp()) == pytest.approx(tail, rel=1e-6)
        teacher = StoredTeacher(ids[None], stored[None], log_tails[None, :, i])
        head = teacher.targets((ids, stored, log_tails[:, i]), Divergence(temperature=t), 4096).teacher_nK
        assert float(head.double().logsumexp(-1)) == pytest.approx(0.0, abs=1e-6)  # the head has 1 - tail
        torch.testing.assert_close(head[0, :-1].double().exp(), p[:64], rtol=2e-3, atol=0)
        # Controls: a renormalised head has no tail, and ln tail at T = 1 is that of T = 1 only.
        renormalised = (stored[0].double() / t).softmax(-1)
        far = max(far, abs(float(renormalised.sum() - p[:64].sum())), abs(float(log_tails[0, 0].exp()) - tail))
        assert tail > 0.3 or t == 1
    assert far > 0.3


def test_the_students_tail_is_exact_where_one_minus_the_sum_is_zero():
    logits = torch.tensor([[0.0, -20.0, -21.0, -22.0]])
    ids = torch.tensor([[0]])
    exact = math.log(sum(math.exp(x) for x in (-20.0, -21.0, -22.0)))
    assert float(buckets(logits, ids)[0, 1]) == pytest.approx(exact, rel=1e-6)
    assert float(1 - buckets(logits, ids)[0, :1].exp()) == 0.0  # the control


@pytest.mark.parametrize("name", DIVERGENCES)
def test_confident_teachers_and_students_give_finite_losses_and_gradients(name):
    """In fp32; the clamp at 1 - 1e-8, which is 1, that others use gives log1p(-1) and 0 times infinity."""
    confident = torch.full((1, 4, V), -300.0)
    confident[..., 2] = 300.0
    for logits in (confident, -confident, torch.zeros(1, 4, V)):
        for teacher_logits in (confident, torch.zeros(1, 4, V)):
            hidden = logits.clone().requires_grad_()
            ids, stored, tails = most_likely(teacher_logits.view(-1, V), 3, (1.0,))
            teacher = StoredTeacher(ids.view(1, 4, 3), stored.view(1, 4, 3), tails.view(1, 4))
            labels = torch.zeros(1, 4, dtype=torch.long)
            values = distillation_terms(hidden, LMHead(torch.eye(V)), labels, teacher, Divergence(name, 1.0, 0.1), 0.3)
            assert all(x.isfinite().all() for x in values)
            assert torch.autograd.grad(values[0].sum(), hidden)[0].isfinite().all()
    p = torch.ones(1).clamp(max=1 - 1e-8)
    assert (0.0 * torch.log1p(-p)).isnan().all()  # the control


def test_logits_far_below_the_largest_are_stored_as_finite_numbers():
    ids, stored, tails = most_likely(torch.tensor([[0.0, -1e6, -2e6, -3e6]]), 2, (1.0,))
    assert stored.isfinite().all()
    assert tails.isfinite().all()
    assert ids.tolist() == [[0, 1]]


def test_padding_of_either_vocabulary_is_left_out_before_the_softmax():
    hidden, weight, teacher, labels = _case()
    padded = torch.cat((weight, 9 * torch.ones(3, D, dtype=torch.float64)))
    wide = LiveTeacher(teacher.hidden_BTD, LMHead(torch.cat((teacher.head.weight, teacher.head.weight[:2] + 9))))
    stored = _stored(teacher.head(teacher.hidden_BTD), 3)
    for source, same in ((wide, teacher), (stored, stored)):
        plain = distillation_terms(hidden, LMHead(weight), labels, same, Divergence(), 0.3)[2]
        both = distillation_terms(hidden, LMHead(padded), labels, source, Divergence(vocab=V), 0.3)[2]
        torch.testing.assert_close(both, plain, rtol=1e-12, atol=1e-13)
        unsliced = distillation_terms(hidden, LMHead(padded), labels, source, Divergence(), 0.3)[2]
        assert (unsliced - plain).abs().max() > 0.1  # the control


def test_log1mexp_of_a_teacher_without_tail_is_zero():
    assert float(log1mexp(torch.tensor(-500.0))) == 0.0
