"""Builder of the kind `train`: creates the engine from settings and inputs, and trains."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ingot.core.errors import UserError
from ingot.core.events import METRICS, read_events
from ingot.core.process import peak_memory_bytes
from ingot.data.batches import Batch, Loader
from ingot.data.packing import BestFit, OnePerRow
from ingot.data.sampler import key_of
from ingot.distributed import mesh
from ingot.model import lora
from ingot.model.backend import TORCH, Backend
from ingot.model.config import ModelConfig
from ingot.model.transformer import Transformer, take_layers
from ingot.objectives.replay import Replay
from ingot.optim.groups import decay_counts
from ingot.stages.job import EXECUTION_FILE, TOKENIZER, Job, read_config
from ingot.stages.models.backend import backend_for
from ingot.stages.models.load import build_objective, companion_is_model, load_frozen, load_model, save_description
from ingot.stages.models.parts import build_on, shard_model
from ingot.stages.training.annotate import add_stored
from ingot.stages.training.data import Data, initial_config, open_data, unseen_start
from ingot.stages.training.earlier_run import go_on
from ingot.stages.training.evaluation import Evaluation
from ingot.stages.training.forecast import slow_backend, training_flops
from ingot.stages.training.initial_layers import initial_layers
from ingot.stages.training.penalties import build_penalties
from ingot.stages.training.phases import build_timeline, rows_per_draw, trained_config
from ingot.stages.training.prediction import predict
from ingot.stages.training.reference_columns import add_columns
from ingot.stages.training.settings import TrainSettings
from ingot.stages.training.timeline import Timeline, overshoot
from ingot.stages.training.trace import documents
from ingot.tokenizer.byte_bpe import Tokenizer, load_tokenizer
from ingot.train.engine import Engine, Plan
from ingot.train.execution import Execution, choose, resolve_device, resumed, write
from ingot.train.loop import train
from ingot.train.metrics import StepMetrics
from ingot.train.penalty_settings import ANCHORS
from ingot.train.throughput import Throughput
from ingot.train.verdict import Training, mean_reward, parts_by_corpus, verdict


def run(job: Job) -> dict[str, Any]:
    """Train one model."""
    settings = job.settings
    assert isinstance(settings, TrainSettings)
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path / TOKENIZER)
    initial = initial_config(settings, job.inputs, tokenizer)
    config = trained_config(settings, initial)
    data = open_data(settings, job.roles("data"), initial, tokenizer)
    for stored in job.roles("stored").values():
        add_stored(stored, {"train": data.train_sources, "val": data.held_out})
    timeline = build_timeline(settings, initial, data.source_size, job.seed)
    device = resolve_device(settings.loop.device, "loop.device")
    ranks = mesh.current(settings.mesh.shards(mesh.current().size), settings.mesh.zero, device)
    if ranks.leads:
        _save_rows(job, data)
    chosen = _chosen_execution(settings, timeline, ranks)
    earlier = go_on(job, config, data, timeline, chosen.micro_batch) if ranks.leads else {}
    if "init" not in job.inputs and (message := unseen_start(tokenizer, data)):
        job.display.notify(message)
    fresh = not (job.out / EXECUTION_FILE).exists()  # neither resumed nor tuned
    execution = _execution(job, settings, chosen, ranks)
    ranks = replace(ranks, gathered=execution.product_dtype)
    model = _model(job, settings, config, execution, ranks)
    model.checkpointing = settings.loop.checkpointing
    execution = _select_backend(job, settings, model, execution, training_flops(settings, config, timeline), ranks)
    if ranks.leads:
        write(job.out / EXECUTION_FILE, execution)
    plan = Plan(
        steps=timeline.steps,
        seed=job.seed,
        schedule=timeline,
        optim=settings.optim,
        loop=settings.loop,
        evaluate_every=settings.evaluate.interval(timeline.steps),
        config={"model": config.model_dump(), "tokenizer": tokenizer.fingerprint},
        label=lambda step: {"phase": timeline.phase(step).name} if settings.phases else {},
        guard=settings.guard,
        phases=frozenset(phase.first for phase in timeline.phases),
        documents=lambda step: documents(data, timeline, step),
        work=timeline.work,
    )
    companions = _companions(job, settings, model, execution, timeline.context, ranks)
    penalties = build_penalties(job, settings, model, companions)
    shard_model(model, ranks)
    objective = build_objective(settings.objective)
    engine = Engine(
        model,
        objective,
        plan,
        execution,
        ranks,
        job.out.path,
        companions,
        penalties,
        tokenizer=tokenizer,
        replay=Replay(),
    )
    if ranks.leads:
        save_description(job.out.path, config, tokenizer)
    facts = _facts(settings, engine, config, data, timeline)
    job.display.notify(f"{facts['parameters']:,} parameters, {timeline.steps:,} steps; {execution.summary()}")
    is_slow = execution.device == "cpu" and settings.loop.backend == "auto" and execution.backend != "cpu"
    if is_slow and (why := slow_backend(config, execution.precision, settings)):
        job.display.notify(f"backend {execution.backend}: {why}")
    line = "{name}: " if settings.phases else ""
    line += "steps {first_step:,} to {last_step:,}: {rows}{growth} rows of {context:,} tokens each"
    for phase in timeline.summary():
        growth = f" to {phase['last_rows']}" if phase["last_rows"] != phase["rows"] else ""
        job.display.notify(line.format(**phase, growth=growth))
        if problem := overshoot(phase, timeline.epochs(data.source_size)):
            job.display.notify(problem)
    if data.without_validation:
        job.display.notify(f"no validation: nothing is held out of {', '.join(data.without_validation)}")
    for warmup in timeline.unfinished_warmups():
        job.display.notify(f"a warmup of {warmup:,} steps is longer than its phases: the rate does not reach its peak")
    if engine.training_state.resume(job.display.notify):
        job.display.notify(f"resuming from step {engine.state['step']:,}")
        job.log.write("resume", after=engine.state["step"])
    if not read_events(job.out / METRICS, "plan"):  # an earlier run's checkpoint has none
        job.log.write("plan", **facts, **earlier)
        for phase in timeline.summary():
            job.log.write("phase", **phase)
    del companions  # so that the engine can release them
    _annotate(job, engine, data, timeline)
    beside = _parameters_beside(model, engine.companions)
    prediction = predict(settings, initial, data, execution.device, ranks.size, beside)
    prediction.log(job.log)
    result = _loop(job, settings, engine, data, timeline, tokenizer)
    if fresh and ranks.leads:
        prediction.keep(job.out / METRICS)
    return result | facts


def _save_rows(job: Job, data: Data) -> None:
    """Save the row plans of packed documents, and report data that does not fit the context."""
    for context, sources in data.train.items():
        for source in sources.values():
            if isinstance(source.plan, BestFit):
                source.plan.save(job.out / f"rows-{source.name}-{context}.npz")
                if tokens := source.plan.dropped_tokens:
                    message = f"{source.name}: {tokens:,} tokens beyond the context of {context} are left out"
                    documents = source.plan.dropped
                    message += f", with {documents:,} documents that have no target left" if documents else ""
                    job.display.notify(message)
            elif isinstance(source.plan, OnePerRow) and (dropped := source.plan.dropped):
                unit = "pairs with a side" if source.plan.group == 2 else "prompts"
                message = f"{source.name}: {dropped:,} {unit} longer than the context of {context} are left out"
                job.display.notify(message)


def _select_backend(
    job: Job, settings: TrainSettings, model: Transformer, execution: Execution, flops: float, ranks: mesh.Mesh
) -> Execution:
    """Give the model its backend; returns the execution with its name.

    A resumed run keeps the backend that it started with, or gets another one if this machine does not have it. The
    first rank chooses for all. Parts of a model have the reference backend.
    """
    if ranks.shard > 1:
        return replace(execution, backend=TORCH.name)

    def select(name: str) -> Backend:
        name = TORCH.name if settings.objective.reads_layers else name
        training = {"shape": execution.shape, "flops": flops}
        dtype, notify = execution.product_dtype, job.display.notify
        return backend_for(model, execution.device, dtype, name=name, training=training, notify=notify)

    if not ranks.leads:
        model.backend = select(ranks.first(str))
        return replace(execution, backend=model.backend.name)
    try:
        model.backend = select(execution.backend)
    except UserError:
        if settings.loop.backend != "auto":
            raise
        model.backend = select("auto")
        job.display.notify(
            f'the run started with backend "{execution.backend}", which this machine does not have; it continues with '
            f'"{model.backend.name}", whose results differ by rounding'
        )
    return replace(execution, backend=ranks.first(lambda: model.backend.name))


def _chosen_execution(settings: TrainSettings, timeline: Timeline, ranks: mesh.Mesh) -> Execution:
    """Execution settings for the longest rows of training, which may be much shorter than the context of `init`."""
    rows = -(-timeline.max_rows // ranks.size) * rows_per_draw(settings)
    return choose(settings.loop, settings.precision, timeline.context, rows)


def _execution(job: Job, settings: TrainSettings, chosen: Execution, ranks: mesh.Mesh) -> Execution:
    """The execution settings of a run that is resumed, or those chosen for a new one."""
    execution = ranks.first(lambda: resumed(job.out / EXECUTION_FILE, chosen, settings.loop))
    if ranks.size > 1:  # device and threads are this rank's
        execution = replace(execution, device=chosen.device, threads=chosen.threads)
    execution.prepare()
    return execution


def _model(
    job: Job, settings: TrainSettings, config: ModelConfig, execution: Execution, ranks: mesh.Mesh
) -> Transformer:
    """The initial model, already in parts, unless adapters or anchors are derived from its whole weights first, or it
    starts with some layers of another one."""
    if (
        settings.adapter
        or settings.init_layers is not None
        or any(penalty.kind in ANCHORS for penalty in settings.penalties)
    ):
        ranks = mesh.Mesh()
    if "init" in job.inputs:
        path, device = job.inputs["init"].path, "cpu" if ranks.shard == 1 else execution.device
        model = load_model(path, job.display.notify, device, exact=True, context=config.context, mesh=ranks).model
        if settings.init_layers is not None:
            take_layers(model, initial_layers(settings.init_layers, model.config.depth))
        model.to(dtype=execution.parameter_dtype)
        if settings.adapter:
            lora.add_adapters(model, settings.adapter, key_of(job.seed, int(job.inputs["init"].key[:15], 16)))
            lora.cast_frozen(model, execution.product_dtype)
        return model.to(execution.device)
    return build_on(ranks, config, job.seed, execution.device, execution.parameter_dtype)


def _companions(
    job: Job, settings: TrainSettings, model: Transformer, execution: Execution, context: int, ranks: mesh.Mesh
) -> dict[str, nn.Module]:
    """The frozen models that the settings name, by role. The base model of an adapter is not loaded a second time.

    Raises:
        UserError: one has too few learned positions for rows of `context` tokens.
    """
    companions: dict[str, nn.Module] = {}
    for role, source in job.roles("companion").items():
        shape = read_config(source.path)
        scores = role in settings.objective.scoring_roles
        if role.startswith(("teacher", "kl.")) and shape.vocab != model.config.vocab:
            job.display.notify(
                f"{role}: ids that only one of '{source.name}' ({shape.vocab:,}) and '{job.name}' "
                f"({model.config.vocab:,}) has are left out before the softmax"
            )
        if not scores and shape.positions == "learned" and shape.context < context:
            raise UserError(
                f"{role}: '{source.name}' has {shape.context:,} learned positions, expected {context:,}, the longest "
                f"rows of '{job.name}'; shorten them, or name a model with a longer context"
            )
        is_base = settings.adapter and source.key == job.inputs["init"].key and companion_is_model(source.path)
        if is_base and ranks.shard == 1:
            companions[role] = lora.reference(model)
        else:
            companions[role] = load_frozen(
                source.path, job.display.notify, execution.device, execution.parameter_dtype, execution.backend, ranks
            )
    return companions


def _parameters_beside(model: Transformer, companions: Mapping[str, nn.Module]) -> int:
    """Parameters of companions that are not also the model's, as those of an adapter's base model are."""
    others = {p for companion in companions.values() for p in companion.parameters()} - set(model.parameters())
    return sum(p.numel() for p in others)


def _annotate(job: Job, engine: Engine, data: Data, timeline: Timeline) -> None:
    """Compute the objective's columns for all rows of sources that the run uses completely.

    The companions are released afterwards if they are not needed any more.
    """
    if not engine.objective.needs.columns:
        return
    complete, all_are = data.complete(timeline)
    splits = [("train", source) for source in complete]
    splits += [("val", source) for source in data.held_out if not source.replay]
    rows = sum(source.plan.rows * source.plan.group for _, source in splits)
    with job.display.bar(f"reference outputs for {job.name}", rows, "rows") as bar:
        for split, source in splits:
            directory, needs = job.out / "columns" / f"{source.name}-{split}", engine.objective.needs
            add_columns(needs.columns, engine.annotate, engine.mesh, source, directory, bar.advance)
    if not engine.objective.needs.companions_after_annotate and all_are:
        engine.release_companions()


def _facts(
    settings: TrainSettings, engine: Engine, config: ModelConfig, data: Data, timeline: Timeline
) -> dict[str, Any]:
    """Facts of the run that are known before its first step. Facts about the batch are those of the last step."""
    sampled = engine.objective.needs.samples  # then the tokens of a step are known only after it
    return {
        "parameters": sum(p.numel() for p in engine.model.parameters()),
        "trained_parameters": sum(p.numel() for p in engine.trained.values()),
        **decay_counts(engine.named, engine.plan.optim),
        "steps": timeline.steps,
        "context": config.context,
        "batch_rows": timeline.rows(timeline.steps),
        **({} if sampled else _sizes(settings, config, timeline)),
        "truncated_tokens": sum(s.plan.dropped_tokens for s in data.train_sources),
        "dropped_documents": sum(s.plan.dropped for s in data.train_sources),
        "vocab": config.vocab,
        "ln_vocab_nats": math.log(config.vocab),
        "peak_lr": timeline.peak,
        "warmup_steps": timeline.curves[0].schedule.warmup,
    }


def _sizes(settings: TrainSettings, config: ModelConfig, timeline: Timeline) -> dict[str, float]:
    """Tokens of the last step, tokens of all steps, and their FLOPs."""
    return {
        "batch_tokens": round(timeline.rows(timeline.steps) * timeline.phase(timeline.steps).row_targets, 1),
        "planned_tokens": round(timeline.tokens(timeline.steps)),
        "training_flops": training_flops(settings, config, timeline),
    }


def _loop(
    job: Job, settings: TrainSettings, engine: Engine, data: Data, timeline: Timeline, tokenizer: Tokenizer
) -> dict[str, Any]:
    share = (0, 1) if engine.objective.needs.whole_step else (engine.mesh.rank, engine.mesh.size)
    loaders: list[Loader] = []
    fractions = dict(zip(timeline.sources, timeline.fractions, strict=True))
    evaluation = Evaluation(job, settings, engine, data, fractions, tokenizer)
    best_metric = engine.objective.needs.best_metric

    def batches(first: int) -> Iterator[Batch]:
        for before in loaders:
            before.close()
        loaders.append(Loader(lambda step: data.batch(timeline, step, *share), first, timeline.steps))
        return iter(loaders[-1])

    try:
        with job.display.bar(f"train {job.name}", timeline.steps, "steps", done=engine.state["step"]) as bar:
            newest: dict[str, str] = {}

            def evaluate(step: int, final: bool) -> dict[str, float]:
                numbers = evaluation(step, final)
                if (metric := f"val_{best_metric}") in numbers:
                    newest[f"validation {best_metric.removesuffix('_nats')}"] = f"{numbers[metric]:.4f}"
                    bar.fields = {**bar.fields, **newest}
                return numbers

            def progress(m: StepMetrics, throughput: Throughput) -> None:
                reward = {"reward": f"{m.others['reward']:.3f}"} if "reward" in m.others else {}
                shown = {**reward, "loss": f"{float(m.loss):.4f}", **newest, "lr": f"{m.lr:.2e}"}
                shown["tok/s"] = f"{throughput.recent():,.0f}"
                bar.show(m.step, throughput.seconds_left(m.step), **shown, **engine.plan.label(m.step))

            final = train(engine, batches, evaluate, job.log, progress, job.display.notify)
    finally:
        for loader in loaders:
            loader.close()
    on_gpu = engine.execution.device == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak_memory_bytes()
    state = {name: engine.state[name] for name in ("best_step", "skipped_steps")}
    if engine.state["best_val"] is not None:
        state[f"best_val_{engine.objective.needs.best_metric}"] = engine.state["best_val"]
    epochs = {name: round(value, 4) for name, value in timeline.epochs(data.source_size).items()}
    job.log.flush()
    learned, sentence = verdict(_training(job.out / METRICS, timeline, epochs, fractions, engine.state["best_step"]))
    return {
        "verdict": learned,
        "verdict_sentence": sentence,
        **final,
        **state,
        "tokens": engine.state["tokens"],
        **{f"epochs/{name}": value for name, value in epochs.items()},
        "peak_bytes": peak,
    }


def _training(
    metrics: Path, timeline: Timeline, epochs: Mapping[str, float], fractions: Mapping[str, float], best_step: int
) -> Training:
    """What the verdict follows from, from the log of all attempts."""
    events = read_events(metrics)
    parts = [e["values"] for e in events if e["event"] == "parts"]
    evaluations = sorted((e for e in events if e["event"] == "evaluation"), key=lambda e: e["step"])
    return Training(
        evaluations=evaluations,
        # the first evaluation is later than step 0 where this run goes on from one that measured other rows
        updates=timeline.steps - next((e["step"] for e in evaluations), 0),
        parts=parts_by_corpus(parts[0], parts[-1]) if parts else {},
        fractions=fractions,
        batch_rows=timeline.rows(timeline.steps),
        epochs=epochs,
        best_step=best_step,
        rewards=mean_reward(e for e in events if e["event"] == "step"),
    )
