"""Forgetting and what stops it, in small: E1, E2 and E3 of the proofs on three letters.

Task A reverses letters and task B sorts others; a tag says which is asked. After A, B is learned by plain training,
with a twentieth of A's rows, with EWC on the true Fisher, and with EWC on the empirical one as a control. A score is
the fraction of 500 new items whose every letter is the argmax given those before.

B has letters of its own, so that there are weights that A does not need (`proofs/e3_consolidation.py`).
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.data.batches import IGNORE, Batch
from ingot.distributed.mesh import Mesh
from ingot.evaluate.fisher import Fisher, Labels
from ingot.model.config import ModelSettings
from ingot.model.transformer import Transformer, build
from ingot.objectives.lm import LanguageModel
from ingot.optim.grad_terms import Anchor, mean_importance, prepare_importance
from ingot.optim.schedule import Schedule
from ingot.optim.settings import OptimSettings
from ingot.train.engine import Engine, Plan
from ingot.train.execution import Execution
from ingot.train.penalties import Penalties
from ingot.train.settings import LoopSettings

REVERSE, SORT, EQUALS, END, FIRST = range(5)
LETTERS = {REVERSE: (FIRST, FIRST + 8), SORT: (FIRST + 8, FIRST + 12)}
"""The ids that a task's letters are drawn from."""
LENGTH, ROWS = 3, 64
CONFIG = ModelSettings(depth=2, width=48, heads=4, context=2 * LENGTH + 2).resolve(FIRST + 12)
Weights = Mapping[str, torch.Tensor]


def _rows(mix: Mapping[int, int], draw: np.random.Generator) -> Batch:
    """Rows of each task, by number: tag, letters, equals sign, answer, end. The answer and its end have labels."""
    parts = []
    for task, n in mix.items():
        given = draw.integers(*LETTERS[task], (n, LENGTH))
        answer = given[:, ::-1] if task == REVERSE else np.sort(given, 1)
        column = np.full((n, 1), EQUALS)
        parts.append(np.concatenate([np.full((n, 1), task), given, column, answer, np.full((n, 1), END)], 1))
    ids_BL = np.concatenate(parts)
    labels_BT = ids_BL[:, 1:].copy()
    labels_BT[:, : LENGTH + 1] = IGNORE
    B, T = labels_BT.shape
    places = np.broadcast_to(np.arange(T), (B, T)).copy()
    return Batch(ids_BL[:, :-1].copy(), labels_BT, places, None, np.zeros(B, np.int64), np.arange(B))


def _score(model: Transformer, task: int) -> float:
    batch = _rows({task: 500}, np.random.default_rng(99)).to("cpu")
    with torch.no_grad():
        out = model(batch.ids_BT, positions_BT=batch.positions_BT)
        right_BT = out.head(out.hidden).argmax(-1) == batch.labels_BT
    return float((right_BT | (batch.labels_BT == IGNORE)).all(1).float().mean())


def _copy(model: Transformer) -> Transformer:
    other = build(CONFIG, 0)
    other.load_state_dict(model.state_dict())
    return other


def _learn(
    start: Transformer, mix: Mapping[int, int], steps: int, lr: float, seed: int, anchor: Anchor | None = None
) -> Transformer:
    model = _copy(start)
    settings = OptimSettings(weight_decay=0.0 if anchor else 0.1)  # decay would work against the anchor
    plan = Plan(steps, seed, Schedule("cosine", lr, lr / 10, 20, steps), settings, LoopSettings(), 10**9)
    penalties = Penalties((), (anchor,) if anchor else (), lambda: dict(model.named_parameters()))
    execution = Execution("cpu", "fp32", 1, ROWS, "test")
    engine = Engine(model, LanguageModel(), plan, execution, Mesh(), Path("unused"), None, penalties)
    draw = np.random.default_rng(seed)
    for _ in range(steps):
        engine.step(_rows(mix, draw))
    return model


def _fisher(model: Transformer, labels: Labels) -> Weights:
    fisher, draw = Fisher(_copy(model), labels), np.random.default_rng(5)
    for place in range(64):
        fisher.add(_rows({REVERSE: 1}, draw).to("cpu"), place)
    return fisher.mean()


def results(seed: int) -> dict[str, tuple[float, float]]:
    """Scores on A and on B before and after B was learned in each way, and the means of both Fishers."""
    base = _learn(build(CONFIG, seed), {REVERSE: ROWS}, 200, 3e-3, seed)
    center = {name: p.detach().clone() for name, p in base.named_parameters()}
    true, empirical = _fisher(base, "mixed"), _fisher(base, "empirical")
    shapes = {"clip": 0.999, "floor": 0.03}
    mean = mean_importance(prepare_importance(true, **shapes))

    def then(mix: Mapping[int, int], anchor: Anchor | None = None) -> tuple[float, float]:
        model = _learn(base, mix, 120, 2e-3, seed + 100, anchor)
        return _score(model, REVERSE), _score(model, SORT)

    def ewc(importance: Weights) -> Anchor:
        """Of the same strength for both Fishers: 1 where the true one has a mean of 1."""
        return Anchor("ewc", 1 / mean, center, prepare_importance(importance, **shapes))

    alone = {SORT: ROWS}
    return {
        "before": (_score(base, REVERSE), _score(base, SORT)),
        "plain": then(alone),
        "replay": then({SORT: ROWS - 3, REVERSE: 3}),
        "ewc": then(alone, ewc(true)),
        "ewc, empirical": then(alone, ewc(empirical)),
        "mean F, true and empirical": (mean_importance(true), mean_importance(empirical)),
    }


@pytest.mark.parametrize(
    "seed", [pytest.param(1, marks=pytest.mark.slow), *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))]
)
def test_E1_E2_E3_forgetting_is_real_and_replay_and_EWC_stop_it(seed: int) -> None:
    """Plain training forgets A. Replay and EWC keep most of it and learn B as well. The control is EWC on the empirical
    Fisher, which is nearly 0 where the model is right: it keeps nothing.

    With seeds 1 to 8 plain training left at most .03 of A, EWC at least .95 (and .92 of B).
    """
    found = results(seed)
    (before, _), (plain, plain_b), (replay, replay_b) = found["before"], found["plain"], found["replay"]
    (ewc, ewc_b), (control, control_b) = found["ewc"], found["ewc, empirical"]
    true, empirical = found["mean F, true and empirical"]
    assert before >= 0.97
    assert plain <= 0.3
    assert replay >= plain + 0.4
    assert ewc >= plain + 0.6
    assert abs(control - plain) <= 0.1
    assert min(plain_b, replay_b, ewc_b, control_b) >= 0.8, "all of them learn B"
    assert true >= 100 * empirical
