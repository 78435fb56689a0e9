"""On-policy distillation, GKD: the teacher corrects what the student writes (Agarwal et al. 2023, arXiv:2306.13649).

A student that has only seen other people's text does not know how to go on after a mistake of its own. So a fraction of
the steps (GKD's lambda) trains on samples of the student: it continues the prompts of the step's rows, and every
sampled token gets T^2 D(teacher, student) of the distributions at its place. No gradient passes through sampling. The
mean is over the sampled tokens. All other steps are those of `distill`.

Which steps train on samples follows from the step's number, and random numbers of samples are keyed by the step
(`rollout.py`), so a killed run resumes exactly.

Shapes: B rows, T positions.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ingot.data.batches import Batch
from ingot.model.transformer import Transformer
from ingot.objectives.distill import Distill
from ingot.objectives.rollout import roll_out
from ingot.objectives.settings import GKDSettings
from ingot.train.divergences import distillation_terms
from ingot.train.objective import Context, Term


class GKD(Distill):
    """`distill`, of which some steps train on the student's own samples."""

    def __init__(self, settings: GKDSettings):
        super().__init__(settings)
        self.settings = settings
        self.needs = replace(self.needs, whole_step=True)

    def expand(self, batch: Batch, ctx: Context) -> Iterator[Batch]:
        settings, prompts = self.settings, None
        if not ctx.evaluating:
            if is_on_policy(ctx.step, settings.on_policy, settings.ramp):
                assert isinstance(ctx.model, Transformer)
                longest = ctx.model.config.context - settings.max_new
                prompts, ctx.metrics["prompts_left_out"] = prompts_of(batch, settings.prompt, longest)
            ctx.metrics["on_policy"] = float(prompts is not None)
        if prompts is None:
            yield from super().expand(batch, ctx)
            return
        rollout = roll_out(prompts, ctx, samples=1, max_new=settings.max_new, temperature=settings.sample_temperature)
        ctx.metrics["completion_tokens"] = float(rollout.completion_tokens_B.mean())
        ctx.metrics["truncated_fraction"] = float(rollout.truncated_B.mean())
        yield rollout.batch

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        if not batch.is_sampled:
            return super().loss(out, batch, ctx)
        divergence = replace(self.divergence, vocab=ctx.tokenizer.vocab if ctx.tokenizer else None)
        teacher = self._teacher(batch, ctx)
        loss_BT, nll_BT, divergence_BT = distillation_terms(
            out.hidden, out.head, batch.labels_BT, teacher, divergence, 0.0, ignore=batch.ignore
        )
        return {
            "lm": Term(nll_BT.sum(), "token"),  # of the samples, without a gradient
            "distill": Term(loss_BT.sum(), "token", penalty=True),
            "sampled_divergence": Term(divergence_BT.sum(), "token", metric=True),
        }


def is_on_policy(step: int, fraction: float, ramp: int = 0) -> bool:
    """Whether a step (from 1) trains on samples: steps are spread evenly (error diffusion).

    Args:
        step: the step.
        fraction: of the steps after the ramp.
        ramp: steps over which the fraction grows from 0.
    """

    def steps_until(s: int) -> int:
        return math.floor(fraction * (s - ramp / 2 if s >= ramp else s * s / (2 * ramp)))

    return steps_until(step) > steps_until(step - 1)


def prompts_of(batch: Batch, prompt: int, longest: int) -> tuple[Batch | None, float]:
    """The beginnings of the documents of a batch, one in each row, and the fraction that is too long; None if all are.

    The prompt of a conversation is all that precedes its first answer. That of a document that is trained on from its
    first token has `prompt` tokens.

    Args:
        batch: rows of documents; those that are not isolated count as one.
        prompt: tokens of the prompt of running text.
        longest: most tokens of a prompt; longer ones are left out.
    """
    everything = [(row, ids) for row in range(len(batch)) for ids in _prompts_of_row(batch, row, prompt)]
    found = [(row, ids) for row, ids in everything if len(ids) <= longest]
    left_out = 1 - len(found) / len(everything) if everything else 0.0
    if not found:
        return None, left_out
    row_P, lengths_P = np.array([row for row, _ in found]), np.array([len(ids) for _, ids in found])
    ids_PT = np.zeros((len(found), lengths_P.max()), np.int64)
    for padded_T, (_, ids) in zip(ids_PT, found, strict=True):
        padded_T[: len(ids)] = ids
    prompts = Batch(
        ids_BT=ids_PT,
        labels_BT=np.full_like(ids_PT, batch.ignore),
        positions_BT=np.broadcast_to(np.arange(ids_PT.shape[1]), ids_PT.shape).copy(),
        documents_BT=None,
        source_B=np.asarray(batch.source_B)[row_P],
        row_B=np.asarray(batch.row_B)[row_P],
        ignore=batch.ignore,
        columns={"lengths_B": lengths_P},
    )
    return prompts, left_out


def _prompts_of_row(batch: Batch, row: int, prompt: int) -> Iterator[np.ndarray]:
    ids_T, is_label_T = np.asarray(batch.ids_BT[row]), np.asarray(batch.labels_BT[row]) != batch.ignore
    document_T = np.zeros_like(ids_T) if batch.documents_BT is None else np.asarray(batch.documents_BT[row])
    starts = np.flatnonzero(np.diff(document_T, prepend=document_T[0] - 1))
    for start, end in zip(starts, [*starts[1:], len(ids_T)], strict=True):
        labels = np.flatnonzero(is_label_T[start:end])
        if len(labels) and labels[0] > 0:
            yield ids_T[start : start + labels[0] + 1]
        elif len(labels) > prompt:
            yield ids_T[start : start + prompt]
