"""Panels of the page: a function (stage's directory) -> HTML for each kind, for finished and unfinished stages.

A panel reads only the directory, so it works for any stage of any run. A kind names its panel (`Kind.panel`); the
default lists the scalars of its result.
"""

import difflib
import re
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ingot.report import figures, reading
from ingot.report.html import panels_corpus
from ingot.report.html.rendering import render
from ingot.stages.kind import load
from ingot.stages.kinds import KINDS

_LANGUAGES = 8
"""Languages of documents that are counted by name."""


def corpus(stage: Path) -> Markup:
    """The funnel of documents: in - dropped (by reason) - quarantined = kept; with samples."""
    funnel = reading.read_json(stage / "funnel.json")
    return render(
        "corpus.html",
        funnel=funnel,
        steps=_funnel_steps(funnel) if funnel else [],
        pairs=_corpus_facts(funnel, reading.result(stage)) if funnel else [],
        samples=reading.dropped_samples(stage),
        near=_near_duplicates(stage),
        contamination=reading.contamination(stage),
        quarantined=reading.quarantined(stage),
        **panels_corpus.rule_parts(stage),
    )


def _near_duplicates(stage: Path) -> dict[str, Any]:
    """Clusters, and pairs with the words that differ marked."""
    near = reading.near_duplicates(stage)
    for pair in near.get("pairs", []):
        pair["marked"] = marked_differences(pair["kept_text"], pair["text"])
    return near


def marked_differences(kept: str, dropped: str) -> tuple[Markup, Markup]:
    """Both texts as HTML; words that the other one has not are marked."""
    sides = [re.split(r"(\s+)", text) for text in (kept, dropped)]
    out: list[list[Markup]] = [[], []]
    for tag, a, b, c, d in difflib.SequenceMatcher(None, *sides, autojunk=False).get_opcodes():
        for side, words in zip(out, (sides[0][a:b], sides[1][c:d]), strict=True):
            text = Markup.escape("".join(words))
            side.append(text if tag == "equal" or not words else Markup("<mark>{}</mark>").format(text))
    return Markup("").join(out[0]), Markup("").join(out[1])


def _funnel_steps(funnel: dict[str, Any]) -> list[dict[str, Any]]:
    total = funnel["in"]

    def step(label: str, counts: dict[str, int], css: str) -> dict[str, Any]:
        width = 100 * counts["documents"] / max(1, total["documents"])
        note = f"{figures.percentage(counts['documents'], total['documents'])} of documents, "
        note += f"{figures.percentage(counts['bytes'], total['bytes'])} of bytes"
        return {"label": label, "css": css, "width": width, "note": note, **counts}

    dropped = [step(f"− {reason.replace('_', ' ')}", counts, "dropped") for reason, counts in funnel["dropped"].items()]
    return [
        step("in", total, ""),
        *dropped,
        step("− quarantined", funnel["quarantined"], "dropped"),
        step("kept", funnel["kept"], "kept"),
    ]


def _corpus_facts(funnel: dict[str, Any], result: dict[str, Any]) -> list[tuple[str, str]]:
    masked = [f"{figures.count(n)} {kind}" for kind, n in funnel["pii"].items() if n]
    pairs = [("personal data masked", ", ".join(masked) or "none")]
    pairs += [(name.replace("_", " "), figures.count(n)) for name, n in funnel.get("lines", {}).items()]
    for split, name in (("train", "training split"), ("val", "held-out split")):
        if f"{split}_documents" in result:
            documents, size = result[f"{split}_documents"], result[f"{split}_bytes"]
            pairs.append((name, f"{figures.count(documents)} documents, {figures.size(size)}"))
    if result.get("val_bytes"):
        pairs.append(("held-out fraction", figures.percentage(result["val_bytes"], result["bytes"]) + " of the text"))
    if languages := funnel.get("languages"):
        most = [f"{name} {figures.count(n)}" for name, n in list(languages.items())[:_LANGUAGES]]
        more = f" and {len(languages) - _LANGUAGES} more" if len(languages) > _LANGUAGES else ""
        pairs.append(("languages of documents", ", ".join(most) + more))
    return pairs


def tokens(stage: Path) -> Markup:
    """Sizes of both splits of a tokens stage."""
    result = reading.result(stage)
    for event in reading.events(stage, "encoded"):
        counts = {f"{event['split']}_{k}": v for k, v in event.items() if isinstance(v, int)}
        result = counts | result
    pairs = []
    for split, name in (("train", "training split"), ("val", "held-out split")):
        if f"{split}_tokens" in result:
            sizes = [figures.count(result[f"{split}_{unit}"]) + f" {unit}" for unit in ("tokens", "documents")]
            sizes += [figures.size(n)] if (n := result[f"{split}_bytes"]) else []  # a corpus of prompts has 0
            pairs.append((name, ", ".join(sizes)))
    if "train_tokens" in result and "val_tokens" in result:
        both = result["train_tokens"] + result["val_tokens"]
        pairs.append(("held-out fraction", figures.percentage(result["val_tokens"], both) + " of tokens"))
    formats: figures.Formats = {
        "bytes_per_token": ("bytes per predicted token", lambda n: f"{n:.3f}"),
        "trained_fraction": ("tokens trained on", lambda n: f"{100 * n:.1f} %"),
        "train_refused": ("training conversations refused by the chat template", figures.count),
        "val_refused": ("held-out conversations refused by the chat template", figures.count),
        "val_unknown_fraction": ("unknown tokens, held-out", lambda n: f"{100 * n:.2f} %"),
        "changed_fraction": ("texts of a sample that decoding changes", lambda n: f"{100 * n:.2f} %"),
    }
    return render("facts.html", pairs=pairs + figures.labelled(result, formats), tokens=[], heading="")


def fisher(stage: Path) -> Markup:
    """Statistics of the Fisher information over weights, with the interval of its trace."""
    result = reading.result(stage)
    formats: figures.Formats = {
        "samples": ("rows", figures.count),
        "tokens": ("labelled tokens", figures.count),
        "mean": ("mean Fisher information of a weight", lambda n: f"{n:.3e}"),
        "max": ("largest", lambda n: f"{n:.3e}"),
        "zero_fraction": ("weights without Fisher information", lambda n: f"{100 * n:.1f} %"),
    }
    pairs = figures.labelled(result, formats)
    if "trace" in result:
        low, high = result["trace_low"], result["trace_high"]
        pairs.append(("sum over all weights", f"{result['trace']:.4g}, 95 % {low:.4g} to {high:.4g}"))
    return render("facts.html", pairs=pairs, tokens=[], heading="")


def scalars(stage: Path) -> Markup:
    """The default panel: all scalars of the result."""
    pairs = [(name, figures.value(number)) for name, number in reading.result(stage).items()]
    return render("facts.html", pairs=pairs, tokens=[], heading="")


def panel(kind: str, stage: Path) -> Markup:
    """The panel of a stage; an unknown kind gets the default panel."""
    return load(KINDS[kind].panel if kind in KINDS else f"{__name__}:scalars")(stage)
