"""Builder of the `train` kind: settings and inputs to an engine, and the engine's numbers to a result."""

import importlib
import math
import resource
from typing import Any

import numpy as np
import torch

from ingot.data.batches import Loader, Source, all_rows
from ingot.data.packing import BestFit
from ingot.dist import mesh
from ingot.infer.generate import generate
from ingot.model.settings import ModelConfig
from ingot.model.transformer import Transformer, build
from ingot.objectives.settings import OBJECTIVES
from ingot.optim.groups import counts as decay_counts
from ingot.optim.schedule import Schedule, schedule
from ingot.plan.flops import training_flops_per_token
from ingot.stages.job import Job
from ingot.stages.load import describe, load_model
from ingot.stages.mixture import Data, batch_rows, open_data
from ingot.stages.settings import TrainSettings
from ingot.stages.text import TOKENIZER
from ingot.text.chat import stop_ids
from ingot.text.tokenizer import Tokenizer, load_tokenizer
from ingot.train.api import Objective
from ingot.train.duration import Duration
from ingot.train.engine import Engine, Plan, StepMetrics, train
from ingot.train.execution import Execution, choose, remembered
from ingot.train.settings import MICRO_TOKENS


def run(job: Job) -> dict[str, Any]:
    """Train one model."""
    settings = job.settings
    assert isinstance(settings, TrainSettings)
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path / TOKENIZER)
    config, model, execution = _model(job, settings, tokenizer)
    data = open_data(settings, job.roles("data"), config.context, tokenizer)
    for source in data.train:
        if isinstance(source.plan, BestFit):
            source.plan.save(job.out / f"rows-{source.name}.npz")
            if cut := source.plan.dropped_tokens:
                job.display.say(f"{source.name}: {cut:,} tokens beyond the context of {config.context} are left out")
    batch = batch_rows(settings, config)
    parameters = sum(p.numel() for p in model.parameters())
    steps = Duration.parse(settings.duration).steps(
        batch_tokens=batch * data.row_targets, epoch_tokens=data.epoch_targets, parameters=parameters
    )
    plan = Plan(
        steps=steps,
        seed=job.seed,
        schedule=_schedule(settings, config, steps),
        optim=settings.optim,
        loop=settings.loop,
        evaluate_every=settings.evaluate.every,
        config={"model": config.model_dump(), "tokenizer": tokenizer.fingerprint},
    )
    objective = _objective(settings)
    engine = Engine(model, objective, plan, execution, mesh.current(), job.out.path)
    describe(job.out.path, config, tokenizer)
    facts = _facts(engine, config, data, batch)
    job.display.say(
        f"{parameters:,} parameters, {steps:,} steps of {facts['batch_tokens']:,.0f} tokens; {execution.line()}"
    )
    if engine.resume(job.display.say):
        job.display.say(f"going on from step {engine.state['step']:,}")
        job.log.write("resume", after=engine.state["step"])
    else:
        job.log.write("plan", **facts)
    return _loop(job, settings, engine, data, batch, tokenizer) | facts


def _execution(job: Job, settings: TrainSettings, config: ModelConfig) -> Execution:
    fresh = choose(settings.loop, settings.precision, config.context, batch_rows(settings, config))
    execution = remembered(job.out / "execution.json", fresh, settings.loop)
    torch.set_num_threads(execution.threads)
    return execution


def _model(job: Job, settings: TrainSettings, tokenizer: Tokenizer) -> tuple[ModelConfig, Transformer, Execution]:
    if "init" in job.inputs:
        start = load_model(job.inputs["init"].path, job.display.say, device="cpu", exact=True)
        execution = _execution(job, settings, start.config)
        return start.config, start.model.to(execution.device, execution.parameter_dtype), execution
    assert settings.model
    config = settings.model.resolve(tokenizer.vocab)
    execution = _execution(job, settings, config)
    model = build(config, job.seed, dtype=execution.parameter_dtype)  # on the CPU, so every machine starts alike
    return config, model.to(execution.device), execution


def _objective(settings: TrainSettings) -> Objective:
    module, name = OBJECTIVES[settings.objective.kind].builder.split(":")
    return getattr(importlib.import_module(module), name)(**{k: v for k, v in settings.objective if k != "kind"})


def _schedule(settings: TrainSettings, config: ModelConfig, steps: int) -> Schedule:
    return schedule(settings.optim, steps, config.width, tuned=settings.init is not None)


def _facts(engine: Engine, config: ModelConfig, data: Data, batch: int) -> dict[str, Any]:
    """What the run is, in numbers known before its first step."""
    return {
        "parameters": sum(p.numel() for p in engine.named.values()),
        **decay_counts(engine.named, engine.plan.optim),
        "steps": engine.plan.steps,
        "context": config.context,
        "batch_rows": batch,
        "batch_tokens": round(batch * data.row_targets, 1),
        "training_flops": training_flops_per_token(config) * batch * config.context * engine.plan.steps,
        "truncated_tokens": sum(s.plan.dropped_tokens for s in data.train),
        "vocab": config.vocab,
        "ln_vocab_nats": math.log(config.vocab),
        "peak_lr": engine.plan.schedule.peak,
        "warmup_steps": engine.plan.schedule.warmup,
    }


