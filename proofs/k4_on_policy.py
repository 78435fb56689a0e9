"""K4: a student that is corrected on its own samples is nearer to its teacher where it writes itself.

The task is to reverse strings of eight letters (`letters`). The teacher is the rule itself, unsure: it gives the right
next letter probability .9 whatever was written before, mistakes included. The offline student learns its distributions
on right answers. It samples a wrong letter as often as its teacher does, but has never read one: exposure bias. The
on-policy student has the same steps and rows, and trains on its own samples in every second step after a ramp.

Shapes: B rows, T positions, V ids.
"""

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ingot.data.batches import IGNORE, append_answers
from ingot.infer.generate import generate
from ingot.infer.sampling import Sampling
from ingot.model.lm_head import LMHead
from ingot.model.transformer import Transformer
from ingot.objectives.gkd import GKD
from ingot.objectives.settings import GKDSettings
from ingot.train.divergences import kl
from proofs.letters import END, NOISE, REVERSE, V, batch, strings
from proofs.proof import Arm, Gate, Numbers, Proof
from proofs.worlds import Letters, engine, logits, model, prompts

LENGTH, RIGHT = 8, 0.9
"""Letters of a string, and the teacher's probability of the right next one."""
STEPS, ROWS, LR = 800, 64, 3e-3
TEST_ROWS = 1000


class Rule(nn.Module):
    """The rule as a model: its hidden states are ln p of the next id.

    Args:
        shift: the rows before, whose strings it reverses instead: 1 makes a wrong teacher.
    """

    def __init__(self, shift: int = 0):
        super().__init__()
        self.shift = shift

    def forward(self, ids_BT: Any, **_: Any) -> Any:
        return SimpleNamespace(hidden=self.logp(torch.as_tensor(ids_BT)), head=LMHead(torch.eye(V)))

    def logp(self, ids_BT: Tensor) -> Tensor:
        """ln p of the next id, B x T x V; uniform in prompts."""
        first, separator = 1 + NOISE, 1 + NOISE + LENGTH
        p_BTV = torch.full((*ids_BT.shape, V), 1 / V)
        reversed_BL = ids_BT.roll(self.shift, 0)[:, first:separator].flip(1)
        right_BL = torch.cat((reversed_BL, torch.full_like(reversed_BL[:, :1], END)), 1)
        answer_BTV = p_BTV[:, separator : separator + LENGTH + 1]
        answer_BTV[:] = (1 - RIGHT) / (V - 1)
        answer_BTV.scatter_(2, right_BL[:, : answer_BTV.shape[1], None], RIGHT)
        return p_BTV.log()


@functools.cache
def student(seed: int, on_policy: float, shift: int = 0) -> Transformer:
    """A student of the teacher's distributions alone."""
    trained = model(V, 32, seed, depth=2)
    settings = GKDSettings(teacher="rule", alpha=0.0, on_policy=on_policy, ramp=STEPS // 2, max_new=LENGTH + 1)
    learner = engine(
        trained, GKD(settings), STEPS, LR, seed, companions={"teacher": Rule(shift)}, tokenizer=Letters(V), warmup=50
    )
    draw = np.random.default_rng([seed, 5])
    for _ in range(STEPS):
        learner.step(batch({REVERSE: ROWS}, LENGTH, draw))
    return trained


@torch.no_grad()
def measured(trained: Transformer, seed: int) -> Mapping[str, float]:
    """The fraction of right greedy answers, and KL(teacher, student) in nats of a token: of the student's samples, and
    of right answers (`on data`)."""
    asked, answers = strings(REVERSE, TEST_ROWS, LENGTH, np.random.default_rng(97))

    def written(temperature: float) -> list[np.ndarray]:
        sampling = Sampling(max_new=LENGTH + 1, temperature=temperature, stop=frozenset({END}))
        return [c.ids for c in generate(trained, list(asked), sampling, seed=seed)]

    def divergence(texts: list[np.ndarray]) -> float:
        rows = append_answers(prompts(asked.tolist()), texts, 1)
        mask_BT = torch.from_numpy(rows.labels_BT != IGNORE)
        p_nV = Rule().logp(torch.from_numpy(rows.ids_BT))[mask_BT].double()
        return float(kl(p_nV, logits(trained, rows)[mask_BT].double().log_softmax(-1)).mean())

    right = [np.array_equal(a, b) for a, b in zip(written(0.0), answers, strict=True)]
    return {
        "right": float(np.mean(right)),
        "KL of samples": divergence(written(1.0)),
        "KL on data": divergence(list(answers)),
    }


def run(seed: int, arm: str) -> Numbers:
    offline = measured(student(seed, 0.0), seed)
    other_seed = arm == "offline, other draws"
    own = measured(
        student(seed + 100 * other_seed, 0.0 if other_seed else 0.5, int(arm == "teacher of other rows")), seed
    )
    compared = {
        "right, gain": own["right"] - offline["right"],
        "KL, ratio": own["KL of samples"] / offline["KL of samples"],
    }
    return {**compared, **own, **{f"offline {name}": value for name, value in offline.items()}}


NEAR = Gate("KL, ratio", high=0.25, why="offline students with other draws differ by a factor of two")
GAIN = Gate("right, gain", low=-0.01)
LEARNED = Gate("offline right", low=0.98, why="the students have learned the task, so mistakes alone are new to them")
PROOF = Proof(
    "K4",
    "A student that is corrected on its own samples is nearer to its teacher where it writes, and as often right",
    "KL(teacher, student) of sampled tokens at most a quarter of that of a student of the same steps on data alone; "
    "right greedy answers at most one point fewer",
    run,
    [
        Arm("on policy", [NEAR, GAIN, LEARNED]),
        Arm("offline, other draws", [NEAR, GAIN], control=True),
        Arm("teacher of other rows", [NEAR, GAIN], control=True),
    ],
    note="Offline students differ: with other draws and 500 steps their ratio was .35 to 1.7, so a gate at .8 (20 % "
    "lower) would tell nothing. On right answers both students are within .0004 nats of the teacher: they differ in "
    "what they do after a mistake.",
)
