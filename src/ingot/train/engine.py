"""The training step. Pretraining, fine-tuning and every other objective run through `Engine.step`.

A step lets the objective expand the raw batch (usually to itself), counts the units of the batch over all ranks, and
runs forward and backward passes over micro-batches with each loss term divided by the global count of its unit.
Gradients are summed, never averaged, so the update does not depend on the number of micro-batches or ranks. Then the
step clips by the global norm and updates the weights with the learning rate of the step.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from ingot.distributed.sharding import regroup
from ingot.optim import optimizers
from ingot.optim.average import Average
from ingot.optim.settings import OptimSettings
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train import bit_flips, loss_scaling
from ingot.train.bit_flips import BitFlips
from ingot.train.execution import Execution
from ingot.train.guard import Guard
from ingot.train.metrics import Evaluated, StepMetrics, TermSums, evaluation_means, merge_updates
from ingot.train.objective import Context, Objective, Term, no_grad_batches
from ingot.train.penalties import Penalties
from ingot.train.runner import Dealer, Runner
from ingot.train.settings import LoopSettings
from ingot.train.signals import Signals
from ingot.train.state import TrainingState
from ingot.train.weights import Weights

Update = tuple[Tensor, dict[str, Tensor], Tensor, Tensor]
"""Loss, penalties and metrics by name, gradient norm before clipping, whether the update was skipped."""


class LearningRate(Protocol):
    """A schedule, or a sequence of schedules."""

    @property
    def peak(self) -> float: ...

    def lr(self, step: int) -> float: ...


@dataclass(frozen=True)
class Plan:
    """The plan of a run, derived from the recipe and its inputs before the first step."""

    steps: int
    seed: int
    schedule: LearningRate
    optim: OptimSettings
    loop: LoopSettings
    evaluate_every: int
    config: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of checkpoints: the model's shape, the tokenizer."""
    label: Callable[[int], Mapping[str, str]] = lambda step: {}
    """step -> additional fields of its log line, such as its phase."""
    guard: bool = True
    """Whether updates that would do damage are skipped (`train/guard.py`)."""
    phases: frozenset[int] = frozenset()
    """First steps of phases, whose losses may jump."""
    documents: Callable[[int], Sequence[str]] = lambda step: ()
    """step -> the documents in its batch."""
    work: Callable[[int], float] = float
    """step -> the work of all steps up to it, in a unit that takes equally long in every step, as rows x context do."""


