"""The panels of train and evaluate stages: curves, tables, samples."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ingot.report import figures, reading
from ingot.report.html.charts import Series, line_chart
from ingot.report.html.conclusions import TONES
from ingot.report.html.measures import measures
from ingot.report.html.panels_forgetting import chains, is_summary
from ingot.report.html.panels_judge import alarms
from ingot.report.html.panels_teacher import predictions
from ingot.report.html.rendering import render
from ingot.stages.job import EXECUTION_FILE
from ingot.stages.training.timeline import overshoot
from ingot.train.health import ADVICE, repairs, verdict

MAX_ROWS = 12
"""Rows shown of the loss table, samples by step, and skipped steps."""
MAX_NAMES = 3
"""Documents shown of a skipped step."""
MAX_CHARTS, FOLDED_CHARTS = 8, 2
"""Most charts that are not folded, and charts at the end that always are: learning rate and throughput."""
_COLOURS = {"healthy": "good", "always clipped": "warn", "critical": "bad"}


def train(stage: Path) -> Markup:
    """Curves, the health of the gradients, a table of losses, facts, and samples by step."""
    steps, evaluations = reading.events(stage, "step"), reading.evaluations(stage)
    facts, clip = reading.facts(stage), _clip(stage)
    drawn = _charts(steps, evaluations, facts, clip) if steps or evaluations else []
    return render(
        "train.html",
        pairs=_facts(stage, facts, steps),
        drawn=drawn,
        shown=min(MAX_CHARTS, len(drawn) - FOLDED_CHARTS),
        alarms=[f"{alarm.sentence} (from step {alarm.step:,.0f})" for alarm in alarms(steps)],
        verdict=_verdict(reading.result(stage)),
        health=_health(stage, steps, clip) if steps else None,
        rows=_loss_rows(evaluations),
        sources=[f"{name}, nats" for name in _sources(evaluations)],
        of_pairs=_of_pairs(evaluations),
        journal=_journal(stage),
        samples=figures.evenly_spaced(reading.samples(stage), MAX_ROWS),
    )


def _clip(stage: Path) -> float:
    return reading.record(stage).get("settings", {}).get("optim", {}).get("clip", 1.0)


def _charts(
    steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], facts: dict[str, Any], clip: float
) -> list[Markup]:
    smooth = 1 - 1 / min(50, max(1, len(steps) / 50))  # a window of at most a fiftieth of the run limits the lag

    def curve(name: str, field: str, smooth: float = 0.0) -> Series:
        return Series(name, [(s["step"], s[field]) for s in steps if field in s], smooth)

    held_out = {"validation": "val_loss_nats"} | {
        f"validation, {s}": f"val_loss_nats/{s}" for s in _sources(evaluations)[:4]
    }
    validation = [
        Series(name, points, dots=True)
        for name, field in held_out.items()
        if (points := [(e["step"], e[field]) for e in evaluations if field in e])
    ]
    train_losses = [s["loss_nats"] for s in steps if "loss_nats" in s]
    losses = [y for s in validation for _, y in s.points] + train_losses
    chance = facts.get("ln_vocab_nats", math.inf)
    near_chance = max((y for y in losses if math.isfinite(y)), default=0.0) > 0.6 * chance
    references = {"uniform guess, ln V": chance} if near_chance else {}  # far above the curve, it would flatten it
    loss = "loss_nats" if train_losses or not steps else "loss"
    unit = "nats per token" if loss == "loss_nats" and not _of_pairs(evaluations) else "loss"
    loss_chart = line_chart("Loss", [curve("train", loss, smooth), *validation], "step", unit, references)
    return [
        *([loss_chart] if loss == "loss_nats" else []),
        *measures(steps, evaluations, smooth),
        *([loss_chart] if loss == "loss" else []),  # an on-policy loss is about 0 at first updates, so it comes last
        line_chart(
            "Gradient norm before clipping",
            [curve("norm", "grad_norm", smooth)],
            "step",
            "norm",
            {"optim.clip": clip},
            from_zero=True,
        ),
        line_chart("Learning rate", [curve("learning rate", "lr")], "step", "rate", from_zero=True),
        line_chart(
            "Throughput without evaluations and checkpoints",
            [curve("training", "tok_s")],
            "step",
            "tok/s",
            from_zero=True,
        ),
    ]


def _verdict(result: dict[str, Any]) -> dict[str, str] | None:
    """Whether the training learned; None before its end."""
    if "verdict" not in result:
        return None
    name = result["verdict"]
    return {"verdict": name, "css": TONES.get(name, ""), "sentence": result["verdict_sentence"]}


def _health(stage: Path, steps: list[dict[str, Any]], clip: float) -> dict[str, str]:
    """The state of all logged gradient norms together, its changes during training, and what the guard did."""
    changes = reading.events(stage, "health")
    norms = [s["grad_norm"] for s in steps]
    health = verdict(norms, clip)
    above = figures.percentage(sum(n > clip for n in norms), len(norms))
    sentence = f"{above} of the logged norms exceed optim.clip = {clip:g} and were clipped"
    sentence += ", which is normal; all are finite." if health == "healthy" else f"; {ADVICE[health]}."
    if changes:
        sentence += " While training: " + ", ".join(f"{e['health']} at step {e['step']:,}" for e in changes) + "."
    if done := repairs(reading.events(stage, "skipped"), reading.events(stage, "rollback")):
        sentence += f" Guard: {done}."
    return {"health": health, "css": _COLOURS[health], "sentence": sentence}


def _journal(stage: Path) -> list[dict[str, Any]]:
    """What the guard did, in the order of steps: all rollbacks, and some of the skipped steps."""
    rollbacks = reading.events(stage, "rollback")
    events = [*figures.evenly_spaced(reading.events(stage, "skipped"), MAX_ROWS), *rollbacks]
    return [
        {
            "step": event["step"],
            "what": repairs([], [event]) if event["event"] == "rollback" else "skipped",
            "why": event.get("why", ""),
            "documents": _some(event.get("documents", ())),
        }
        for event in sorted(events, key=lambda event: event["step"])
    ]


def _some(names: Sequence[str]) -> str:
    """The first names, and how many others there are."""
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _sources(evaluations: list[dict[str, Any]]) -> list[str]:
    """Corpora with a validation loss of their own; empty for a single corpus."""
    prefix = "val_loss_nats/"
    return list(dict.fromkeys(k.removeprefix(prefix) for e in evaluations for k in e if k.startswith(prefix)))


def _of_pairs(evaluations: list[dict[str, Any]]) -> bool:
    return any(figures.pair_accuracy(e) is not None for e in evaluations)


def _loss_rows(evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the loss table: some evaluations, always including the best one."""
    with_loss = [e for e in evaluations if "val_loss_nats" in e]
    if not with_loss:
        return []
    best = min(with_loss, key=lambda e: e["val_loss_nats"])
    selected = figures.evenly_spaced(with_loss, MAX_ROWS)
    if best not in selected:
        selected = sorted([*selected, best], key=lambda e: e["step"])
    return [
        {
            "step": e["step"],
            "train": e.get("train_loss_nats"),
            "val": e["val_loss_nats"],
            "accuracy": figures.pair_accuracy(e),
            "sources": [e.get(f"val_loss_nats/{s}") for s in _sources(evaluations)],
            "best": e is best,
        }
        for e in selected
    ]


