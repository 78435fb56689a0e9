"""The forgetting matrix of an evaluate stage: the score of every task after every stage, and its summary."""

from pathlib import Path
from typing import Any

from ingot.report import figures, reading

SUMMARY = ("forgetting", "backward_transfer", "forward_transfer", "kl_from_before")
"""Prefixes of the metrics of a chain, which are rows of its last stage."""


def is_summary(row: dict[str, Any]) -> bool:
    """Whether a table row describes a chain instead of a single model."""
    return row["metric"].startswith(SUMMARY)


def chains(stage: Path) -> list[dict[str, Any]]:
    """The matrix of every evaluated chain, for the template.

    Returns:
        {last, tasks, headings, rows: [{stage, cells}], forgotten, moved, sentences}; rows are in the order of training,
        and a cell is the table row of the task's first metric, with `own` if the stage was the first to train on it.
    """
    table = reading.table(stage)
    newest = {tuple(s["name"] for s in e["stages"]): e["stages"] for e in reading.events(stage, "chain")}
    return [_matrix(chain, table) for chain in newest.values()]


def _matrix(chain: list[dict[str, Any]], table: list[dict[str, Any]]) -> dict[str, Any]:
    names, last = [stage["name"] for stage in chain], chain[-1]["name"]
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for row in table:
        if row["model"] in names and not is_summary(row):
            first.setdefault((row["model"], row["task"]), row)
    tasks = [t for t in dict.fromkeys(task for _, task in first) if all((name, t) in first for name in names)]
    summary = {(r["task"], r["metric"].removesuffix("_nats")): r for r in table if r["model"] == last and is_summary(r)}
    return {
        "last": last,
        "tasks": [{"name": t, "metric": figures.heading(first[last, t]["metric"])} for t in tasks],
        "headings": [f"{t}, {figures.heading(first[last, t]['metric'])}" for t in tasks],
        "rows": [
            {"stage": s["name"], "cells": [{**first[s["name"], t], "own": t in s["learned"]} for t in tasks]}
            for s in chain
        ],
        "forgotten": [_with_css(summary.get((task, "forgetting"))) for task in tasks],
        "moved": [summary.get((task, "kl_from_before")) for task in tasks],
        "sentences": [_sentence(task, metric, row) for (task, metric), row in summary.items() if "transfer" in metric],
    }


def _with_css(row: dict[str, Any] | None) -> dict[str, Any] | None:
    """A row of forgetting with its colour: bad (above 0) or good (below 0) if its interval excludes 0."""
    if row is None:
        return None
    has_interval = row["n"] > 1
    bad, good = has_interval and row["low"] > 0, has_interval and row["high"] < 0
    return {**row, "css": "bad" if bad else "good" if good else ""}


def _sentence(task: str, metric: str, row: dict[str, Any]) -> str:
    unit = " nats" if row["metric"].endswith("_nats") else ""
    return f"{metric.replace('_', ' ').capitalize()} on {task}: {with_interval(row)}{unit}"


def with_interval(row: dict[str, Any]) -> str:
    """A signed difference with its interval, if it is over more than one document."""
    interval = f"{row['low']:+.4f} to {row['high']:+.4f}" if row["n"] > 1 else "no interval, n = 1"
    return f"{row['value']:+.4f} ({interval})"


def lines(stage: Path) -> list[str]:
    """A line for every task of every chain, for the terminal."""
    return [
        f"after {chain['last']}: {_before_and_now(task, cell['value'], row)}"
        for chain in chains(stage)
        for task, cell, row in zip(chain["tasks"], chain["rows"][-1]["cells"], chain["forgotten"], strict=True)
        if row
    ]


def _before_and_now(task: dict[str, Any], now: float, row: dict[str, Any]) -> str:
    """A task's score at its best before the last stage and after it, and whether the difference is clear.

    Args:
        row: its forgetting, above 0 where the last stage is worse.
    """
    name, _, unit = task["metric"].partition(", ")
    if unit == "nats":  # a loss, which forgetting raises
        name, before, change = f"validation {name}", now - row["value"], row
    else:
        before, change = now + row["value"], row | {"value": -row["value"], "low": -row["high"], "high": -row["low"]}
    verdict = {"bad": ": worse", "good": ": better", "": ": no clear change"}[row["css"]] if row["n"] > 1 else ""
    unit = f" {unit}".rstrip()
    numbers = f"{figures.nats(before)}{unit} at best before and is {figures.nats(now)} now"
    return f"{name} on {task['name']} was {numbers}, {with_interval(change)}{verdict}"