class Engine:
    """Trains a model: owns the optimizer and the training state.

    Args:
        companions: frozen models by role, for the objective.
        penalties: loss terms and anchors in addition to the objective's.
        tokenizer: None if a model is trained on ids alone.
        replay: objective of replayed rows; None: that of the others.
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
        self.companions, self.penalties = companions or {}, penalties or Penalties()
        objective = objective.for_models(model, self.companions)
        self.model, self.objective, self.plan = model.train(objective.needs.dropout), objective, plan
        self.tokenizer, self.replay = tokenizer, replay or objective
        self.execution, self.mesh = execution, mesh
        self.runner, self.dealer = Runner(execution, mesh), Dealer(execution, mesh)
        torch.manual_seed(plan.seed)  # for the initial weights of the objective's modules
        self.modules = nn.ModuleDict(objective.modules(model)).to(execution.device, execution.parameter_dtype)
        self.named = dict(model.named_parameters()) | {f"extra.{n}": p for n, p in self.modules.named_parameters()}
        self.weights = Weights(self.named, mesh)
        self.trained = self.weights.trained
        if self.weights.shards:
            self.penalties = self.penalties.on_parts(self.weights.local, self.weights.shards[1])
        self.optimizer = optimizers.build(self.weights.local, plan.optim, plan.schedule.peak, self.weights.shards)
        self.average = Average(self.weights.local, plan.optim.ema)
        self.guard = Guard(plan.guard, objective.needs.loss_is_nll, execution.device)
        initial, keep = objective.needs.initial_state, plan.loop.keep
        self.training_state = TrainingState(
            directory,
            self.named,
            self.optimizer,
            self.average,
            initial,
            keep,
            plan.config,
            plan.steps,
            mesh,
            guard=self.guard,
            keep_every=plan.loop.keep_every,
            background=execution.device != "cpu",  # on a CPU, the writer would take cores from training
        )
        self.state = self.training_state.numbers
        if execution.precision == "fp16":
            self.state["loss_scale"] = loss_scaling.INITIAL_SCALE
        averages = {f"model.{n}" for n in self.average.tensors()}
        self.bit_flips = BitFlips(
            plan.guard,
            updated=lambda: {n: t for n, t in self._watched() if n not in averages},
            averages=lambda: {n: t for n, t in self._watched() if n in averages},
            frozen=self._frozen,
            tokens=bit_flips.TOKENS_APART[execution.device.partition(":")[0]],
        )
        self.signals = Signals(lambda: self.training_state.unsaved, mesh.any)
        self._context = self.context(1)
        self._recorder = self._make_recorder()
        if self._recorder:
            self.bit_flips.steps_apart = bit_flips.RECORDED_STEPS

    def release_companions(self) -> None:
        """Free the memory of frozen models that no step reads."""
        self.companions = {}
        self._context = self.context(1)

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self, raw: Batch) -> StepMetrics:
        """Run the next step on its batch.

        Args:
            raw: this rank's share of the rows; all rows if the objective needs the whole step.
        """
        step = self.state["step"] + 1
        lr = self.plan.schedule.lr(step)
        if step in self.plan.phases:
            self.guard.forget()
        self.bit_flips.begin(step)
        self._context = context = self.context(step)
        expanded = self._expand(replace(raw, replay=None), context)
        replay = split_replay(raw.replay, self.objective.needs.updates_per_pass)
        updates = []
        for inner, batch in enumerate(expanded):
            updates.append(self._update(step, lr, replace(batch, replay=replay[inner % len(replay)]), inner))
        assert updates, "expand yielded no batch"
        if raw.replay is not None:
            counts = raw.counts() if self.objective.needs.whole_step else self._global_counts(raw)
            replayed = counts["replay_token"] * len(updates) / len(replay)
            context.metrics["replay_fraction"] = replayed / (replayed + sum(u.tokens for u in updates))
        metrics = merge_updates(updates, context.metrics)
        with self.bit_flips.averaging():
            self.average.update(step, metrics.lost)
        self.state["step"], self.state["tokens"] = step, metrics.tokens_seen
        return replace(metrics, checks=self.bit_flips.end(metrics.tokens // self.mesh.size))

    def context(self, step: int, whole_rows: bool | None = None) -> Context:
        """The objective's context. Step 0 is an evaluation, which gets a copy of the objective's state.

        Args:
            whole_rows: whether all ranks have the rows of the batches alike; None: as in a step.
        """
        state = self.state["objective"]
        alike = self.objective.needs.whole_step if whole_rows is None else whole_rows
        return Context(
            step,
            self.plan.seed,
            self.model,
            self.execution,
            self.dealer if alike else self.runner,
            self.companions,
            dict(self.modules.items()),
            state=state if step else dict(state),
            tokenizer=self.tokenizer,
            sum_over_ranks=self.mesh.sum,
        )

    def gradients(
        self, batch: Batch, inner: int = 0, counts: Mapping[str, int] | None = None
    ) -> tuple[Tensor, Mapping[str, int], dict[str, Tensor]]:
        """Compute the gradient of the batch over all ranks, in `.grad`.

        Each forward pass seeds dropout with a hash of (seed, step, update, micro-batch, rank), so a resumed run draws
        the same numbers.

        Args:
            inner: number of the update within the step, from 0.
            counts: global counts of units; None: computed.

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

        self.weights.clear()
        self.runner.backward(self.model, batch, loss, self._taps, lambda number: key_of(*key, number, self.mesh.rank))
        self.weights.collect(scale)
        total, others = sums.read(self.mesh.sum)
        return total, counts, others | self.penalties.add_gradients(self.mesh.sum_of_shards)

    def _expand(self, raw: Batch, context: Context) -> Iterator[Batch]:
        with torch.no_grad():
            batches = iter(self._objective_of(raw).expand(raw, context))
        return no_grad_batches(batches)

    def _update(self, step: int, lr: float, batch: Batch, inner: int) -> StepMetrics:
        if self.objective.needs.whole_step:
            batch = batch.share(self.mesh.rank, self.mesh.size)
        counts = self._global_counts(batch)
        one_micro_batch = len(batch) <= self.execution.rows(batch.context)
        replays = one_micro_batch and not self.bit_flips.watching
        replayed = self._recorder(batch, counts, lr) if self._recorder and replays else None
        loss, others, norm, skipped = replayed or self._compute_update(batch, counts, lr, inner)
        self.bit_flips.after_update()
        tokens_seen = self.state["tokens"] + counts["token"]
        return StepMetrics(step, loss, others, norm, lr, counts["token"], tokens_seen, skipped)

    def _compute_update(self, batch: Batch, counts: Mapping[str, int], lr: float | Tensor, inner: int) -> Update:
        loss, _, others = self.gradients(batch, inner, counts)
        self.bit_flips.before_update()
        norm = self.weights.norm()
        skipped = self.guard.rejects(loss, norm, batch.is_sampled) | self._overflowed(loss, norm)
        regroup(self.model)
        self.optimizer.step(lr, self.plan.optim.clip, norm, skipped)
        return loss, others, norm, skipped

    def _watched(self) -> Iterator[tuple[str, Tensor]]:
        """The trained tensors, without counts that an optimizer keeps on the host and the losses of the guard."""
        tensors = self.training_state.tensors().items()
        return ((n, t) for n, t in tensors if self._is_on_device(t) and not n.startswith("guard."))

    def _frozen(self) -> dict[str, Tensor]:
        """The weights on the device that are not trained, each once: a reference may share those of the model."""
        models = {"model": self.named} | {role: dict(m.named_parameters()) for role, m in self.companions.items()}
        named = {p: f"{role}.{n}" for role, model in reversed(models.items()) for n, p in model.items()}
        return {n: p for p, n in named.items() if not p.requires_grad and self._is_on_device(p)}

    def _is_on_device(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.execution.device.partition(":")[0]

    def _make_recorder(self) -> Callable[..., Update | None] | None:
        """The backend's graph recorder, or None if an update of this run cannot be captured."""
        backend = getattr(self.model, "backend", None)
        dropout = getattr(getattr(self.model, "config", None), "dropout", 1.0) > 0
        frozen = len(self.trained) < len(self.named)
        penalties = self.penalties.losses or self.penalties.anchors
        capturable = self.objective.needs.capturable and self.optimizer.capturable and self.mesh.size == 1
        if backend is None or dropout or frozen or penalties or not (capturable and self.execution.cuda_graphs):
            return None
        return backend.recorder(self._compute_update)

    def _overflowed(self, loss: Tensor, norm: Tensor) -> bool:
        """Whether the loss scale made this gradient overflow in fp16. Adjusts the scale; waits for the device.

        False if the scale is not the cause: the loss itself is not finite, or the scale is 1.
        """
        if self.execution.precision != "fp16":
            return False
        state, finite = self.state, math.isfinite(norm)
        overflowed = not finite and state["loss_scale"] > 1 and math.isfinite(loss)
        if finite or overflowed:
            scale, steps = loss_scaling.adjust(state["loss_scale"], state["loss_scale_steps"], finite)
            state["loss_scale"], state["loss_scale_steps"] = scale, steps
        return overflowed

    def _terms(self, out: Any, batch: Batch, context: Context) -> dict[str, Term]:
        return self._objective_of(batch).loss(out, batch, context)

    def _objective_of(self, batch: Batch) -> Objective:
        return self.replay if batch.replayed else self.objective

    def _taps(self, batch: Batch) -> frozenset[str]:
        return self._objective_of(batch).needs.taps

    def _global_counts(self, batch: Batch) -> dict[str, int]:
        local = batch.counts()
        summed = self.mesh.sum(torch.tensor(list(local.values()), dtype=torch.int64))
        return dict(zip(local, summed.tolist(), strict=True))

    # -- evaluation ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Evaluated:
        """The loss and the metrics of all batches, which all ranks have alike.

        Penalties are excluded. `Context.metrics` are weighted by the rows of their batch, a `Mean` by its own rows.
        """
        terms: dict[str, Term] = {}
        counts: Counter[str] = Counter()
        batch_metrics: list[tuple[int, Mapping[str, Any]]] = []
        parts: list[tuple[dict[str, Term], dict[str, int]]] = []  # read at the end: reading one waits for the device
        with self.eval_mode():
            for raw in batches:
                self.signals.check()
                context, whole_step = self.context(0), self.objective.needs.whole_step
                share = self.mesh.rank, self.mesh.size
                for batch in self._expand(raw if whole_step else raw.share(*share), context):
                    batch = batch.share(*share) if whole_step else batch
                    batch_counts = self._global_counts(batch)
                    counts.update(batch_counts)
                    rows = batch.to(self.execution.device)
                    with self.execution.forward():
                        out = self.runner.forward(self.model, rows, self._taps(rows))
                        batch_terms = self._terms(out, rows, context)
                    for name, term in batch_terms.items():
                        before = terms[name].sum if name in terms else 0
                        terms[name] = replace(term, sum=before + term.sum.double())
                    parts.append((batch_terms, batch_counts))
                batch_metrics.append((len(raw), context.metrics))
        loss, metrics = evaluation_means(terms, counts, batch_metrics, self.mesh.sum)
        best = self.objective.needs.best_metric
        values = [evaluation_means(*part, (), self.mesh.sum)[0] for part in parts]
        if self.objective.needs.samples:
            values = [value for _, m in batch_metrics if best in m for value in m[best].each]
        return Evaluated(loss, dict(counts), metrics, values, sum(n for n, _ in batch_metrics))

    @torch.no_grad()
    def annotate(self, batch: Batch) -> dict[str, Tensor]:
        """The objective's columns of some rows, computed before training."""
        return self.objective.annotate(batch, self.context(0, whole_rows=True))

    @torch.no_grad()
    def final_metrics(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The objective's additional metrics of the trained model on validation rows."""
        with self.eval_mode():
            return self.objective.final_metrics(batches, self.context(0, whole_rows=True))

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Context in which the model has no dropout and, with `optim.ema`, the averaged weights."""
        self.model.eval()
        try:
            regroup(self.model)
            with self.average.applied():
                yield
                regroup(self.model)
        finally:
            self.model.train(self.objective.needs.dropout)


def split_replay(replay: Batch | None, updates: int) -> list[Batch | None]:
    """Split replayed rows over the updates of a pass, so that a pass uses each row once, like the objective's rows."""
    if replay is None or updates == 1:
        return [replay]
    return [replay.take(rows) if len(rows) else None for rows in np.array_split(np.arange(len(replay)), updates)]