def _facts(stage: Path, facts: dict[str, Any], steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    if not facts:
        return []
    result, execution = reading.result(stage), reading.read_json(stage / EXECUTION_FILE)
    done, rows = steps[-1]["step"] if steps else 0, figures.count(facts["batch_rows"])
    pairs = [
        ("parameters", figures.count(facts["parameters"])),
        ("decayed parameters", figures.count(facts["decayed_parameters"])),
        ("undecayed parameters", figures.count(facts["undecayed_parameters"])),
        ("steps", f"{figures.count(done)} of {figures.count(facts['steps'])}"),
        ("tokens per step", f"{figures.count(facts['batch_tokens'])} in {rows} rows")
        if "batch_tokens" in facts
        else ("prompts per step", rows),
        ("context", f"{figures.count(facts['context'])} tokens"),
        ("vocabulary", f"{figures.count(facts['vocab'])}, ln V = {facts['ln_vocab_nats']:.4f} nats"),
        ("peak learning rate", f"{facts['peak_lr']:.3g}, warmup {figures.count(facts['warmup_steps'])}"),
        *_phases(stage),
        *_overshoots(stage, result),
    ]
    if result:
        loss = result.get("val_loss_nats")
        if "val_reward" in result:
            pairs.append(("reward of fresh samples, held-out prompts", figures.nats(result["val_reward"])))
        elif loss is None:
            pairs.append(("validation", "none"))
        else:
            pairs.append(
                ("validation loss, complete split", f"{figures.nats(loss)} nats, {figures.describe_loss(result)}")
            )
        pairs.append(("tokens trained on", figures.count(result.get("tokens", 0))))
        pairs += [("best at step", figures.count(result["best_step"]))] if result.get("best_step") is not None else []
        names = {"bits_per_byte": "bits per byte", "epochs": "epochs"}
        for key, number in result.items():
            stem, _, source = key.partition("/")
            if stem in names:
                pairs.append((f"{names[stem]}, {source}" if source else names[stem], figures.nats(number)))
        pairs += predicted_lines(stage, result)
        if "waiting" in result:
            waits = (f"rank {rank} {fraction:.0%}" for rank, fraction in enumerate(result["waiting"]))
            pairs.append(("time waiting for other ranks", ", ".join(waits)))
    if execution:
        pairs.append(("execution", figures.execution(execution)))
    return pairs


def predicted_lines(stage: Path, result: dict[str, Any]) -> list[tuple[str, str]]:
    """Time and memory of a finished run beside what was predicted before its first step."""
    pairs, events = [], reading.events(stage, "predicted")
    predicted = events[-1] if events else {}
    if "seconds" in result:
        took, expected = result["seconds"], (predicted.get("seconds") or {}).get("total")
        before = f"predicted {figures.duration(expected)}, took " if expected else ""
        off = f" ({took / expected - 1:+.0%})" if expected else ""
        pairs.append(("time", f"{before}{figures.duration(took)}{off}"))
    seconds, speeds = predicted.get("seconds") or {}, reading.events(stage, "speed")
    if "peak_flops" in seconds and "step" in speeds[-1]["seconds"] and "training_flops" in result:
        mfu = seconds["mfu"] * seconds["step"] / speeds[-1]["seconds"]["step"]
        pairs.append(("training, without evaluations and checkpoints", figures.mfu_line(mfu, seconds)))
    if "peak_bytes" in result:
        tensors = f"predicted {figures.size(predicted['peak_bytes'])} of tensors, " if predicted else ""
        gpu = reading.read_json(stage / EXECUTION_FILE).get("device") == "cuda"
        pairs.append(
            ("peak memory", f"{tensors}{'' if gpu else 'the process held '}{figures.size(result['peak_bytes'])}")
        )
    return pairs


def _phases(stage: Path) -> list[tuple[str, str]]:
    """A line for each phase if there are several or the batch grows."""
    phases = {e["name"]: e for e in reading.events(stage, "phase")}  # the newest attempt's
    if len(phases) == 1 and all(p["rows"] == p["last_rows"] for p in phases.values()):
        return []
    return [(f"phase {name}", _phase(phase)) for name, phase in phases.items()]


def _overshoots(stage: Path, result: dict[str, Any]) -> list[tuple[str, str]]:
    """A line for each phase that trains on much more than its duration asks for."""
    epochs = {name.removeprefix("epochs/"): n for name, n in result.items() if name.startswith("epochs/")}
    phases = {e["name"]: e for e in reading.events(stage, "phase")}  # the newest attempt's
    return [("overshoot", sentence) for phase in phases.values() if (sentence := overshoot(phase, epochs))]


def _phase(phase: dict[str, Any]) -> str:
    steps = f"steps {figures.count(phase['first_step'])} to {figures.count(phase['last_step'])}"
    grows = f" to {figures.count(phase['last_rows'])}" if phase["last_rows"] != phase["rows"] else ""
    rows = f"{figures.count(phase['rows'])}{grows} rows of {figures.count(phase['context'])} tokens"
    mixture = " + ".join(n if fraction == 1 else f"{fraction:.3g} {n}" for n, fraction in phase["data"].items())
    return f"{steps}: {rows}; {mixture}; learning rate {phase['first_lr']:.2e} to {phase['last_lr']:.2e}"


def evaluate(stage: Path) -> Markup:
    """Bits per byte beside baselines, all metrics with their intervals, forgetting, samples."""
    models = reading.models(stage)
    rows = [row for row in reading.table(stage) if row["model"] in models and not is_summary(row)]
    bars = {task: _bars(task_rows) for task, task_rows in reading.bits_per_byte(stage).items()}
    samples = [{**s, "quoted": repr(s["prompt"])} for s in reading.samples(stage)]
    return render(
        "evaluate.html",
        bits_per_byte=bars,
        groups=_groups(rows),
        chains=chains(stage),
        samples=samples,
        examples=reading.examples(stage),
        predictions=predictions(stage),
        limitations=reading.limitations(stage),
    )


def _bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the extents of their bars, in per cent of the longest."""
    longest = max(max(r["value"], r["high"]) for r in rows) or 1.0
    return [
        {
            **row,
            "width": 100 * row["value"] / longest,
            "from": 100 * row["low"] / longest,
            "to": 100 * row["high"] / longest,
            "note": f"{row['low']:.4f} to {row['high']:.4f}" if row["high"] > row["low"] else "",
        }
        for row in rows
    ]


def _groups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A table for each task: models as rows, metrics as columns."""
    groups = []
    for task in dict.fromkeys(r["task"] for r in rows):
        task_rows = [r for r in rows if r["task"] == task]
        metrics = list(dict.fromkeys(r["metric"] for r in task_rows))
        cells = {(r["model"], r["metric"]): r for r in task_rows}
        lines = [
            {
                "model": model,
                "cells": [_cell(cells.get((model, metric))) for metric in metrics],
                "n": figures.count(max(r["n"] for r in task_rows if r["model"] == model)),
            }
            for model in dict.fromkeys(r["model"] for r in task_rows)
        ]
        title = f"Task {task}" if "accuracy" in metrics else f"All metrics on held-out {task}"
        groups.append({"title": title, "metrics": [figures.heading(m) for m in metrics], "rows": lines})
    return groups


def _cell(row: dict[str, Any] | None) -> tuple[str, str]:
    """A formatted value, and its interval if it has one."""
    if row is None:
        return "–", ""
    decimals = 1 if row["metric"] == "perplexity" else 4
    value, low, high = (f"{row[name]:,.{decimals}f}" for name in ("value", "low", "high"))
    return value, f"{low} to {high}" if row["high"] > row["low"] else ""
