"""What a corpus of conversations, pairs or prompts asks for: kinds of instructions, turns, lengths, repeated prompts.

An instruction is the first message of a user. It is of the first kind in `KINDS` whose pattern it matches, so the
counts add up to all documents. The patterns are English; other languages are mostly `question` or `other`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ingot.core.artifact import atomic_json
from ingot.corpus.contamination import Items, contained
from ingot.corpus.contents import plain_texts
from ingot.corpus.documents import messages_of, read_documents
from ingot.corpus.settings import CorpusSettings

INSTRUCTIONS = "instructions.json"
"""File of a corpus stage of another format than `text`."""
_LANGUAGES = (
    "english|french|spanish|german|italian|portuguese|russian|chinese|japanese|korean|arabic|hindi|latin|dutch|swedish"
)
KINDS: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "translation": rf"\btranslat\w*\b|\b(?:say|write|put)\b.{{0,80}}\b(?:in|into) (?:{_LANGUAGES})\b",
        "code": r"```|\b(?:python|javascript|java|c\+\+|html|css|sql|bash|regex|regular expression|json)\b|"
        r"\b(?:write|implement|debug|refactor|fix)\b.{0,40}\b(?:function|code|program|script|class|query|bug)\b",
        "summary": r"\bsummar(?:y|i[sz]e\w*|i[sz]ing)\b|\btl;?dr\b|"
        r"\bmain (?:points?|ideas?)\b|\bshorten\b|\bin brief\b",
        "classification": r"\bclassif\w+|\bcategori[sz]e\w*|\bsentiment\b|\bwhich (?:category|class|label|type)\b|"
        r"\b(?:identify|determine|decide|tell|is|are)\b.{0,80}\b(?:whether|true or false|positive or negative|spam)\b|"
        r"\b(?:true or false|odd one out|part of speech)\b",
        "creative": r"\b(?:write|compose|create|invent|tell|make up|come up with)\b.{0,40}"
        r"\b(?:story|stories|poem|haiku|song|lyrics|limerick|joke|slogan|tagline|dialogue|screenplay|novel|fable|"
        r"metaphor|simile|riddle)s?\b|\b(?:imagine|pretend|role-?play)\b",
        "maths": r"\b(?:calculate|comput(?:e|ation)|solve|equation|integral|derivative|probability|percentage|"
        r"fraction|square root|area of|perimeter|volume of|convert \d|prime|factori[sz]e|average of|sum of)\b|"
        r"\d\s*[-+*/×÷^=]\s*\d|\bhow (?:many|much|far|old|long|fast)\b(?=[\s\S]*\d)|"
        r"\d[\s\S]*\bhow (?:many|much|far|old|long)\b",
        "rewriting": r"\b(?:rewrite|rephrase|paraphrase|reword|edit|correct|proofread|improve|simplify|convert|"
        r"transform|change|replace|reformulate|punctuate|fix|turn|combine|rearrange)\b",
        "question": r"\?|^\W*(?:what|who|whom|whose|when|where|why|which|how|is|are|was|were|do|does|did|can|could|"
        r"should|would|will|name|explain|describe|define|list|give|provide)\b",
    }.items()
}
"""Kind -> pattern, in the order of precedence."""
OTHER = "other"
_REFUSAL = re.compile(
    r"^\W*(?:i(?:['’]m| am) (?:really |very |so )?(?:sorry|afraid|unable|not able)|sorry\b|i (?:can(?:no|['’])t|"
    r"won['’]t|will not|do not feel comfortable)\b|as an? (?:ai|language model|assistant)\b|unfortunately,? i can)",
    re.IGNORECASE,
)
_EXAMPLE, _READ = 300, 4000
"""Characters of an example, and of an instruction that patterns look at."""


def kind_of(instruction: str) -> str:
    """The kind of an instruction: a key of `KINDS`, or `other`."""
    head = instruction[:_READ]
    return next((name for name, pattern in KINDS.items() if pattern.search(head)), OTHER)


def is_refusal(answer: str) -> bool:
    """Whether an answer begins by declining."""
    return _REFUSAL.match(answer[:200]) is not None


def describe(settings: CorpusSettings, out: Path, contaminated: int, items: Items | None) -> None:
    """Describe the documents in `out` and write `INSTRUCTIONS`.

    Args:
        settings: the stage's settings, of a format other than `text`.
        out: the stage's directory.
        contaminated: documents that were dropped because they contain an item of an evaluation.
        items: of evaluations to count in the documents (`overlap_with`).
    """
    kinds, examples, prompts = Counter[str](), dict[str, str](), Counter[str]()
    counts, turns = Counter[str](), Counter[int]()
    prompt_words: list[int] = []
    answer_words: list[int] = []
    languages: Counter[str] = Counter()
    for document, language in _unique(out, settings):
        messages = messages_of(document)
        users = [m["content"] for m in messages if m["role"] == "user"]
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        instruction = users[0] if users else ""
        kind = kind_of(instruction)
        kinds[kind] += 1
        examples.setdefault(kind, instruction[:_EXAMPLE])
        prompts[" ".join(instruction.lower().split())] += 1
        turns[len(users)] += 1
        counts["documents"] += 1
        counts["multi_turn"] += len(users) > 1 and settings.format != "pairs"
        counts["system"] += any(m["role"] == "system" for m in messages)
        counts["refusals"] += any(map(is_refusal, answers))
        prompt_words.append(len(instruction.split()))
        answer_words += [len(answer.split()) for answer in answers]
        languages.update([language] if language else [])
    found = _overlap(out, settings, items) if items else None
    total = counts["documents"]
    repeated = total - len(prompts)
    facts = {
        "documents": f"{total:,}",
        "conversations of several turns": _of(counts["multi_turn"], total),
        "most users' turns": f"{max(turns, default=0):,}",
        "with a system prompt": _of(counts["system"], total),
        "with an answer that refuses": _of(counts["refusals"], total),
        "words of an instruction (10 %, median, 90 %)": _quantiles(prompt_words),
        "words of an answer (10 %, median, 90 %)": _quantiles(answer_words),
        "instructions that occurred before": _of(repeated, total),
        "languages": ", ".join(f"{name} {n:,}" for name, n in languages.most_common(8))
        or "not told apart: set languages",
        "items of evaluations": f"{contaminated:,} documents removed" if settings.decontaminate else "not searched for",
    }
    if found:
        removed = f"{facts['items of evaluations']}; " if settings.decontaminate else ""
        facts["items of evaluations"] = (
            f"{removed}{_of(found['documents'], total)} kept documents contain one of "
            f"{', '.join(settings.overlap_with or ())} ({len(found['items']):,} different ones)"
        )
    table = {name: {"documents": kinds[name], "example": examples[name]} for name in (*KINDS, OTHER) if kinds[name]}
    atomic_json(
        out / INSTRUCTIONS,
        {
            "kinds": table,
            "facts": facts,
            "counts": {**counts, "repeated_prompts": repeated},
            "turns": dict(sorted(turns.items())),
            **({"overlap": found} if found else {}),
        },
    )


def _overlap(out: Path, settings: CorpusSettings, items: Items) -> dict[str, Any]:
    """The documents that contain an item of an evaluation: their number, and for each item how many and where first."""
    places: dict[str, dict[tuple[str, str, int], None]] = {}
    for batch in read_documents(out, columns=["text", "source", "path", "offset"]):
        which = contained(plain_texts(pl.Series(batch["text"]), settings.format), items)
        rows = np.flatnonzero(which >= 0)
        found = zip(
            which[rows].tolist(), batch.select(["source", "path", "offset"]).take(rows).to_pylist(), strict=True
        )
        for item, place in found:  # copies that `repeat` makes have one place
            name: str = items.names[int(item)]
            places.setdefault(name, {})[place["source"], place["path"], place["offset"]] = None
    listed = {
        name: {"documents": len(each), "path": path, "offset": offset}
        for name, each in sorted(places.items())
        for _, path, offset in [next(iter(each))]
    }
    return {"documents": sum(len(each) for each in places.values()), "items": listed, "too_short": items.too_short}


def _unique(out: Path, settings: CorpusSettings) -> Iterator[tuple[Any, str | None]]:
    """Each document once, parsed, with its language; `repeat` writes copies behind all others."""
    repeats = any(source.repeat > 1 for source in settings.sources)
    seen: set[tuple[str, str, int]] = set()
    for batch in read_documents(out, columns=["text", "language", "source", "path", "offset"]):
        for row in batch.to_pylist():
            place = (row["source"], row["path"], row["offset"])
            if repeats and place in seen:
                continue
            if repeats:
                seen.add(place)
            yield json.loads(row["text"]), row["language"]


def _of(number: int, total: int) -> str:
    return f"{number:,} ({100 * number / max(1, total):.1f} %)"


def _quantiles(values: list[int]) -> str:
    if not values:
        return "none"
    return ", ".join(f"{value:,.0f}" for value in np.quantile(values, [0.1, 0.5, 0.9], method="nearest"))
