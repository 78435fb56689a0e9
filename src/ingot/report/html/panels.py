"""What the page says about a finished or unfinished stage: kind -> function(stage's directory) -> HTML.

A panel reads the directory and nothing else, so it can be shown for any stage of any run. A kind names its own
(`Kind.panel`); without one its scalars are listed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ingot.report import figures, reading
from ingot.report.html.rendering import render
from ingot.stages.kind import load
from ingot.stages.kinds import KINDS


def corpus(stage: Path) -> Markup:
    """The funnel: in, less each reason, less what could not be read, makes what was kept."""
    funnel = reading.read_json(stage / "funnel.json")
    return render(
        "corpus.html",
        funnel=funnel,
        steps=_funnel_steps(funnel) if funnel else [],
        pairs=_corpus_facts(funnel, reading.result(stage)) if funnel else [],
        samples=reading.dropped_samples(stage),
        quarantined=reading.quarantined(stage),
    )


def _funnel_steps(funnel: dict[str, Any]) -> list[dict[str, Any]]:
    whole = funnel["in"]

    def step(label: str, counts: dict[str, int], css: str) -> dict[str, Any]:
        width = 100 * counts["documents"] / max(1, whole["documents"])
        note = f"{figures.share(counts['documents'], whole['documents'])} of documents, "
        note += f"{figures.share(counts['bytes'], whole['bytes'])} of bytes"
        return {"label": label, "css": css, "width": width, "note": note, **counts}

    dropped = [step(f"− {reason.replace('_', ' ')}", counts, "dropped") for reason, counts in funnel["dropped"].items()]
    return [
        step("in", whole, ""),
        *dropped,
        step("− quarantined", funnel["quarantined"], "dropped"),
        step("kept", funnel["kept"], "kept"),
    ]


def _corpus_facts(funnel: dict[str, Any], result: dict[str, Any]) -> list[tuple[str, str]]:
    masked = [f"{figures.count(n)} {kind}" for kind, n in funnel["pii"].items() if n]
    pairs = [("personal data masked", ", ".join(masked) or "none")]
    for split, name in (("train", "to train on"), ("val", "held out")):
        if f"{split}_documents" in result:
            documents, size = result[f"{split}_documents"], result[f"{split}_bytes"]
            pairs.append((name, f"{figures.count(documents)} documents, {figures.size(size)}"))
    return pairs


def tokens(stage: Path) -> Markup:
    """How much there is to train on and to judge with."""
    result = reading.result(stage)
    for event in reading.events(stage, "encoded"):
        counts = {f"{event['split']}_{k}": v for k, v in event.items() if isinstance(v, int)}
        result = counts | result
    pairs = []
    for split, name in (("train", "to train on"), ("val", "held out")):
        if f"{split}_tokens" in result:
            of = [figures.count(result[f"{split}_{unit}"]) + f" {unit}" for unit in ("tokens", "documents")]
            of += [figures.size(n)] if (n := result[f"{split}_bytes"]) else []  # prompts have no bytes to learn
            pairs.append((name, ", ".join(of)))
    if "train_tokens" in result and "val_tokens" in result:
        both = result["train_tokens"] + result["val_tokens"]
        pairs.append(("held-out share", figures.share(result["val_tokens"], both) + " of tokens"))
    words: dict[str, tuple[str, Callable[[Any], str]]] = {
        "bytes_per_token": ("bytes per predicted token", lambda n: f"{n:.3f}"),
        "trained_share": ("tokens trained on", lambda n: f"{100 * n:.1f} %"),
        "val_unknown_share": ("held-out tokens that are unknown", lambda n: f"{100 * n:.2f} %"),
    }
    return render("facts.html", pairs=pairs + figures.named(result, words), tokens=[], heading="")


def fisher(stage: Path) -> Markup:
    """How much a model's predictions hang on its weights, and how well so many samples know it."""
    result = reading.result(stage)
    words: dict[str, tuple[str, Callable[[Any], str]]] = {
        "samples": ("rows squared", figures.count),
        "tokens": ("labelled tokens in them", figures.count),
        "mean": ("mean importance of a weight", lambda n: f"{n:.3e}"),
        "max": ("largest", lambda n: f"{n:.3e}"),
        "zero_share": ("weights that nothing hangs on", lambda n: f"{100 * n:.1f} %"),
    }
    pairs = figures.named(result, words)
    if "trace" in result:
        low, high = result["trace_low"], result["trace_high"]
        pairs.append(("sum over all weights", f"{result['trace']:.4g}, 95 % {low:.4g} to {high:.4g}"))
    return render("facts.html", pairs=pairs, tokens=[], heading="")


def scalars(stage: Path) -> Markup:
    """A kind without a panel of its own: its result as it is."""
    pairs = [(name, figures.value(number)) for name, number in reading.result(stage).items()]
    return render("facts.html", pairs=pairs, tokens=[], heading="")


def panel(kind: str, stage: Path) -> Markup:
    """A stage's panel, by its kind (`Kind.panel`)."""
    return load(KINDS[kind].panel if kind in KINDS else f"{__name__}:scalars")(stage)
