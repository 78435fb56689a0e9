"""Builder of the `train` kind: settings and inputs to an engine, and the engine's numbers to a result."""

import math
import resource
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ingot.core.errors import UserError
from ingot.data.batches import Loader
from ingot.data.packing import BestFit, OnePerRow
from ingot.data.sampler import key_of
from ingot.distributed import mesh
from ingot.model import lora
from ingot.model.config import ModelConfig
from ingot.model.transformer import Transformer, build
from ingot.objectives.replay import Replay
from ingot.optim.groups import counts as decay_counts
from ingot.stages.job import CHOICES, TOKENIZER, Job, read_config
from ingot.stages.models.backend import backend_for
from ingot.stages.models.load import describe, is_bare, load_frozen, load_model, objective_of
from ingot.stages.training.data import Data, open_data, starting_shape
from ingot.stages.training.evaluation import Evaluation
from ingot.stages.training.forecast import training_flops
from ingot.stages.training.penalties import penalties_of
from ingot.stages.training.phases import longest, rows_of_a_draw, timeline
from ingot.stages.training.reference_columns import add_columns
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.timeline import Timeline
from ingot.tokenizer.byte_bpe import Tokenizer, load_tokenizer
from ingot.train.engine import Engine, Plan
from ingot.train.execution import Execution, choose, resumed, write
from ingot.train.loop import train
from ingot.train.metrics import StepMetrics


def run(job: Job) -> dict[str, Any]:
    """Train one model."""
    settings = job.settings
    assert isinstance(settings, TrainSettings)
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path / TOKENIZER)
    before = starting_shape(settings, job.inputs, tokenizer)
    config = longest(settings, before)
    data = open_data(settings, job.roles("data"), before, tokenizer)
    line = timeline(settings, before, data.source_size, job.seed)
    _save_rows(job, data)
    execution = _execution(job, settings, line)
    model = _model(job, settings, config, execution)
    training = {"shape": execution.shape, "flops": training_flops(settings, config, line)}
    model.backend = backend_for(
        model,
        execution.device,
        execution.product_dtype,
        name=execution.backend,
        training=training,
        notify=job.display.say,
    )
    execution = replace(execution, backend=model.backend.name)
    write(job.out / CHOICES, execution)
    plan = Plan(
        steps=line.steps,
        seed=job.seed,
        schedule=line,
        optim=settings.optim,
        loop=settings.loop,
        evaluate_every=settings.evaluate.every,
        config={"model": config.model_dump(), "tokenizer": tokenizer.fingerprint},
        label=lambda step: {"phase": line.phase(step).name} if settings.phases else {},
    )
    companions = _companions(job, settings, model, execution, line.context)
    penalties = penalties_of(job, settings, model, companions)
    objective = objective_of(settings)
    engine = Engine(
        model,
        objective,
        plan,
        execution,
        mesh.current(),
        job.out.path,
        companions,
        penalties,
        tokenizer=tokenizer,
        replay=Replay(),
    )
    describe(job.out.path, config, tokenizer)
    facts = _facts(settings, engine, config, data, line)
    job.display.say(f"{facts['parameters']:,} parameters, {line.steps:,} steps; {execution.line()}")
    words = "{name}: " if settings.phases else ""
    words += "steps {first_step:,} to {last_step:,} of {rows} rows of {context:,}"
    for phase in line.summary():
        job.display.say(words.format(**phase))
    for warmup in line.unfinished_warmups():
        job.display.say(f"a warmup of {warmup:,} steps does not end within them, so the rate never reaches its peak")
    if engine.saved.resume(job.display.say):
        job.display.say(f"going on from step {engine.state['step']:,}")
        job.log.write("resume", after=engine.state["step"])
    else:
        job.log.write("plan", **facts)
        for phase in line.summary():
            job.log.write("phase", **phase)
    _annotate(job, engine, data, line)
    return _loop(job, settings, engine, data, line, tokenizer) | facts


def _save_rows(job: Job, data: Data) -> None:
    """Keep the row index of packed documents, and say what did not fit."""
    for context, sources in data.train.items():
        for source in sources.values():
            if isinstance(source.plan, BestFit):
                source.plan.save(job.out / f"rows-{source.name}-{context}.npz")
                if cut := source.plan.dropped_tokens:
                    told = f"{source.name}: {cut:,} tokens beyond the context of {context} are left out"
                    whole = source.plan.dropped
                    told += f", with {whole:,} documents of which no learned token remained" if whole else ""
                    job.display.say(told)
            elif isinstance(source.plan, OnePerRow) and (dropped := source.plan.dropped):
                what = "pairs with a side" if source.plan.group == 2 else "prompts"
                job.display.say(f"{source.name}: {dropped:,} {what} longer than the context of {context} are left out")


def _execution(job: Job, settings: TrainSettings, line: Timeline) -> Execution:
    """Sized for the longest rows that are trained on, which a model from elsewhere may exceed by far."""
    chosen = choose(settings.loop, settings.precision, line.context, line.largest * rows_of_a_draw(settings))
    execution = resumed(job.out / CHOICES, chosen, settings.loop)
    execution.prepare()
    return execution


