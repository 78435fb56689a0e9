"""The objective `distill` in the engine: any split of a step, live and stored teachers, and what is reported."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.core.errors import UserError
from ingot.data.batches import Batch
from ingot.objectives.distill import IDS, LOGITS, Distill, tail_name
from ingot.objectives.lm import LanguageModel
from ingot.objectives.settings import DistillSettings
from ingot.train.divergences import most_likely
from ingot.train.engine import Engine
from tests.objectives.helpers import V, engine, gradient, model, pairs


def _objective(**settings) -> Distill:
    return Distill(DistillSettings(teacher="t", **settings))


def _engine(tmp_path: Path, objective, stored: bool = False, micro: int = 4) -> Engine:
    return engine(tmp_path, objective, micro=micro, companions={} if stored else {"teacher": model(seed=5).eval()})


def _stored(batch: Batch, k: int, temperature: float = 1.0) -> Batch:
    """The batch with the teacher's predictions as columns, logits not rounded."""
    with torch.no_grad():
        logits = model(seed=5).eval()(torch.from_numpy(batch.ids_BT)).logits.reshape(-1, V)
    ids, _, tail = most_likely(logits, k, (temperature,))
    shape = batch.ids_BT.shape
    columns = {
        f"{IDS}_BT": ids.view(*shape, k).numpy().astype("<u2"),
        f"{LOGITS}_BT": logits.gather(1, ids).view(*shape, k).numpy(),
        f"{tail_name(temperature)}_BT": tail.view(shape).numpy(),
    }
    columns = {n: x[..., 0] if x.ndim == 3 and k == 1 else x for n, x in columns.items()}
    return replace(batch, columns={**batch.columns, **columns})


def _ready(engine: Engine, batch: Batch) -> Batch:
    (ready,) = engine._expand(batch, engine.context(1))
    return ready


@pytest.mark.parametrize("stored", [False, True])
def test_any_split_of_a_step_has_the_same_gradient(tmp_path: Path, stored: bool) -> None:
    objective = _objective(alpha=0.3, temperature=2.0, divergence="jsd")
    batch = _stored(pairs(), 5, 2.0) if stored else pairs()
    one, four = (_engine(tmp_path, objective, stored, micro) for micro in (16, 4))
    whole = gradient(one, _ready(one, batch))
    assert (gradient(four, _ready(four, batch)) - whole).norm() <= 1e-12 * whole.norm()


def test_a_stored_teacher_with_all_ids_but_one_is_the_live_one(tmp_path: Path) -> None:
    objective, batch = _objective(alpha=0.3), pairs()
    live, stored, less = _engine(tmp_path, objective), *(_engine(tmp_path, objective, True) for _ in range(2))
    exact = gradient(live, batch)
    assert (gradient(stored, _ready(stored, _stored(batch, V - 1))) - exact).norm() <= 1e-10 * exact.norm()
    assert (gradient(less, _ready(less, _stored(batch, 1))) - exact).norm() > 1e-3 * exact.norm()


def test_the_gradient_is_the_weighted_sum_and_the_reported_loss_that_of_the_labels(tmp_path: Path) -> None:
    batch = pairs()
    labels, teacher, both = (_engine(tmp_path, _objective(alpha=a, temperature=2.0)) for a in (1.0, 0.0, 0.25))
    expected = 0.25 * gradient(labels, batch) + 0.75 * gradient(teacher, batch)
    assert (gradient(both, batch) - expected).norm() <= 1e-12 * expected.norm()
    loss, _, others = both.gradients(batch)
    plain = _engine(tmp_path, LanguageModel()).gradients(batch)[0]
    assert float(loss) == pytest.approx(float(plain), rel=1e-12)
    assert float(others["distill"]) == pytest.approx(0.25 * float(loss) + 0.75 * float(others["divergence"]), rel=1e-12)
    assert both.evaluate([batch]).loss == pytest.approx(float(loss), rel=1e-12)


def test_labels_alone_are_fine_tuning_to_the_bit(tmp_path: Path) -> None:
    batch = pairs()
    ours, plain = _engine(tmp_path, _objective(alpha=1.0)), _engine(tmp_path, LanguageModel())
    for _ in range(3):
        assert float(ours.step(batch).loss) == float(plain.step(batch).loss)
    for a, b in zip(ours.trained.values(), plain.trained.values(), strict=True):
        assert torch.equal(a, b)


def test_a_teacher_alone_teaches_its_distribution(tmp_path: Path) -> None:
    batch, objective = pairs(), _objective(alpha=0.0)
    learner = _engine(tmp_path, objective)
    first = float(learner.step(batch).others["divergence"])
    for _ in range(40):
        last = float(learner.step(batch).others["divergence"])
    assert last < 0.5 * first


def test_a_token_without_stored_prediction_is_refused(tmp_path: Path) -> None:
    batch = _stored(pairs(), 3)
    tail_BT = batch.columns[f"{tail_name(1.0)}_BT"]
    row, column = np.argwhere(batch.labels_BT != batch.ignore)[0]
    tail_BT[row, column] = 0
    with pytest.raises(UserError, match="found no stored output for 1 tokens of a batch"):
        _engine(tmp_path, _objective(), stored=True).step(batch)
