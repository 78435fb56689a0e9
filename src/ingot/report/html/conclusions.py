"""The conclusions at the top of the page: what was made, what was learned, what got better and worse.

A kind's function reads a finished stage's directory and yields a number with a sentence that compares it with its
yardsticks: the start of training, compressors, the model before. Details stand in the stage's panel.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ingot.report import figures, reading
from ingot.report.html.panels_forgetting import chains
from ingot.report.html.panels_judge import alarms
from ingot.train.verdict import change

TONES = {"learned": "good", "nothing learned": "warn", "worse": "bad"}
"""Verdict of a training -> tone."""
MIN_KEPT = 0.5
"""Fraction of the documents of a corpus below which its conclusion is a warning."""


class Conclusion(NamedTuple):
    """A line of the conclusions."""

    stage: str
    tone: str
    """A class of the style sheet: "good", "warn", "bad", or ""."""
    verdict: str
    """A word or two that say the same as the tone, for readers who see no colours."""
    number: str
    sentence: str


def unfinished(name: str, state: str, why: str, stage: Path) -> Conclusion:
    """A stage that is running, was interrupted or has failed: how far it is, and what it has learned so far."""
    tone = {"failed": "bad", "interrupted": "warn"}.get(state, "")
    steps, planned = reading.events(stage, "step"), reading.facts(stage).get("steps", 0)
    done = f"{100 * steps[-1]['step'] / planned:.0f} %" if steps and planned else "–"
    reasons = [why] if state != "running" else []
    if found := change(reading.evaluations(stage)):
        reasons.append(f"{found.label} {figures.nats(found.start)} at the start, {figures.nats(found.end)} so far")
    return Conclusion(name, tone, state, done, "; ".join(reasons))


def conclusions(kind: str, name: str, stage: Path) -> list[Conclusion]:
    """The conclusions of a finished stage; a kind without any gives an empty list."""
    return list(CONCLUSIONS.get(kind, _none)(name, stage))


def _none(name: str, stage: Path) -> Iterator[Conclusion]:
    yield from ()


def _corpus(name: str, stage: Path) -> Iterator[Conclusion]:
    funnel = reading.read_json(stage / "funnel.json")
    if not funnel:
        return
    read, kept = funnel["in"]["documents"], funnel["kept"]["documents"]
    sentence = f"of {figures.count(read)} documents kept: {figures.size(funnel['kept']['clean_bytes'])} of clean text"
    dropped = {reason: counts["documents"] for reason, counts in funnel["dropped"].items() if counts["documents"]}
    if dropped:
        reason = max(dropped, key=lambda r: dropped[r])
        sentence += f"; the most frequent reason to drop one was “{reason.replace('_', ' ')}”"
    if unreadable := funnel["quarantined"]["documents"]:
        sentence += f"; {figures.count(unreadable)} could not be read"
    few = kept < MIN_KEPT * read
    yield Conclusion(name, "warn" if few else "", "few kept" if few else "", figures.count(kept), sentence)


def _tokenizer(name: str, stage: Path) -> Iterator[Conclusion]:
    report = reading.read_json(stage / "report.json") | reading.result(stage)
    if "vocab" in report and "bytes_per_token" in report:
        sentence = f"bytes per token, with a vocabulary of {figures.count(report['vocab'])}"
        yield Conclusion(name, "", "", f"{report['bytes_per_token']:.2f}", sentence)


def _train(name: str, stage: Path) -> Iterator[Conclusion]:
    result = reading.result(stage)
    if not result:
        return
    final = result.get("val_reward", result.get("val_loss_nats"))
    sentences = []
    if "val_reward" in result:
        sentences.append("reward of fresh samples on all held-out prompts")
    elif final is not None:
        sentences.append(f"validation loss in nats on all held-out rows ({figures.describe_loss(result)})")
    verdict = result.get("verdict", "")
    if verdict:
        sample = "on those read while training: " if sentences and verdict in TONES else ""
        sentences.append(sample + result["verdict_sentence"])
    size = f"{figures.short(result['parameters'])} parameters, " if "parameters" in result else ""
    sentence = "; ".join([*sentences, f"{size}{figures.short(result.get('tokens', 0))} tokens trained on"])
    yield Conclusion(name, TONES.get(verdict, ""), verdict, figures.nats(final), sentence)
    for alarm in alarms(reading.events(stage, "step")):
        yield Conclusion(name, "warn", "check", f"step {alarm.step:,.0f}", alarm.sentence)


def _evaluate(name: str, stage: Path) -> Iterator[Conclusion]:
    for task, rows in reading.bits_per_byte(stage).items():
        yardsticks = {r["model"]: r["value"] for r in rows if r["reference"]}
        models = sorted((r for r in rows if not r["reference"]), key=lambda r: r["value"])
        if models:
            yield _compression(name, task, models, yardsticks)
    yield from _tasks(name, stage)
    for chain in chains(stage):
        for task, row in zip(chain["tasks"], chain["forgotten"], strict=True):
            if row and row["css"]:
                verdict = "forgotten" if row["css"] == "bad" else "improved"
                sentence = f"{chain['last']} on {task['name']}: {task['metric']} against the best earlier stage"
                interval = f"95 % {row['low']:+.4f} to {row['high']:+.4f}"
                yield Conclusion(name, row["css"], verdict, f"{row['value']:+.4f}", f"{sentence}, {interval}")


def _compression(name: str, task: str, models: list[dict[str, Any]], yardsticks: Mapping[str, float]) -> Conclusion:
    """The best model's bits per byte between the compressors', and the others' bits per byte."""
    best = models[0]
    sentence = f"bits per byte on held-out {task}: {best['model']}"
    if yardsticks:
        sentence += f" is {position(best['value'], yardsticks)}"
    if others := [f"{m['model']} {m['value']:.3f}" for m in models[1:]]:
        sentence += f"; {', '.join(others)}"
    beaten = sum(value > best["value"] for value in yardsticks.values())
    tone, verdict = "", "between"
    if beaten == len(yardsticks):
        tone, verdict = ("good", "below all") if yardsticks else ("", "")
    elif beaten <= (len(yardsticks) > 2):  # the weakest of three or more is no achievement
        tone, verdict = "warn", "weak"
    return Conclusion(name, tone, verdict, f"{best['value']:.3f}", sentence)


