"""Parts of a corpus stage's panel: rules with histograms, cost of steps, planted documents, kinds of instructions."""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from ingot.report import figures, reading
from ingot.report.html.histogram import histogram

BYTES_PER_TOKEN = 4
"""For the estimate of tokens in a funnel: no tokenizer is at hand there."""

SMALLEST = 1e-9
"""A bound below it allows 0 alone."""


def rule_parts(stage: Path) -> dict[str, Any]:
    """What `corpus.html` shows of rules, steps and checks."""
    data, funnel = reading.read_json(stage / "rules.json"), reading.read_json(stage / "funnel.json")
    rules = data.get("rules", {})
    return {
        "rules": {name: rule for name, rule in rules.items() if rule["removed"] or rule["alone"]},
        "near_misses": [(name, near) for name, rule in rules.items() for near in rule.get("near", ())],
        "drawn": histograms(data),
        "funnel_steps": [_step(step) for step in funnel.get("steps", ()) if step["in"] != step["out"]],
        "cost": cost(stage),
        "planted": reading.read_json(stage / "planted.json").get("kinds", {}),
        "instructions": reading.read_json(stage / "instructions.json"),
        "masked": reading.read_json(stage / "pii_audit.json").get("places", {}),
    }


def histograms(data: dict[str, Any]) -> list[Markup]:
    """A chart for each measure; those of rules that remove most come first."""
    rules = data.get("rules", {})
    drawn = []
    for measure, bins in data.get("measures", {}).items():
        own = {name: rule for name, rule in rules.items() if rule.get("measure") == measure}
        bounds = {name: rule.get("least", rule.get("most")) for name, rule in own.items()}
        if max(bounds.values(), default=1) < SMALLEST:  # a yes or no: the table of rules says it all
            continue
        alone = sum(rule["alone"] for rule in own.values())
        drawn.append((-alone, len(drawn), histogram(measure, bins["edges"], bins["documents"], bounds)))
    return [chart for _, _, chart in sorted(drawn, key=lambda entry: entry[:2])]


def cost(stage: Path) -> list[tuple[str, float, float]]:
    """(step of `prepare`, seconds of all workers, per cent of their sum)."""
    seconds = next((event["seconds"] for event in reading.events(stage, "cost")[-1:]), {})
    total = sum(seconds.values()) or 1.0
    return [(name, value, 100 * value / total) for name, value in seconds.items()]


def _step(step: dict[str, Any]) -> dict[str, Any]:
    tokens = step["out"]["bytes"] / BYTES_PER_TOKEN
    removed = step["in"]["documents"] - step["out"]["documents"]
    return {**step, "tokens": figures.short(tokens), "removed": removed}
