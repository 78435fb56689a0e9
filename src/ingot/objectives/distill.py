"""Distillation: a student learns from the labels and from a teacher's next-token distributions.

The loss of a token is alpha (-ln p(label)) + (1 - alpha) T^2 D(teacher, student); `train/divergences.py` defines D. It
is trained as the penalty `distill`, and the reported loss is -ln p(label), as with the objective `lm`.

The teacher is a companion that runs beside the student, or its predictions are columns of the data that an annotate
stage has written (`stages/training/annotate.py`). A companion may also teach its states and relations
(`objectives/distill_layers.py`).

Shapes: B rows, T positions, k stored tokens.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ingot.core.errors import UserError
from ingot.data.batches import Batch
from ingot.model.losses import cross_entropy
from ingot.objectives.distill_layers import LayerTerms
from ingot.objectives.settings import MIXTURE_WEIGHTS, DistillSettings, TeacherSettings
from ingot.train.divergences import Divergence, LiveTeacher, StoredTeacher, Teacher, distillation_terms
from ingot.train.objective import Column, Context, Needs, Objective, Term

IDS, LOGITS = "teacher_ids", "teacher_logits"
"""Columns with the k most likely tokens and their logits."""


def tail_name(temperature: float) -> str:
    """The column with ln of the tail at a temperature."""
    return f"teacher_tail_{temperature:g}".replace(".", "_").replace("-", "_").replace("+", "")


def stored_columns(k: int, temperatures: Sequence[float], vocab: int) -> tuple[Column, ...]:
    """The columns of a stored teacher: 4 k bytes a token (6 k above 65,536 ids), and 4 for each temperature."""
    return (
        Column(IDS, "token", "<u2" if vocab <= 1 << 16 else "<u4", k),
        Column(LOGITS, "token", "<f2", k),
        *(Column(tail_name(t), "token", "<f4") for t in temperatures),
    )


class Distill(Objective):
    """Cross-entropy with labels and a divergence from a teacher."""

    needs = Needs(loss_is_nll=True)

    def __init__(self, settings: TeacherSettings):
        self.alpha = settings.alpha
        beta = settings.beta or MIXTURE_WEIGHTS.get(settings.divergence, 0.5)
        self.divergence = Divergence(settings.divergence, settings.temperature, beta)
        self._tail = f"{tail_name(settings.temperature)}_BT"
        self._settings = settings
        self._layers: LayerTerms | None = None

    def for_models(self, model: nn.Module, companions: Mapping[str, nn.Module]) -> Objective:
        if not isinstance(self._settings, DistillSettings) or not self._settings.reads_layers:
            return self
        shapes: Any = model.config, companions["teacher"].config
        objective = copy.copy(self)
        objective._layers = layers = LayerTerms(self._settings, *shapes)
        objective.needs = replace(self.needs, taps=layers.student_taps)
        return objective

    def modules(self, model: nn.Module) -> dict[str, nn.Module]:
        return self._layers.modules() if self._layers else {}

    def expand(self, batch: Batch, ctx: Context) -> Iterator[Batch]:
        """The batch; the columns of a stored teacher in types that torch can index, and checked to be there."""
        if "teacher" in ctx.companions:
            yield batch
            return
        tail_BT, ids_BT = np.asarray(batch.columns[self._tail]), np.asarray(batch.columns[f"{IDS}_BT"])
        if missing := int(((np.asarray(batch.labels_BT) != batch.ignore) & (tail_BT == 0)).sum()):
            raise UserError(
                f"objective.teacher: found no stored output for {missing:,} tokens of a batch, expected one for each; "
                "give the annotate stage the packing of this stage and rows that are at least as long"
            )
        yield replace(batch, columns={**batch.columns, f"{IDS}_BT": ids_BT.astype(np.int64)})

    def loss(self, out: Any, batch: Batch, ctx: Context) -> dict[str, Term]:
        if not self._layers:
            return self._token_terms(out, batch, ctx)
        teacher = self._run_teacher(batch, ctx)
        layers = self._layers.terms(out.taps, teacher.taps, ctx.modules, batch)
        return {**self._token_terms(out, batch, ctx, teacher), **layers}

    def _token_terms(self, out: Any, batch: Batch, ctx: Context, ran: Any = None) -> dict[str, Term]:
        """The loss of the next tokens.

        Args:
            ran: the output of a teacher that has run over these rows.
        """
        if self.alpha == 1:
            return {"lm": Term(cross_entropy(out.hidden, out.head, batch.labels_BT, ignore=batch.ignore)[0], "token")}
        divergence = replace(self.divergence, vocab=ctx.tokenizer.vocab if ctx.tokenizer else None)
        teacher = self._teacher(batch, ctx, ran)
        loss_BT, nll_BT, divergence_BT = distillation_terms(
            out.hidden, out.head, batch.labels_BT, teacher, divergence, self.alpha, ignore=batch.ignore
        )
        return {
            "lm": Term(nll_BT.sum(), "token"),  # without a gradient: `distill` has all of it
            "distill": Term(loss_BT.sum(), "token", penalty=True),
            "divergence": Term(divergence_BT.sum(), "token", metric=True),
        }

    def _teacher(self, batch: Batch, ctx: Context, ran: Any = None) -> Teacher:
        if "teacher" in ctx.companions:
            out = self._run_teacher(batch, ctx) if ran is None else ran
            return LiveTeacher(out.hidden, out.head)
        ids_BTk, logits_BTk = (batch.columns[f"{n}_BT"] for n in (IDS, LOGITS))
        if ids_BTk.ndim == 2:  # a column of width 1
            ids_BTk, logits_BTk = ids_BTk[..., None], logits_BTk[..., None]
        return StoredTeacher(ids_BTk, logits_BTk, batch.columns[self._tail])

    def _run_teacher(self, batch: Batch, ctx: Context) -> Any:
        """The output of the teacher beside the student, with the taps that the layers need."""
        taps = {"taps": self._layers.teacher_taps} if self._layers else {}
        with torch.no_grad():
            return ctx.companions["teacher"](**batch.inputs, **taps)