def _loop(
    job: Job, settings: TrainSettings, engine: Engine, data: Data, batch: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    order = data.order(batch, job.seed)
    steps, first = engine.plan.steps, engine.state["step"] + 1
    loader = Loader(data.train, order, first, steps)
    evaluation = _Evaluation(job, settings, engine, data, tokenizer)
    try:
        with job.display.bar(f"train {job.name}", steps, "steps", done=first - 1) as bar:

            def progress(m: StepMetrics, rate: float) -> None:
                bar.advance(m.step - bar.done, loss=f"{float(m.loss):.4f}", lr=f"{m.lr:.2e}", tok_s=f"{rate:,.0f}")

            final = train(engine, iter(loader), evaluation, job.log, progress)
    finally:
        loader.close()
    on_gpu = engine.execution.device == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    best = {"best_step": engine.state["best_step"], "best_val_loss_nats": engine.state["best_val_loss_nats"]}
    rounds = zip(data.train, order.epochs(steps), strict=True)
    epochs = {s.name: n * s.plan.rows * s.plan.row_targets / s.plan.targets for s, n in rounds}
    return {
        **final,
        **best,
        "tokens": engine.state["tokens"],
        **{f"epochs/{name}": round(value, 4) for name, value in epochs.items()},
        "peak_bytes": peak,
    }


class _Evaluation:
    """Held-out loss of every source, the training loss beside it, and a sample."""

    def __init__(self, job: Job, settings: TrainSettings, engine: Engine, data: Data, tokenizer: Tokenizer):
        self.job, self.settings, self.engine, self.data, self.tokenizer = job, settings, engine, data, tokenizer

    def __call__(self, step: int, whole: bool) -> dict[str, float]:
        numbers, bits = self._losses(self.data.held_out, "val_loss_nats", whole)
        if whole:
            return numbers | bits
        numbers |= self._losses(self.data.train, "train_loss_nats", whole=False)[0]
        if self.settings.evaluate.sample is not False:
            self.job.log.write("sample", step=step, **self._sample(step))
        return numbers

    def _losses(self, sources: list[Source], what: str, whole: bool) -> tuple[dict[str, float], dict[str, float]]:
        """Loss by source and their mean by share; bits per byte where every token is predicted."""
        losses, bits = {}, {}
        for source in sources:
            limit = None if whole else max(1, round(self.settings.evaluate.tokens / source.plan.row_targets))
            loss, counts = self.engine.evaluate(all_rows(source, max(1, MICRO_TOKENS // self._context()), limit=limit))
            losses[source.name] = loss
            if whole and counts["token"] == source.store.tokens - 1:  # all but the first token were predicted
                bits[f"bits_per_byte/{source.name}"] = loss * counts["token"] / math.log(2) / source.store.bytes
        mean = float(np.average(list(losses.values()), weights=self.data.shares))
        by_source = {f"{what}/{name}": loss for name, loss in losses.items()} if len(losses) > 1 else {}
        if len(sources) == 1 and bits:
            bits = {"bits_per_byte": next(iter(bits.values()))}
        return {what: mean, **by_source}, bits

    def _sample(self, step: int) -> dict[str, str]:
        prompt, shown = self._prompt()
        (completion,) = generate(
            self.engine.model,  # type: ignore[arg-type]
            [prompt],
            max_new=min(self.settings.evaluate.sample_tokens, self._context() - len(prompt)),
            temperature=0.8,
            stop=frozenset(stop_ids(self.tokenizer)),
            seed=self.job.seed,
            step=step,
        )
        return {"prompt": shown, "text": self.tokenizer.decode(completion.ids)}

    def _prompt(self) -> tuple[np.ndarray, str]:
        """The set prompt; where the stage trains on conversations, the first held-out question."""
        source = next((s for s in self.data.held_out if "mask" in s.store.columns), None)
        if source is not None:
            end = int(source.store.ends[0])
            first = int(np.argmax(source.store.columns["mask"].read(0, end) != 0))
            ids = source.store.ids.read(0, first)[-self._context() // 2 :]
            return ids, self.tokenizer.decode(ids)
        text = self.settings.evaluate.sample or ""
        start = [] if self.tokenizer.eot is None else [self.tokenizer.eot]
        ids = [*start, *self.tokenizer.encode(text)] or self.data.held_out[0].store.ids.read(0, 1).tolist()
        return np.array(ids[: self._context() // 2], np.int64), text

    def _context(self) -> int:
        return int(self.engine.model.config.context)  # type: ignore[union-attr]
