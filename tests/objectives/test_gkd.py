"""On-policy distillation: which steps sample, what their loss is, and what lambda = 0 is."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.core.errors import UserError
from ingot.data.batches import IGNORE, Batch
from ingot.objectives.distill import Distill
from ingot.objectives.gkd import GKD, is_on_policy, prompts_of
from ingot.objectives.settings import DistillSettings, GKDSettings
from ingot.train.divergences import DIVERGENCES
from ingot.train.engine import Engine
from tests.objectives.helpers import T, V, engine, gradient, model, pairs, rows


def _engine(tmp_path: Path, micro: int = 4, **settings) -> Engine:
    objective = GKD(GKDSettings(teacher="t", max_new=6, **settings))
    return engine(tmp_path, objective, micro=micro, companions={"teacher": model(seed=5).eval()})


def _talk() -> Batch:
    """Conversations of ragged lengths, with a prompt of two tokens or more."""
    batch = pairs()
    return replace(rows(batch, batch.labels_BT[:, 0] == IGNORE), group=1)


def _sampled(learner: Engine, batch: Batch) -> Batch:
    (sampled,) = learner._expand(batch, learner.context(1))
    return sampled


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_the_fraction_of_sampled_steps_holds_in_every_window(fraction: float) -> None:
    chosen = [is_on_policy(step, fraction) for step in range(1, 401)]
    for size, start in itertools.product((20, 40), range(0, 360, 7)):
        assert abs(sum(chosen[start : start + size]) - fraction * size) <= 1
    assert sum(chosen) == pytest.approx(400 * fraction, abs=1)


def test_a_ramp_begins_at_none_and_ends_at_the_fraction() -> None:
    chosen = np.array([is_on_policy(step, 0.5, ramp=200) for step in range(1, 601)])
    assert chosen[:200].sum() == pytest.approx(50, abs=1), "half of the fraction, on average"
    assert chosen[:50].sum() <= 4 < 21 <= chosen[150:200].sum()
    assert chosen[200:].sum() == pytest.approx(200, abs=1)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_guard_does_not_take_samples_for_a_spike(tmp_path: Path, fraction: float) -> None:
    """After losses of data near 0. A step on data, the control, is skipped."""
    learner = _engine(tmp_path, on_policy=fraction)
    learner.guard._losses.fill_(0.01)
    assert bool(learner.step(_talk()).skipped) == (fraction == 0)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("micro", [3, 16])
def test_the_gradient_of_a_sampled_step_is_that_of_the_formula(tmp_path: Path, divergence: str, micro: int) -> None:
    """T^2 D summed over the sampled tokens and divided by their number, in fp64; nothing of prompts and labels."""
    temperature = 2.0
    learner = _engine(tmp_path, micro, on_policy=1.0, alpha=0.7, divergence=divergence, temperature=temperature)
    batch = _sampled(learner, _talk())
    ids, labels = torch.from_numpy(batch.ids_BT), torch.from_numpy(batch.labels_BT)
    found = gradient(learner, batch)
    teacher, student = learner.companions["teacher"], model(1)
    mask = labels != IGNORE
    p, q = ((net(ids).logits / temperature).log_softmax(-1)[mask] for net in (teacher, student))
    loss = temperature**2 * DIVERGENCES[divergence](p.detach(), q, 0.5).sum() / mask.sum()
    loss.backward()
    expected = torch.cat([w.grad.flatten() for w in student.parameters()])
    assert (found - expected).norm() <= 1e-12 * expected.norm()
    _, counts, others = learner.gradients(batch)
    assert counts["token"] == int(mask.sum()) == 6 * len(batch), "without a stop token every sample has max_new tokens"
    assert float(others["sampled_divergence"]) == pytest.approx(loss.item(), rel=1e-12)
    shifted = replace(batch, labels_BT=np.roll(batch.labels_BT, 1, 1))
    assert (gradient(learner, shifted) - expected).norm() > 1e-3 * expected.norm(), "the mask is aligned with targets"


def test_samples_follow_their_prompts_and_belong_to_the_step(tmp_path: Path) -> None:
    learner, batch = _engine(tmp_path, on_policy=1.0), _talk()
    sampled, again = _sampled(learner, batch), _sampled(learner, batch)
    np.testing.assert_array_equal(sampled.ids_BT, again.ids_BT)
    (other,) = learner._expand(batch, learner.context(2))
    assert (other.ids_BT != sampled.ids_BT).any()
    for row in range(len(batch)):
        first = np.flatnonzero(batch.labels_BT[row] != IGNORE)[0]
        np.testing.assert_array_equal(sampled.ids_BT[row, : first + 1], batch.ids_BT[row, : first + 1])
        assert np.flatnonzero(sampled.labels_BT[row] != IGNORE)[0] == first


def test_without_sampled_steps_it_is_distillation_to_the_bit(tmp_path: Path) -> None:
    batch, settings = _talk(), {"alpha": 0.3, "temperature": 2.0}
    ours = _engine(tmp_path, on_policy=0.0, **settings)
    plain = engine(
        tmp_path, Distill(DistillSettings(teacher="t", **settings)), companions={"teacher": model(seed=5).eval()}
    )
    for _ in range(3):
        a, b = ours.step(batch), plain.step(batch)
        assert float(a.loss) == float(b.loss)
        assert a.others["on_policy"] == 0
    for a, b in zip(ours.trained.values(), plain.trained.values(), strict=True):
        assert torch.equal(a, b)


def test_the_student_comes_nearer_on_what_it_writes(tmp_path: Path) -> None:
    learner, batch = _engine(tmp_path, on_policy=1.0), _talk()
    values = [float(learner.step(batch).others["sampled_divergence"]) for _ in range(25)]
    assert np.mean(values[-5:]) < 0.5 * np.mean(values[:5])


def test_a_student_that_is_the_teacher_has_no_loss_and_no_gradient(tmp_path: Path) -> None:
    objective = GKD(GKDSettings(teacher="t", max_new=6, on_policy=1.0))
    learner = engine(tmp_path, objective, companions={"teacher": model(1).eval()})
    batch = _sampled(learner, _talk())
    assert gradient(learner, batch).norm() < 1e-12
    assert abs(float(learner.gradients(batch)[2]["distill"])) < 1e-12


def test_evaluations_read_the_data(tmp_path: Path) -> None:
    """So that the loss is comparable with that of other students."""
    learner, batch = _engine(tmp_path, on_policy=1.0, alpha=0.3), _talk()
    plain = engine(tmp_path, Distill(DistillSettings(teacher="t", alpha=0.3)), companions=dict(learner.companions))
    assert learner.evaluate([batch]).loss == plain.evaluate([batch]).loss
    assert learner.evaluate([batch]).metrics["divergence"] == plain.evaluate([batch]).metrics["divergence"]


def _rows(labels: list[list[int]], documents: list[list[int]] | None = None) -> Batch:
    """Rows of the ids 1 to T, with some labels."""
    labels_BT = np.full((len(labels), T), IGNORE)
    for row, positions in zip(labels_BT, labels, strict=True):
        row[positions] = 1
    ids_BT = np.tile(np.arange(1, T + 1), (len(labels), 1))
    zeros = np.zeros(len(labels), np.int64)
    return Batch(ids_BT, labels_BT, ids_BT - 1, None if documents is None else np.array(documents), zeros, zeros)


def _lists(prompts: Batch | None, left_out: float) -> list[list[int]]:
    assert prompts is not None
    return [ids[:n].tolist() for ids, n in zip(prompts.ids_BT, prompts.columns["lengths_B"], strict=True)]


def test_prompts_are_what_precedes_the_first_answer() -> None:
    assert _lists(*prompts_of(_rows([[3, 4, 9], [1]]), 5, V)) == [[1, 2, 3, 4], [1, 2]]
    two = [[0] * 6 + [1] * 6 + [2] * 4]
    assert _lists(*prompts_of(_rows([[2, 3, 8]], two), 5, V)) == [[1, 2, 3], [7, 8, 9]], "a row of two conversations"
    assert _lists(*prompts_of(_rows([[2, 3, 8]], two), 5, 3)) == [[1, 2, 3], [7, 8, 9]]
    assert prompts_of(_rows([[9]]), 5, 9) == (None, 1.0), "no room for an answer"
    assert prompts_of(_rows([[]]), 5, 9) == (None, 0.0)


def test_prompts_of_running_text_are_its_first_tokens() -> None:
    assert _lists(*prompts_of(_rows([list(range(T))]), 5, V)) == [[1, 2, 3, 4, 5]]
    two = [[0] * 4 + [1] * 12]
    assert _lists(*prompts_of(_rows([list(range(T))], two), 5, V)) == [[5, 6, 7, 8, 9]], "the first one is too short"


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    settings = GKDSettings(teacher="t", prompt=100, max_new=8)
    with pytest.raises(UserError, match=r"objective\.prompt: found 100, expected at most 56, which the context"):
        settings.max_prompt_tokens(64)
    assert GKDSettings(teacher="t", prompt=100, max_new=8, on_policy=0.0).max_prompt_tokens(64) == 64