def _model(job: Job, settings: TrainSettings, config: ModelConfig, execution: Execution) -> Transformer:
    if "init" in job.inputs:
        path = job.inputs["init"].path
        model = load_model(path, job.display.say, device="cpu", exact=True, context=config.context).model
        model.to(dtype=execution.parameter_dtype)
        if settings.adapter:
            lora.add_adapters(model, settings.adapter, key_of(job.seed, int(job.inputs["init"].key[:15], 16)))
            lora.cast_frozen(model, execution.product_dtype)
        return model.to(execution.device)
    model = build(config, job.seed, dtype=execution.parameter_dtype)  # on the CPU, so every machine starts alike
    return model.to(execution.device)


def _companions(
    job: Job, settings: TrainSettings, model: Transformer, execution: Execution, context: int
) -> dict[str, nn.Module]:
    """The frozen models that the settings name, by role; what lies under an adapter is in memory already.

    Raises:
        UserError: one cannot read rows of that many tokens.
    """
    found: dict[str, nn.Module] = {}
    for role, source in job.roles("companion").items():
        shape = read_config(source.path)
        scores = role in settings.objective.scoring_roles
        if not scores and shape.positions == "learned" and shape.context < context:
            raise UserError(
                f"{role}: '{source.name}' has learned positions for {shape.context:,} tokens, expected {context:,}, as "
                f"many as the longest rows of '{job.name}'; shorten those, or name a model of a longer context"
            )
        if settings.adapter and source.key == job.inputs["init"].key and is_bare(source.path):
            found[role] = lora.reference(model)
        else:
            found[role] = load_frozen(
                source.path, job.display.say, execution.device, execution.parameter_dtype, execution.backend
            )
    return found


def _annotate(job: Job, engine: Engine, data: Data, line: Timeline) -> None:
    """Write what companions say of each row, where the run will see every row; they may go if that is all of it."""
    if not engine.objective.needs.columns:
        return
    epochs = line.epochs(data.source_size)
    own = [source for source in data.longest if not source.replay]
    seen = [source for source in own if epochs[source.name] >= 1]
    parts = [("train", source) for source in seen]
    parts += [("val", source) for source in data.held_out if not source.replay]
    rows = sum(source.plan.rows * source.plan.group for _, source in parts)
    with job.display.bar(f"reading the reference for {job.name}", rows, "rows") as bar:
        for split, source in parts:
            add_columns(engine, source, job.out / "columns" / f"{source.name}-{split}", bar.advance)
    if not engine.objective.needs.companions_after_annotate and len(seen) == len(own):
        engine.companions = {}


def _facts(settings: TrainSettings, engine: Engine, config: ModelConfig, data: Data, line: Timeline) -> dict[str, Any]:
    """What the run is, in numbers known before its first step; of the batch, those of the last step."""
    sampled = engine.objective.needs.samples  # the tokens of a step are known after it
    return {
        "parameters": sum(p.numel() for p in engine.named.values()),
        "trained_parameters": sum(p.numel() for p in engine.trained.values()),
        **decay_counts(engine.named, engine.plan.optim),
        "steps": line.steps,
        "context": config.context,
        "batch_rows": line.rows(line.steps),
        **({} if sampled else _sizes(settings, config, line)),
        "truncated_tokens": sum(s.plan.dropped_tokens for s in data.longest),
        "dropped_documents": sum(s.plan.dropped for s in data.longest),
        "vocab": config.vocab,
        "ln_vocab_nats": math.log(config.vocab),
        "peak_lr": line.peak,
        "warmup_steps": line.curves[0].schedule.warmup,
    }


def _sizes(settings: TrainSettings, config: ModelConfig, line: Timeline) -> dict[str, float]:
    """Tokens of the last step and of all, and what they cost."""
    return {
        "batch_tokens": round(line.rows(line.steps) * line.phase(line.steps).row_targets, 1),
        "planned_tokens": round(line.tokens(line.steps)),
        "training_flops": training_flops(settings, config, line),
    }


def _loop(
    job: Job, settings: TrainSettings, engine: Engine, data: Data, line: Timeline, tokenizer: Tokenizer
) -> dict[str, Any]:
    first = engine.state["step"] + 1
    loader = Loader(lambda step: data.batch(line, step), first, line.steps)
    shares = dict(zip(line.sources, line.shares, strict=True))
    evaluation = Evaluation(job, settings, engine, data, shares, tokenizer)
    try:
        with job.display.bar(f"train {job.name}", line.steps, "steps", done=first - 1) as bar:

            def progress(m: StepMetrics, rate: float) -> None:
                reward = {"reward": f"{m.others['reward']:.3f}"} if "reward" in m.others else {}
                shown = reward | {"loss": f"{float(m.loss):.4f}", "lr": f"{m.lr:.2e}", "tok_s": f"{rate:,.0f}"}
                bar.advance(m.step - bar.done, **shown, **engine.plan.label(m.step))

            final = train(engine, iter(loader), evaluation, job.log, progress, job.display.say)
    finally:
        loader.close()
    on_gpu = engine.execution.device == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    noted = {name: engine.state[name] for name in ("best_step", "skipped_steps")}
    if engine.state["best_val"] is not None:
        noted[f"best_val_{engine.objective.needs.best_metric}"] = engine.state["best_val"]
    return {
        **final,
        **noted,
        "tokens": engine.state["tokens"],
        **{f"epochs/{name}": round(value, 4) for name, value in line.epochs(data.source_size).items()},
        "peak_bytes": peak,
    }
