"""The training step. Pretraining, fine-tuning and every other objective run through `Engine.step`.

A step takes the raw batch of that step, lets the objective expand it (usually to itself), counts the units of the whole
step over all ranks, and runs forward and backward over micro-batches with each loss term divided by its unit's global
count. Gradients are summed and never averaged, so one micro-batch or sixteen, one rank or eight give the same update.
Then it clips by the global norm, sets the learning rate of this step, and updates.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ingot.data.batches import Batch
from ingot.data.sampler import key_of
from ingot.distributed.mesh import Mesh
from ingot.optim import optimizers
from ingot.optim.average import Average
from ingot.optim.groups import global_norm
from ingot.optim.settings import OptimSettings
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train import loss_scaling
from ingot.train.execution import Execution
from ingot.train.metrics import StepMetrics, TermSums, evaluation_means, merge_updates
from ingot.train.objective import Context, Objective, Term, no_grad_batches
from ingot.train.penalties import Penalties
from ingot.train.runner import Runner
from ingot.train.settings import LoopSettings
from ingot.train.signals import Signals
from ingot.train.state import TrainingState

Update = tuple[Tensor, dict[str, Tensor], Tensor, bool]
"""Loss, other numbers by name, gradient norm, and whether the update was skipped."""


class LearningRate(Protocol):
    """A schedule, or several one after another."""

    @property
    def peak(self) -> float: ...

    def lr(self, step: int) -> float: ...


@dataclass(frozen=True)
class Plan:
    """What the engine follows, all derived from the recipe and its inputs before the first step."""

    steps: int
    seed: int
    schedule: LearningRate
    optim: OptimSettings
    loop: LoopSettings
    evaluate_every: int
    config: Mapping[str, Any] = field(default_factory=dict)
    """What a checkpoint says of itself besides its state: the model's shape, the tokenizer."""
    label: Callable[[int], Mapping[str, str]] = lambda step: {}
    """step -> further fields of its log line, such as its phase."""


