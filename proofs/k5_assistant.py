"""K5: from a teacher to a small student by way of an assistant, against the direct route.

The source is that of `k1_distillation`. The teacher learned from new text of the source at each step, so that it is
close to the source. It is 5 times as large as the assistant, which is 6 times as large as the student (225k, 45k and 8k
parameters). Assistant and student read the same 20,000 letters. Both routes give the student the same number of steps;
the chain also trains the assistant.

Shapes: B rows, T positions, V letters.
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ingot.model.transformer import Transformer
from ingot.objectives.distill import Distill
from ingot.objectives.lm import LanguageModel
from ingot.objectives.settings import DistillSettings
from ingot.train.divergences import kl
from proofs.k1_distillation import BATCH, LR, ROWS, TEST_ROWS, Source, T, V, batch_of
from proofs.proof import Arm, Gate, Numbers, Proof
from proofs.worlds import engine, frozen, logits, model

SIZES: Mapping[str, Mapping[str, Any]] = {
    "teacher": {"depth": 2, "width": 96},
    "assistant": {"depth": 2, "width": 40},
    "student": {"depth": 1, "width": 24},
}
STEPS, TEACHER_STEPS = 300, 600


def sizes() -> Mapping[str, int]:
    """Parameters of each model."""
    return {name: sum(p.numel() for p in model(V, T, 0, **size).parameters()) for name, size in SIZES.items()}


@functools.cache
def teacher_of(seed: int) -> Transformer:
    """A model that has read new text at each step."""
    source, draw = Source(seed), np.random.default_rng(seed)
    learner = engine(model(V, T, seed, **SIZES["teacher"]), LanguageModel(), TEACHER_STEPS, LR, seed, warmup=20)
    for _ in range(TEACHER_STEPS):
        learner.step(batch_of(source.draw(BATCH, int(draw.integers(2**31)))))
    return frozen(learner.model)  # pyright: ignore[reportArgumentType]


@functools.cache
def distilled(seed: int, size: str, teacher: Transformer) -> Transformer:
    """A model of a size that has learned from a teacher alone, on the 20,000 letters."""
    student, objective = model(V, T, seed + 1, **SIZES[size]), Distill(DistillSettings(teacher="t", alpha=0.0))
    learner = engine(student, objective, STEPS, LR, seed, companions={"teacher": teacher}, warmup=20)
    data, draw = batch_of(Source(seed).draw(ROWS, seed)), np.random.default_rng(seed)
    for _ in range(STEPS):
        learner.step(data.take(draw.choice(ROWS, BATCH, replace=False)))
    return frozen(student)


def beside(seed: int, student: Transformer, teacher: Transformer) -> Mapping[str, float]:
    """KL(teacher, student) and agreement of the most likely letters on test text, and the excess over the source."""
    source = Source(seed)
    test = batch_of(source.draw(TEST_ROWS, seed + 1000))
    outputs: dict[str, Any] = {"teacher": logits(teacher, test), "student": logits(student, test)}
    outputs["source"] = source(test.ids_BT).hidden
    logp = {name: x.double().log_softmax(-1) for name, x in outputs.items()}
    same = logp["teacher"].argmax(-1) == logp["student"].argmax(-1)
    return {
        "KL": float(kl(logp["teacher"], logp["student"]).mean()),
        "agreement": float(same.double().mean()),
        "excess": float(kl(logp["source"], logp["student"]).mean()),
    }


def run(seed: int, arm: str) -> Numbers:
    teacher = teacher_of(seed)
    if arm == "direct":
        return beside(seed, distilled(seed, "student", teacher), teacher)
    assistant = distilled(seed, "assistant", teacher)
    if arm == "assistant":
        return beside(seed, assistant, teacher)
    if arm == "chain with an untrained assistant":
        assistant = frozen(model(V, T, seed + 1, **SIZES["assistant"]))
    return beside(seed, distilled(seed, "student", assistant), teacher)


NEAR = [Gate("KL", high=0.5), Gate("agreement", low=0.5)]
PROOF = Proof(
    "K5",
    "A small student learns a large teacher's distribution through an assistant; whether that is better than the "
    "direct route is measured, not claimed",
    "none for the difference of the routes (Mirzadeh et al. 2019, arXiv:1902.03393, find at most a point at such "
    "sizes); both routes bring the student to the teacher, and an assistant that has learned nothing teaches nothing",
    run,
    [
        Arm("assistant", NEAR),
        Arm("chain", NEAR),
        Arm("direct", NEAR),
        Arm("chain with an untrained assistant", NEAR, control=True),
    ],
)
