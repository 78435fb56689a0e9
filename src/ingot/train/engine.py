"""The one training step. Pretraining, fine-tuning and every other objective run through `Engine.step`.

A step: take the raw batch of that step, let the objective expand it (usually to itself), count the units of the whole
step over all ranks, run forward and backward over micro-batches with each loss term divided by its unit's global
count, add gradients up, clip by the global norm, set the learning rate of this step, update. Gradients are summed and
never averaged, so one micro-batch or sixteen, one rank or eight give the same update.

Everything that is neither a weight nor a moment is a function of the step, so a checkpoint is tensors, a few integers
and the objective's small declared dict; resuming repeats nothing and skips nothing.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ingot.backends.cuda_graphs import Learned, Recorder
from ingot.backends.select import as_trained, compiled
from ingot.core.artifact import CHECKPOINTS, checkpoint_path
from ingot.data.batches import Batch
from ingot.data.sampler import key_of
from ingot.distributed import checkpoint
from ingot.distributed.mesh import Mesh
from ingot.optim import optimizers
from ingot.optim.average import Average
from ingot.optim.groups import global_norm
from ingot.optim.settings import OptimSettings
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train import health, loss_scaling
from ingot.train.execution import Execution
from ingot.train.metrics import StepMetrics, merged, normalised, reported
from ingot.train.objective import Context, Mean, Objective, Term
from ingot.train.penalties import Penalties
from ingot.train.settings import LoopSettings
from ingot.train.signals import Interruptions

FRESH: dict[str, Any] = {
    "step": 0,
    "tokens": 0,
    "skipped_steps": 0,
    "loss_scale": 1.0,
    "loss_scale_steps": 0,
    "best_step": 0,
    "best_val": None,
    "evaluated": 0,
    "health": health.FRESH,
    "objective": {},
}
DECLARED = frozenset(FRESH)
"""All that a checkpoint's state may hold besides tensors."""


class LearningRate(Protocol):
    """A schedule, or several one after another."""

    @property
    def peak(self) -> float: ...

    def lr(self, step: int) -> float: ...


@dataclass(frozen=True)
class Plan:
    """What the engine follows: all of it derived from the recipe and its inputs before the first step."""

    steps: int
    seed: int
    schedule: LearningRate
    optim: OptimSettings
    loop: LoopSettings
    evaluate_every: int
    config: Mapping[str, Any] = field(default_factory=dict)
    """What a checkpoint says of itself besides its state: the model's shape, the tokenizer."""
    label: Callable[[int], Mapping[str, str]] = lambda step: {}
    """step -> what else its log line says, such as the phase it belongs to."""


