"""The panel of judge stages, and the alarms of training against a reward."""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from ingot.evaluate.monitors import Alarm, Series, watch
from ingot.report import figures, reading
from ingot.report.html.rendering import render
from ingot.stages.job import ANSWERS

MONITORED = {
    "proxy": "reward",
    "gold": "gold_reward",
    "tokens": "completion_tokens",
    "kl_nats": "kl_nats",
    "entropy_nats": "entropy_nats",
    "distinct_2": "distinct_2",
}
"""Series of `monitors.watch` -> field of a step's event."""
MAX_PROMPTS = 6
"""Prompts whose answers are shown."""


def alarms(steps: list[dict[str, Any]]) -> list[Alarm]:
    """Alarms of a train stage; a stage without a reward has none, since it does not log these fields."""
    return watch({name: _series(steps, field) for name, field in MONITORED.items()})


def _series(steps: list[dict[str, Any]], field: str) -> list[tuple[float, float]]:
    return [(s["step"], s[field]) for s in steps if s.get(field) is not None]


def judge(stage: Path) -> Markup:
    """Win rates by judge and by length, statistics of the answers, alarms, and answers side by side."""
    settings, rows = reading.record(stage).get("settings", {}), reading.table(stage)
    judges = settings.get("by", [])
    names = [settings.get("against"), *(m for m in settings.get("models", ()) if m != settings.get("against"))]
    tables = [_table(task, [r for r in rows if r["task"] == task], names) for task in (*judges, "answers")]
    return render(
        "judge.html",
        tables=[table for table in tables if table["rows"]],
        against=settings.get("against", ""),
        alarms=[(names[int(alarm.step)], alarm.sentence) for alarm in watch(_model_series(rows, judges, names))],
        prompts=_side_by_side(stage),
    )


def _model_series(rows: list[dict[str, Any]], judges: list[str], names: list[str]) -> dict[str, Series]:
    """Series for `monitors.watch` whose steps are the numbers of the models; the baseline model is step 0."""
    cells = {(r["model"], r["task"], r["metric"]): r["value"] for r in rows}
    keys = {name: ("answers", name) for name in ("tokens", "kl_nats", "entropy_nats", "distinct_2")}
    keys |= {name: (judge, "score") for name, judge in zip(("proxy", "gold"), judges, strict=False)}
    return {
        name: [(float(n), cells[model, *key]) for n, model in enumerate(names) if (model, *key) in cells]
        for name, key in keys.items()
    }


def _table(task: str, rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    metrics = list(dict.fromkeys(r["metric"] for r in rows))
    cells = {(r["model"], r["metric"]): r for r in rows}
    lines = [
        {"model": model, "cells": [_cell(cells.get((model, metric))) for metric in metrics]}
        for model in names
        if any(r["model"] == model for r in rows)
    ]
    return {"task": task, "metrics": [figures.heading(m) for m in metrics], "rows": lines}


def _cell(row: dict[str, Any] | None) -> tuple[str, str]:
    """A formatted value, and its interval with n."""
    if row is None:
        return "–", ""
    is_fraction = row["metric"].startswith("win_rate") or row["metric"] in ("ties", "stopped", "first_preferred")
    form = (lambda v: f"{100 * v:.1f} %") if is_fraction else (lambda v: f"{v:,.3f}")
    return form(row["value"]), f"{form(row['low'])} to {form(row['high'])}, n = {figures.count(row['n'])}"


def _side_by_side(stage: Path) -> list[dict[str, Any]]:
    """The first prompts with the answers of all models: [{prompt, answers: [row of `ANSWERS` with score_text]}]."""
    prompts: dict[str, list[dict[str, Any]]] = {}
    for row in reading.read_lines(stage / ANSWERS):
        score_text = ", ".join(f"{judge} {value:.3g}" for judge, value in row["scores"].items() if value is not None)
        prompts.setdefault(row["prompt"], []).append({**row, "score_text": score_text})
    return [{"prompt": prompt, "answers": answers} for prompt, answers in list(prompts.items())[:MAX_PROMPTS]]
