"""The diagonal Fisher information, held against J' (diag p - p p') J computed by autograd's own Jacobian."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ingot.data.batches import IGNORE, Batch
from ingot.evaluate.fisher import Fisher, Labels
from ingot.model.config import ModelSettings
from ingot.model.transformer import Transformer, build

V, T = 7, 5


def _model(sharpness: float = 1.0) -> Transformer:
    model = build(ModelSettings(depth=1, width=8, heads=1, context=T).resolve(V), seed=2, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.dim() == 2 else 1)
        assert model.head is not None
        model.head.weight.mul_(sharpness)
    return model


def _rows(n: int, seed: int = 0) -> list[Batch]:
    """Rows of one, with some places that have no label."""
    draw = np.random.default_rng(seed)
    ids, labels = draw.integers(0, V, (2, n, T))
    labels = np.where(draw.random((n, T)) < 0.3, IGNORE, labels)
    labels[:, 0] = 1
    positions = np.broadcast_to(np.arange(T), (n, T)).copy()
    whole = Batch(ids, labels, positions, None, np.zeros(n, np.int64), np.arange(n)).to("cpu")
    return list(whole.micro_batches(1))


def _estimate(model: Transformer, rows: list[Batch], labels: Labels, seed: int = 1) -> Fisher:
    fisher = Fisher(model, labels, seed)
    for place, row in enumerate(rows):
        fisher.add(row, place)
    return fisher


def _flat(tensors) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tensors.values()])


def _by_jacobian(model: Transformer, rows: list[Batch]) -> torch.Tensor:
    """sum over labelled places of diag J' (diag p - p p') J, over their number; J of logits in all weights."""
    names, parameters = zip(*((n, p.detach()) for n, p in model.named_parameters()), strict=True)
    total, places = 0.0, 0
    for row in rows:
        kept = row.labels_BT[0] != IGNORE

        def logits(*values: torch.Tensor, row: Batch = row, kept: torch.Tensor = kept) -> torch.Tensor:
            weights = dict(zip(names, values, strict=True))
            out = torch.func.functional_call(model, weights, (row.ids_BT,), {"positions_BT": row.positions_BT})
            return out.hidden[0][kept] @ weights["head.weight"].T

        jacobian = torch.autograd.functional.jacobian(logits, parameters)
        flat_NVP = torch.cat([j.flatten(2) for j in jacobian], 2)
        p_NV = logits(*parameters).softmax(-1)
        metric_NVV = torch.diag_embed(p_NV) - p_NV[:, :, None] * p_NV[:, None, :]
        total = total + torch.einsum("nvp,nvw,nwp->p", flat_NVP, metric_NVV, flat_NVP)
        places += int(kept.sum())
    return total / places


@pytest.mark.parametrize("labels", ["mixed", "sampled", "exact", "empirical"])
def test_2_7_it_is_taken_without_dropout(labels: Labels) -> None:
    shape = ModelSettings(depth=1, width=8, heads=1, context=T, dropout=0.5)
    made, rows = build(shape.resolve(V), seed=2, dtype=torch.float64).train(), _rows(2)
    plain = build(shape.model_copy(update={"dropout": 0.0}).resolve(V), seed=2, dtype=torch.float64)
    assert torch.equal(_flat(_estimate(made, rows, labels).mean()), _flat(_estimate(plain, rows, labels).mean()))


def test_2_7_exact_fisher_is_the_jacobians() -> None:
    model, rows = _model(), _rows(3)
    fisher = _estimate(model, rows, "exact")
    torch.testing.assert_close(_flat(fisher.mean()), _by_jacobian(model, rows), rtol=1e-6, atol=1e-12)
    assert fisher.tokens == sum(int((r.labels_BT != IGNORE).sum()) for r in rows)


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["sampled", "mixed"])
def test_2_7_monte_carlo_fisher_is_within_three_standard_errors(labels: Labels) -> None:
    """Of 400 estimates from different seeds: their mean, weight by weight, and above all their sum."""
    model, rows = _model(), _rows(2)
    expected = _by_jacobian(model, rows)
    draws = torch.stack([_flat(_estimate(model, rows, labels, seed).mean()) for seed in range(400)])
    error = draws.std(0) / 400**0.5
    away = (draws.mean(0) - expected).abs() / error.clamp(min=1e-12)
    assert (away < 3).double().mean() > 0.985  # 99.7 % expected of each by chance
    total, noise = draws.sum(1).mean() - expected.sum(), draws.sum(1).std() / 400**0.5
    assert abs(total) < 3 * noise
    assert noise < 0.05 * expected.sum()


def _sure(model: Transformer, rows: list[Batch], low: float, high: float = 1.0) -> list[Batch]:
    """The rows with labels only where the model is sure by so much, and what it is sure of for a label."""
    found = []
    for row in rows:
        with torch.no_grad():
            out = model(row.ids_BT, positions_BT=row.positions_BT)
            p_BT, likeliest_BT = out.head(out.hidden).softmax(-1).max(-1)
        labels = torch.where((p_BT > low) & (p_BT < high), likeliest_BT, IGNORE)
        if (labels != IGNORE).any():
            found.append(replace(row, labels_BT=labels))
    assert len(found) >= 4
    return found


def test_2_7_source_error_the_empirical_fisher_of_a_confident_model_vanishes() -> None:
    """Gold labels where the model is sure of them: smaller by about (1 - p) / p than the true Fisher."""
    sharp = _model(sharpness=30.0)
    rows = _sure(sharp, _rows(8), 0.95)
    true = _flat(_estimate(sharp, rows, "exact").mean()).sum()
    empirical = _flat(_estimate(sharp, rows, "empirical").mean()).sum()
    assert empirical < true / 20


def test_2_7_a_mix_of_labels_sees_what_a_sure_model_never_draws() -> None:
    """Sure by 1 - 1e-4 to 1 - 1e-6: hundreds of draws hold nothing but the likeliest label."""
    sharp = _model(sharpness=60.0)
    rows = _sure(sharp, _rows(200), 1 - 1e-4, 1 - 1e-6)
    expected = _flat(_estimate(sharp, rows, "exact").mean()).sum()
    drawn, mixed = (_flat(_estimate(sharp, rows * 10, labels).mean()).sum() for labels in ("sampled", "mixed"))
    assert drawn < expected / 100
    assert abs(mixed - expected) < 0.25 * expected


def test_2_7_source_error_squaring_the_mean_gradient_of_a_batch() -> None:
    """Of gold labels it is another number; of drawn labels the squared sum is right on average (`pool`)."""
    model = _model()
    rows = _rows(8)
    together = Batch(*(torch.cat([getattr(r, n) for r in rows]) for n in ("ids_BT", "labels_BT", "positions_BT")), None,
                     torch.zeros(8), torch.arange(8))  # fmt: skip
    expected = _by_jacobian(model, rows)
    pooled = torch.stack([_flat(_estimate(model, [together], "sampled", seed).mean()).sum() for seed in range(300)])
    assert abs(pooled.mean() - expected.sum()) < 3 * pooled.std() / 300**0.5
    one_by_one = _flat(_estimate(model, rows, "empirical").mean()).sum()
    squared_batch = _flat(_estimate(model, [together], "empirical").mean()).sum() / 8  # of the mean over rows
    assert abs(squared_batch - one_by_one) > 0.3 * one_by_one


def test_2_7_source_error_off_by_one_sample() -> None:
    """The reference code stops at `index > n`, so n + 1 samples are added up and divided by n."""
    model, rows = _model(), _rows(4)
    right = _flat(_estimate(model, rows[:3], "exact").mean())
    fisher = _estimate(model, rows, "exact")
    theirs = _flat(fisher.squares) / sum(int((r.labels_BT != IGNORE).sum()) for r in rows[:3])
    assert (right - theirs).norm() > 0.05 * right.norm()
    assert len(_estimate(model, rows[:3], "sampled").per_batch["traces"]) == 3


def test_a_draw_depends_on_its_row_alone_and_repeats() -> None:
    model, rows = _model(), _rows(4)
    one, two = _estimate(model, rows, "sampled"), _estimate(model, rows, "sampled")
    assert torch.equal(_flat(one.squares), _flat(two.squares))
    assert not torch.equal(_flat(one.squares), _flat(_estimate(model, rows, "sampled", seed=2).squares))
    assert one.trace()["low"] < one.trace()["value"] < one.trace()["high"]
    assert one.trace()["value"] == pytest.approx(float(_flat(one.mean()).sum()))