class Engine:
    """Model, optimizer, and the state that a checkpoint holds."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        plan: Plan,
        execution: Execution,
        mesh: Mesh,
        directory: Path,
        companions: Mapping[str, nn.Module] | None = None,
        penalties: Penalties | None = None,
        tokenizer: Tokenizer | None = None,
        replay: Objective | None = None,
        say: Callable[[str], None] | None = None,
    ):
        self.model, self.objective, self.plan = model.train(objective.dropout), objective, plan
        self.companions, self.penalties = companions or {}, penalties or Penalties()
        self.tokenizer = tokenizer
        self.replay = replay or objective
        """The objective that replayed rows are learned by."""
        self.execution, self.mesh = execution, mesh
        self.checkpoints = directory / CHECKPOINTS
        self._compiled = compiled(model, execution.compile, say)
        torch.manual_seed(plan.seed)  # of what the objective's modules start with
        self.extra = nn.ModuleDict(objective.modules(model)).to(execution.device, execution.parameter_dtype)
        self.named = dict(model.named_parameters()) | {f"extra.{n}": p for n, p in self.extra.named_parameters()}
        self.trained = {n: p for n, p in self.named.items() if p.requires_grad}
        self.optimizer = optimizers.build(self.trained, plan.optim, plan.schedule.peak)
        self.average = Average(self.trained, plan.optim.ema)
        self.state = {**copy.deepcopy(FRESH), "objective": dict(objective.fresh)}
        if execution.precision == "fp16":
            self.state["loss_scale"] = loss_scaling.START
        self.saved_step = 0
        """The step of the newest checkpoint."""
        self.interruptions = Interruptions(lambda: self.unsaved)
        self._recorder = self._make_recorder()

    # -- one step --------------------------------------------------------------------------------------------------

    def step(self, raw: Batch) -> StepMetrics:
        """Train on the batch of the next step."""
        step = self.state["step"] + 1
        lr = self.plan.schedule.lr(step)
        context = self.context(step)
        expanded = enumerate(self._expanded(replace(raw, replay=None), context))
        again = dealt(raw.replay, self.objective.minibatches)
        updates = [
            self._update(step, lr, replace(batch, replay=again[inner % len(again)]), inner) for inner, batch in expanded
        ]
        assert updates, "expand yielded no batch"
        if raw.replay is not None:
            seen = self._global_counts(raw)["replay_token"] * len(updates) / len(again)
            context.notes["replay_share"] = seen / (seen + sum(u.tokens for u in updates))
        metrics = merged(updates, context.notes)
        self.average.update(step)
        self.state["step"], self.state["tokens"] = step, metrics.tokens_seen
        return metrics

    def context(self, step: int) -> Context:
        """What the objective's `expand` sees; an evaluation's (step 0) leaves its state alone."""
        state = self.state["objective"]
        return Context(
            step,
            self.plan.seed,
            self.model,
            self.execution,
            self.companions,
            state=state if step else dict(state),
            tokenizer=self.tokenizer,
            forward_of=self.forward_of,
        )

    def forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """What to call instead of a model that is compared with this one, or of this one for any shape of rows."""
        if self.execution.compile != "native":
            return model
        return self._compiled if model is self.model else as_trained(model)

    def gradients(
        self, batch: Batch, inner: int = 0, counts: Mapping[str, int] | None = None
    ) -> tuple[Tensor, Mapping[str, int], dict[str, Tensor]]:
        """Leave the gradient of the whole batch in `.grad`; return (loss, unit counts, penalties and metrics by name).

        The generator is set anew for every forward pass, so what dropout draws is a function of (seed, step, update
        within the step, micro-batch, rank) and a resumed run draws the same; but not where an update is recorded, which
        draws nothing.
        """
        counts, scale = counts or self._global_counts(batch), self.state["loss_scale"]
        self.optimizer.clear()
        sums: dict[str, Tensor] = {}
        terms: dict[str, Term] = {}
        for number, micro in enumerate(batch.micro(self.execution.rows(batch.context))):
            self.execution.seed(key_of(self.plan.seed, self.state["step"] + 1, inner, number, self.mesh.rank))
            found = self._terms(micro, self.penalties)
            parts = normalised(found, counts)
            (torch.stack([part for name, part in parts.items() if not found[name].metric]).sum() * scale).backward()
            terms |= found
            for name, part in parts.items():
                sums[name] = sums.get(name, 0.0) + part.detach().double()
        for parameter in self.trained.values():
            if parameter.grad is not None and parameter.grad.is_sparse:  # of an embedding that is not the head as well
                parameter.grad = parameter.grad.to_dense()
        for gradient in self._gradients():
            self.mesh.sum(gradient)
            if scale != 1.0:
                gradient.mul_(1 / scale)
        sums = {name: self.mesh.sum(value) for name, value in sums.items()}
        loss = torch.stack([sums[name] for name, term in terms.items() if reported(term)]).sum()
        others = {name: sums[name] for name, term in terms.items() if not reported(term)}
        return loss, counts, others | self.penalties.pull()

    def _expanded(self, raw: Batch, context: Context) -> Iterator[Batch]:
        """The objective's batches; its code runs without gradients, each time the next batch is asked for."""
        batches = iter(self._learner(raw).expand(raw, context))
        while True:
            with torch.no_grad():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _update(self, step: int, lr: float, batch: Batch, inner: int) -> StepMetrics:
        counts = self._global_counts(batch)
        at_once = len(batch) <= self.execution.rows(batch.context)
        learned = self._recorder(batch, counts, lr) if self._recorder and at_once else None
        loss, others, norm, skipped = learned or self._learn(batch, counts, lr, inner)
        seen = self.state["tokens"] + counts["token"]
        return StepMetrics(step, loss, others, norm, lr, counts["token"], seen, skipped)

    def _learn(self, batch: Batch, counts: Mapping[str, int], lr: float | Tensor, inner: int) -> Learned:
        loss, _, others = self.gradients(batch, inner, counts)
        norm = global_norm(self._gradients())
        skipped = self._overflowed(loss, norm)
        if not skipped:
            self.optimizer.step(lr, self.plan.optim.clip, norm)
        return loss, others, norm, skipped

    def _make_recorder(self) -> Recorder | None:
        """What records an update as a CUDA graph and runs it again, where all that is part of one can be recorded."""
        penalties = self.penalties
        drops = getattr(getattr(self.model, "config", None), "dropout", 1.0) > 0 or len(self.trained) < len(self.named)
        more = penalties.losses or penalties.anchors or self.mesh.size > 1 or not self.optimizer.recordable
        able = self.execution.replay and self.objective.recordable and not drops and not more
        return Recorder(self._learn) if able else None

    def _overflowed(self, loss: Tensor, norm: Tensor) -> bool:
        """fp16: whether the loss scale was too large for this gradient. Adjusts it, and waits for the device.

        Where it is not the scale's fault (the loss itself is broken, or the scale is 1 already), the answer is no, and
        the run stops as it does in any other precision.
        """
        if self.execution.precision != "fp16":
            return False
        state = self.state
        finite = math.isfinite(float(norm))
        overflowed = not finite and state["loss_scale"] > 1 and math.isfinite(float(loss))
        if finite or overflowed:
            scale, steps = loss_scaling.adjusted(state["loss_scale"], state["loss_scale_steps"], finite)
            state["loss_scale"], state["loss_scale_steps"] = scale, steps
        state["skipped_steps"] += overflowed
        return overflowed

    def _terms(self, batch: Batch, penalties: Penalties | None = None) -> dict[str, Term]:
        batch = batch.to(self.execution.device)
        # One shape is compiled, that of nearly all training; others (a rest, an evaluation, rollouts) are too many.
        usual = torch.is_grad_enabled() and (len(batch), batch.context) == self.execution.shape
        with self.execution.forward():
            forward = self._compiled if usual else self.forward_of(self.model)
            out = forward(**batch.inputs, taps=self._learner(batch).taps)
            terms = self._learner(batch).loss(out, batch)
            return terms | penalties.terms(out, batch, self.forward_of) if penalties and not batch.replayed else terms

    def _learner(self, batch: Batch) -> Objective:
        """Whose rows these are."""
        return self.replay if batch.replayed else self.objective

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.trained.values() if p.grad is not None]

    def _global_counts(self, batch: Batch) -> dict[str, int]:
        local = batch.counts()
        summed = self.mesh.sum(torch.tensor(list(local.values()), dtype=torch.int64))
        return dict(zip(local, summed.tolist(), strict=True))

    # -- evaluation ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, dict[str, int], dict[str, float]]:
        """Over all batches together, by the objective's own code: loss, units, and metrics and notes by name.

        Penalties are no part of it. A note counts by the rows of its batch, a `Mean` by those in it.
        """
        sums: dict[str, tuple[Tensor, Term]] = {}
        counts: dict[str, int] = {}
        notes: dict[str, float] = {}
        seen: dict[str, int] = {}
        rows = 0
        with self.judged():
            for raw in batches:
                self.interruptions.check()
                context = self.context(0)
                for batch in self._expanded(raw, context):
                    for unit, n in self._global_counts(batch).items():
                        counts[unit] = counts.get(unit, 0) + n
                    for name, term in self._terms(batch).items():
                        before = sums[name][0] if name in sums else 0
                        sums[name] = (before + term.sum.double(), term)
                rows += len(raw)
                for name, note in context.notes.items():
                    value, weight = note if isinstance(note, Mean) else (float(note), len(raw))
                    notes[name] = notes.get(name, 0.0) + value * weight
                    if isinstance(note, Mean):
                        seen[name] = seen.get(name, 0) + weight
        parts = {n: float(self.mesh.sum(s) * t.weight / max(1, counts[t.unit])) for n, (s, t) in sums.items()}
        loss = sum(part for name, part in parts.items() if reported(sums[name][1]))
        metrics = {name: part for name, part in parts.items() if sums[name][1].metric}
        return loss, counts, metrics | {name: total / seen.get(name, rows) for name, total in notes.items()}

    @torch.no_grad()
    def annotate(self, batch: Batch) -> dict[str, Tensor]:
        """The objective's columns of some rows, before training."""
        return self.objective.annotate(batch, self.context(0))

    @torch.no_grad()
    def conclude(self, batches: Iterable[Batch]) -> dict[str, float]:
        """What the objective has to say of the trained model on held-out rows."""
        with self.judged():
            return self.objective.conclude(batches, self.context(0))

    @contextmanager
    def judged(self) -> Iterator[None]:
        """The model as it is evaluated and handed on: without dropout, and averaged where that is asked for."""
        self.model.eval()
        try:
            with self.average.applied():
                yield
        finally:
            self.model.train(self.objective.dropout)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def tensors(self, moments: bool = True) -> dict[str, Tensor]:
        """Checkpoint names to tensors (shared memory: loading fills the running model).

        What is frozen under an adapter is not among them: it is the model that the stage started from, whose own
        checkpoint holds it. The model of a checkpoint is what it is worth to others: where weights are averaged, the
        average; training's own weights are then among the moments.
        """
        kept = {n: p.detach() for n, p in self.named.items() if n in self.trained or n.startswith("extra.")}
        averages = self.average.tensors()
        out = {f"model.{n}": t for n, t in (kept | averages).items()}
        if moments:
            out |= {f"optim.{n}": t for n, t in self.optimizer.tensors().items()}
            out |= {f"optim.{n}.weight": kept[n] for n in averages}
        return out

    @property
    def unsaved(self) -> bool:
        """Whether it has learned something that no checkpoint holds."""
        return self.state["step"] > self.saved_step

    def save(self) -> None:
        """Write a checkpoint of this moment and drop the oldest."""
        assert set(self.state) == DECLARED, f"undeclared state: {set(self.state) ^ DECLARED}"
        own = set(self.state["objective"]) ^ set(self.objective.fresh)
        assert not own, f"undeclared state of the objective: {own}"
        path = checkpoint_path(self.checkpoints, self.state["step"])
        checkpoint.save(path, self.tensors(), self.state, self.plan.config)
        checkpoint.prune(self.checkpoints, self.plan.loop.keep)
        self.saved_step = self.state["step"]

    def save_best(self) -> None:
        """Write the weights alone, as the best so far."""
        checkpoint.save(self.checkpoints / checkpoint.BEST, self.tensors(moments=False), self.state, self.plan.config)

    def resume(self, say: Callable[[str], None]) -> bool:
        """Go on from the newest good checkpoint, if there is one."""
        path = checkpoint.newest_good(self.checkpoints, say)
        if path is None:
            return False
        self.state = checkpoint.load(path, self.tensors())
        self.saved_step = self.state["step"]
        checkpoint.drop_after(self.checkpoints, self.saved_step)
        return True


def dealt(replay: Batch | None, updates: int) -> list[Batch | None]:
    """Replayed rows over the updates of one pass, so that a pass shows each once, as it does the objective's own."""
    if replay is None or updates == 1:
        return [replay]
    return [replay.take(rows) if len(rows) else None for rows in np.array_split(np.arange(len(replay)), updates)]
