"""The forgetting matrix of an evaluate stage: the score of every task after every stage, and what it comes to."""

from pathlib import Path
from typing import Any

from ingot.report import figures, reading

SUMMARY = ("forgetting", "backward_transfer", "forward_transfer", "kl_from_before")
"""How metrics of a chain begin; they belong to its last stage."""


def is_summary(row: dict[str, Any]) -> bool:
    """Whether a table row is about a chain and not about a model alone."""
    return row["metric"].startswith(SUMMARY)


def chains(stage: Path) -> list[dict[str, Any]]:
    """Every chain that was judged: {last, tasks, rows: [{stage, cells}], forgotten, sentences}, from the first stage
    to the last; a cell is {value, low, high, own, css}, in the task's first metric.
    """
    table = reading.table(stage)
    newest = {tuple(link["name"] for link in e["stages"]): e["stages"] for e in reading.events(stage, "chain")}
    return [_matrix(links, table) for links in newest.values()]


def _matrix(links: list[dict[str, Any]], table: list[dict[str, Any]]) -> dict[str, Any]:
    names, last = [link["name"] for link in links], links[-1]["name"]
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for row in table:
        if row["model"] in names and not is_summary(row):
            first.setdefault((row["model"], row["task"]), row)
    tasks = [t for t in dict.fromkeys(task for _, task in first) if all((name, t) in first for name in names)]
    about = {(r["task"], r["metric"].removesuffix("_nats")): r for r in table if r["model"] == last and is_summary(r)}
    return {
        "last": last,
        "tasks": [{"name": t, "metric": figures.words(first[last, t]["metric"])} for t in tasks],
        "rows": [
            {"stage": link["name"], "cells": [{**first[link["name"], t], "own": t in link["learned"]} for t in tasks]}
            for link in links
        ],
        "forgotten": [_signed(about.get((task, "forgetting"))) for task in tasks],
        "moved": [about.get((task, "kl_from_before")) for task in tasks],
        "sentences": [_sentence(task, metric, row) for (task, metric), row in about.items() if "transfer" in metric],
    }


def _signed(row: dict[str, Any] | None) -> dict[str, Any] | None:
    """A forgetting with the colour of its verdict: bad or good where there is an interval and it leaves out 0."""
    if row is None:
        return None
    sure = row["n"] > 1
    return {**row, "css": "bad" if sure and row["low"] > 0 else "good" if sure and row["high"] < 0 else ""}


def _sentence(task: str, metric: str, row: dict[str, Any]) -> str:
    unit = " nats" if row["metric"].endswith("_nats") else ""
    return f"{metric.replace('_', ' ').capitalize()} on {task}: {spelled(row)}{unit}"


def spelled(row: dict[str, Any]) -> str:
    """A difference with its sign and its interval, which one document does not give."""
    interval = f"{row['low']:+.4f} to {row['high']:+.4f}" if row["n"] > 1 else "no interval, n = 1"
    return f"{row['value']:+.4f} ({interval})"


def lines(stage: Path) -> list[str]:
    """A line for every chain, for the terminal."""
    found = []
    for chain in chains(stage):
        now = zip(chain["tasks"], chain["rows"][-1]["cells"], chain["forgotten"], strict=True)
        parts = [f"{t['name']} {figures.nats(c['value'])}, forgotten {spelled(row)}" for t, c, row in now if row]
        if parts:
            found.append(f"after {chain['last']}: " + "; ".join(parts))
    return found