def position(value: float, yardsticks: Mapping[str, float]) -> str:
    """A value between its neighbours: "below gzip -9 (2.31) and above xz -9 (1.75)"."""
    higher = sorted((v, label) for label, v in yardsticks.items() if v > value)[:1]
    lower = sorted((v, label) for label, v in yardsticks.items() if v <= value)[-1:]
    parts = [f"below {label} ({v:.2f})" for v, label in higher] + [f"above {label} ({v:.2f})" for v, label in lower]
    return " and ".join(parts)


def _tasks(name: str, stage: Path) -> Iterator[Conclusion]:
    """A line for each task with an accuracy: the best model against guessing, and all others."""
    chance = {r["task"]: r["value"] for r in reading.table(stage) if r["metric"] == "chance"}
    for task, rows in reading.accuracies(stage).items():
        ordered = sorted(rows, key=lambda r: -r["value"])
        sentence = f"accuracy on {task}: {figures.accuracies(rows)}"
        tone, verdict = "", ""
        if task in chance and ordered:
            sentence += f"; guessing gives {100 * chance[task]:.1f} %"
            above = ordered[0]["low"] > chance[task]
            tone, verdict = ("good", "above chance") if above else ("warn", "as by chance")
        if ordered:
            yield Conclusion(name, tone, verdict, f"{100 * ordered[0]['value']:.1f} %", sentence)


def _judge(name: str, stage: Path) -> Iterator[Conclusion]:
    against = reading.record(stage).get("settings", {}).get("against")
    for row in reading.table(stage):
        if row["metric"] == "win_rate":
            tone = "good" if row["low"] > 0.5 else "bad" if row["high"] < 0.5 else ""
            verdict = {"good": "better", "bad": "worse"}.get(tone, "no difference")
            interval = f"{100 * row['low']:.0f} to {100 * row['high']:.0f} %"
            sentence = f"of {row['n']:,} prompts won by {row['model']} against {against} ({interval}), by {row['task']}"
            yield Conclusion(name, tone, verdict, f"{100 * row['value']:.0f} %", sentence)


def _label(name: str, stage: Path) -> Iterator[Conclusion]:
    result = reading.result(stage)
    if "score" in result:
        sentence = f"mean score of the answers; {figures.count(result['documents'])} rows kept"
        yield Conclusion(name, "", "", figures.nats(result["score"]), sentence)


CONCLUSIONS: dict[str, Callable[[str, Path], Iterator[Conclusion]]] = {
    "corpus": _corpus,
    "tokenizer": _tokenizer,
    "train": _train,
    "evaluate": _evaluate,
    "judge": _judge,
    "label": _label,
}
"""Kind -> (name, directory of a finished stage) -> its conclusions."""
HEADINGS = {"Results": ("evaluate", "judge"), "Training": (), "Data": ("corpus", "tokenizer", "tokens")}
"""Heading of the conclusions -> its kinds, in the order in which a reader asks; other kinds belong to training."""


def group(kind: str) -> str:
    """The heading under which the conclusions of a kind stand."""
    return next((heading for heading, kinds in HEADINGS.items() if kind in kinds), "Training")
