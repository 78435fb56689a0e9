"""K1: a student of the exact next-token distributions beats one of labels.

The source is a Markov chain of order 2 over 16 letters, whose 256 distributions are drawn from Dirichlet(1/2). The
student has 20,000 letters of it, again and again. The teacher is the source itself, so the divergence of the student
from it is exact at every position of any text, and it is the excess of the student's loss over the entropy.

`k2_tails` has students of stored predictions of the same source.

Shapes: B rows, T positions, V letters.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from ingot.data.batches import Batch
from ingot.model.lm_head import LMHead
from ingot.model.transformer import Transformer
from ingot.objectives.distill import Distill
from ingot.objectives.settings import DistillSettings
from ingot.train.divergences import kl
from proofs.proof import Arm, Gate, Numbers, Proof
from proofs.worlds import engine, logits, model

V, T, ROWS, TEST_ROWS = 16, 64, 312, 128
"""Letters, letters of a row, rows of training (20,000 letters) and of the measurement."""
STEPS, BATCH, LR, EVERY = 300, 32, 3e-3, 50


class Source(nn.Module):
    """The Markov chain as a model: its hidden states are ln p of the next letter.

    Args:
        shuffled: whether its distributions belong to other contexts, as those of a wrong teacher.
    """

    def __init__(self, seed: int, shuffled: bool = False):
        super().__init__()
        draw = np.random.default_rng(seed)
        self.p_VVV = np.maximum(draw.dirichlet(np.full(V, 0.5), (V, V)), 1e-12)
        if shuffled:
            self.p_VVV = draw.permutation(self.p_VVV.reshape(-1, V)).reshape(V, V, V)

    def draw(self, rows: int, seed: int) -> np.ndarray:
        """Rows of T + 1 letters; two letters 0 precede the first one."""
        draw, ids_BL = np.random.default_rng(seed), np.zeros((rows, T + 3), np.int64)
        for t in range(2, T + 3):
            cumulative_BV = self.p_VVV[ids_BL[:, t - 2], ids_BL[:, t - 1]].cumsum(-1)
            ids_BL[:, t] = (draw.random((rows, 1)) > cumulative_BV / cumulative_BV[:, -1:]).sum(-1)
        return ids_BL[:, 2:]

    def forward(self, ids_BT: Any, **_: Any) -> Any:
        ids_BT = torch.as_tensor(ids_BT)
        before_BT = torch.cat((torch.zeros_like(ids_BT[:, :1]), ids_BT[:, :-1]), 1)
        logp_BTV = torch.from_numpy(self.p_VVV).log()[before_BT, ids_BT].float()
        return SimpleNamespace(hidden=logp_BTV, head=LMHead(torch.eye(V)))


def batch_of(ids_BL: np.ndarray) -> Batch:
    row_B = np.arange(len(ids_BL))
    place_BT = np.broadcast_to(np.arange(T), (len(row_B), T)).copy()
    return Batch(ids_BL[:, :-1].copy(), ids_BL[:, 1:].copy(), place_BT, None, np.zeros_like(row_B), row_B)


ARMS: Mapping[str, Mapping[str, Any]] = {
    "labels": {"alpha": 1.0},
    "teacher": {"alpha": 0.0},
    "teacher of other contexts": {"alpha": 0.0, "shuffled": True},
}


def trained(seed: int, *, alpha: float, shuffled: bool = False) -> Mapping[str, float]:
    """The student's excess loss in nats, exact at every position of a test text.

    Args:
        alpha: weight of the labels.
        shuffled: whether the teacher is the source with other contexts.

    Returns:
        `last` and `lowest` of the excess after each `EVERY` steps.
    """
    source, teacher = Source(seed), Source(seed, shuffled)
    student = model(V, T, seed)
    objective = Distill(DistillSettings(teacher="source", alpha=alpha))
    learner = engine(student, objective, STEPS, LR, seed, companions={"teacher": teacher}, warmup=20)
    data, test = batch_of(source.draw(ROWS, seed)), batch_of(source.draw(TEST_ROWS, seed + 1000))
    draw, excess = np.random.default_rng(seed), []
    for step in range(1, STEPS + 1):
        learner.step(data.take(draw.choice(ROWS, BATCH, replace=False)))
        if step % EVERY == 0:
            excess.append(_excess(student, source, test))
    return {"last": excess[-1], "lowest": min(excess)}


@torch.no_grad()
def _excess(student: Transformer, source: Source, test: Batch) -> float:
    """The mean divergence of the student from the source."""
    logp_BTV, logq_BTV = (x.double().log_softmax(-1) for x in (source(test.ids_BT).hidden, logits(student, test)))
    return float(kl(logp_BTV, logq_BTV).mean())


def bayes(seed: int) -> float:
    """The excess of the best predictions from labels: the posterior mean under the prior that the source has."""
    source = Source(seed)
    ids_BL, count_VVV = source.draw(ROWS, seed), np.zeros((V, V, V))
    before_BL = np.concatenate((np.zeros_like(ids_BL[:, :1]), ids_BL[:, :-2]), 1)
    np.add.at(count_VVV, (before_BL, ids_BL[:, :-1], ids_BL[:, 1:]), 1)
    q_VVV = (count_VVV + 0.5) / (count_VVV + 0.5).sum(-1, keepdims=True)
    kl_VV = (source.p_VVV * (np.log(source.p_VVV) - np.log(q_VVV))).sum(-1)
    test_BL = source.draw(TEST_ROWS, seed + 1000)[:, :-1]
    before_BL = np.concatenate((np.zeros_like(test_BL[:, :1]), test_BL[:, :-1]), 1)
    return float(kl_VV[before_BL, test_BL].mean())


def run(seed: int, arm: str) -> Numbers:
    excess, best = trained(seed, **ARMS[arm]), bayes(seed)
    lowest = excess["lowest"]
    return {"excess": excess["last"], "below Bayes": best - excess["last"], "lowest excess": lowest, "Bayes": best}


EXCESS, GAP = Gate("excess", high=0.03), Gate("below Bayes", low=0.05)
PROOF = Proof(
    "K1",
    "A student of the teacher's distributions learns more from the same text than a student of its labels",
    "the teacher is the source: at most .03 nats above the entropy, and at least .05 below the best predictions "
    "from the labels, the posterior mean (the likelihood's maximum has about (16 - 1) 256 / 2 / 20,000 = .096)",
    run,
    [
        Arm("teacher", [EXCESS, GAP]),
        Arm("labels", [EXCESS, GAP], control=True),
        Arm("teacher of other contexts", [EXCESS, GAP], control=True),
    ],
)