class Engine:
    """A model, its optimizer, and the state that a checkpoint holds.

    Args:
        companions: frozen models by role, for the objective.
        penalties: terms and anchors that no objective knows.
        tokenizer: of the ids; None where a model is trained on ids alone.
        replay: the objective of replayed rows.
    """

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
    ):
        self.model, self.objective, self.plan = model.train(objective.needs.dropout), objective, plan
        self.companions, self.penalties = companions or {}, penalties or Penalties()
        self.tokenizer, self.replay = tokenizer, replay or objective
        self.execution, self.mesh, self.runner = execution, mesh, Runner(execution)
        torch.manual_seed(plan.seed)  # the initial weights of the objective's modules
        self.modules = nn.ModuleDict(objective.modules(model)).to(execution.device, execution.parameter_dtype)
        self.named = dict(model.named_parameters()) | {f"extra.{n}": p for n, p in self.modules.named_parameters()}
        self.trained = {n: p for n, p in self.named.items() if p.requires_grad}
        self.optimizer = optimizers.build(self.trained, plan.optim, plan.schedule.peak)
        self.average = Average(self.trained, plan.optim.ema)
        initial, keep = objective.needs.initial_state, plan.loop.keep
        self.saved = TrainingState(directory, self.named, self.optimizer, self.average, initial, keep, plan.config)
        self.state = self.saved.numbers
        if execution.precision == "fp16":
            self.state["loss_scale"] = loss_scaling.INITIAL_SCALE
        self.signals = Signals(lambda: self.saved.unsaved)
        self._context = self.context(1)
        self._recorder = self._make_recorder()

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self, raw: Batch) -> StepMetrics:
        """Train on the batch of the next step."""
        step = self.state["step"] + 1
        lr = self.plan.schedule.lr(step)
        self._context = context = self.context(step)
        expanded = self._expand(replace(raw, replay=None), context)
        replay = split_replay(raw.replay, self.objective.needs.updates_per_pass)
        updates = []
        for inner, batch in enumerate(expanded):
            updates.append(self._update(step, lr, replace(batch, replay=replay[inner % len(replay)]), inner))
        assert updates, "expand yielded no batch"
        if raw.replay is not None:
            replayed = self._global_counts(raw)["replay_token"] * len(updates) / len(replay)
            context.notes["replay_fraction"] = replayed / (replayed + sum(u.tokens for u in updates))
        metrics = merge_updates(updates, context.notes)
        self.average.update(step)
        self.state["step"], self.state["tokens"] = step, metrics.tokens_seen
        return metrics

    def context(self, step: int) -> Context:
        """What the objective may use; an evaluation's (step 0) does not change the objective's state."""
        state = self.state["objective"]
        return Context(
            step,
            self.plan.seed,
            self.model,
            self.execution,
            self.runner,
            self.companions,
            dict(self.modules.items()),
            state=state if step else dict(state),
            tokenizer=self.tokenizer,
            sum_over_ranks=self.mesh.sum,
        )

    def gradients(
        self, batch: Batch, inner: int = 0, counts: Mapping[str, int] | None = None
    ) -> tuple[Tensor, Mapping[str, int], dict[str, Tensor]]:
        """Leave the gradient of the whole batch in `.grad`.

        Dropout is seeded anew for each forward pass by (seed, step, update, micro-batch, rank), so a resumed run draws
        the same.

        Returns:
            The loss, the global counts of units, and penalties and metrics by name.
        """
        counts, scale = counts or self._global_counts(batch), self.state["loss_scale"]
        key = self.plan.seed, self.state["step"] + 1, inner
        sums = TermSums(counts)

        def loss(out: Any, rows: Batch) -> Tensor:
            terms = self._terms(out, rows, self._context)
            if not rows.replayed:
                terms |= self.penalties.terms(out, rows)
            return sums.add(terms) * scale

        self.optimizer.clear()
        self.runner.learn(self.model, batch, loss, self._taps, lambda number: key_of(*key, number, self.mesh.rank))
        for gradient in self._gradients():
            self.mesh.sum(gradient)
            if scale != 1.0:
                gradient.mul_(1 / scale)
        total, others = sums.read(self.mesh.sum)
        return total, counts, others | self.penalties.pull()

    def _expand(self, raw: Batch, context: Context) -> Iterator[Batch]:
        with torch.no_grad():
            batches = iter(self._objective_of(raw).expand(raw, context))
        return no_grad_batches(batches)

    def _update(self, step: int, lr: float, batch: Batch, inner: int) -> StepMetrics:
        counts = self._global_counts(batch)
        one_pass = len(batch) <= self.execution.rows(batch.context)
        recorded = self._recorder(batch, counts, lr) if self._recorder and one_pass else None
        loss, others, norm, skipped = recorded or self._learn(batch, counts, lr, inner)
        tokens_seen = self.state["tokens"] + counts["token"]
        return StepMetrics(step, loss, others, norm, lr, counts["token"], tokens_seen, skipped)

    def _learn(self, batch: Batch, counts: Mapping[str, int], lr: float | Tensor, inner: int) -> Update:
        loss, _, others = self.gradients(batch, inner, counts)
        norm = global_norm(self._gradients())
        skipped = self._overflowed(loss, norm)
        if not skipped:
            self.optimizer.step(lr, self.plan.optim.clip, norm)
        return loss, others, norm, skipped

    def _make_recorder(self) -> Callable[..., Update | None] | None:
        """The backend's recorder of whole updates, where everything in an update can be recorded."""
        backend = getattr(self.model, "backend", None)
        random = getattr(getattr(self.model, "config", None), "dropout", 1.0) > 0 or len(self.trained) < len(self.named)
        penalties = self.penalties.losses or self.penalties.anchors
        fixed = self.objective.needs.capturable and self.optimizer.capturable and self.mesh.size == 1
        if backend is None or random or penalties or not (fixed and self.execution.replay):
            return None
        return backend.recorder(self._learn)

    def _overflowed(self, loss: Tensor, norm: Tensor) -> bool:
        """fp16: whether the loss scale was too large for this gradient. Adjusts it, and waits for the device.

        If the scale is not the cause (the loss itself is not finite, or the scale is 1), the answer is no, and the run
        stops as in any other precision.
        """
        if self.execution.precision != "fp16":
            return False
        state = self.state
        finite = math.isfinite(float(norm))
        overflowed = not finite and state["loss_scale"] > 1 and math.isfinite(float(loss))
        if finite or overflowed:
            scale, steps = loss_scaling.adjust(state["loss_scale"], state["loss_scale_steps"], finite)
            state["loss_scale"], state["loss_scale_steps"] = scale, steps
        state["skipped_steps"] += overflowed
        return overflowed

    def _terms(self, out: Any, batch: Batch, context: Context) -> dict[str, Term]:
        return self._objective_of(batch).loss(out, batch, context)

    def _objective_of(self, batch: Batch) -> Objective:
        return self.replay if batch.replayed else self.objective

    def _taps(self, batch: Batch) -> frozenset[str]:
        return self._objective_of(batch).needs.taps

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

        Penalties are left out. A note counts by the rows of its batch, a `Mean` by those in it.
        """
        terms: dict[str, Term] = {}
        counts: dict[str, int] = {}
        notes: list[tuple[int, Mapping[str, Any]]] = []
        with self.eval_mode():
            for raw in batches:
                self.signals.check()
                context = self.context(0)
                for batch in self._expand(raw, context):
                    for unit, n in self._global_counts(batch).items():
                        counts[unit] = counts.get(unit, 0) + n
                    rows = batch.to(self.execution.device)
                    with self.execution.forward():
                        found = self._terms(self.runner.forward(self.model, rows, self._taps(rows)), rows, context)
                    for name, term in found.items():
                        before = terms[name].sum if name in terms else 0
                        terms[name] = replace(term, sum=before + term.sum.double())
                notes.append((len(raw), context.notes))
        loss, metrics = evaluation_means(terms, counts, notes, self.mesh.sum)
        return loss, counts, metrics

    @torch.no_grad()
    def annotate(self, batch: Batch) -> dict[str, Tensor]:
        """The objective's columns of some rows, before training."""
        return self.objective.annotate(batch, self.context(0))

    @torch.no_grad()
    def conclude(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The objective's numbers of the trained model on held-out rows."""
        with self.eval_mode():
            return self.objective.conclude(batches, self.context(0))

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """The model as it is evaluated and saved: without dropout, and averaged where weights are averaged."""
        self.model.eval()
        try:
            with self.average.applied():
                yield
        finally:
            self.model.train(self.objective.needs.dropout)


def split_replay(replay: Batch | None, updates: int) -> list[Batch | None]:
    """Replayed rows over the updates of one pass, so that a pass shows each once, as it does the objective's own."""
    if replay is None or updates == 1:
        return [replay]
    return [replay.take(rows) if len(rows) else None for rows in np.array_split(np.arange(len(replay)), updates)]
