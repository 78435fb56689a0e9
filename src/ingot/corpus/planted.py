"""Planted truth: how much of what a recipe should remove it does remove, measured on the corpus itself.

Documents of the finished corpus are chosen by hash and damaged in known ways: near-copies with a known fraction of
words changed, scrambled letters, shuffled words, a repeated paragraph, boilerplate, insults. This shadow copy goes
through the same `prepare` and the same comparison of documents; the corpus itself is only read.

    recall      planted documents that are removed, as a fraction
    precision   removed documents that were planted, as a fraction; the others are undamaged ones that should stay

For copies, those that should stay are the chosen documents and versions with half of their words changed; for damaged
text, the second halves of two chosen documents: real text of their length that no filter has passed before.
"""

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ingot.core.artifact import atomic_json
from ingot.corpus.dedup import EXACT_DUPLICATE, rows_of
from ingot.corpus.documents import read_documents
from ingot.corpus.minhash import find
from ingot.corpus.near_duplicates import NEAR_DUPLICATE, SIGNATURE, preference
from ingot.corpus.pieces import mix
from ingot.corpus.prepare import Loaded, prepare
from ingot.corpus.readers.file_reader import RAW
from ingot.corpus.rules import KEY
from ingot.corpus.settings import CorpusSettings

PLANTED = "planted.json"
"""File of a corpus stage: recall and precision by kind."""
MIN_BYTES, MAX_BYTES = 400, 50_000
"""Sizes of the documents that are damaged: a shorter one has too few words to change 1 % of them."""
_BATCH = 200
_BOILERPLATE = (
    "We use cookies to improve your experience. Accept all cookies | Manage preferences",
    "Home | About us | Contact | Careers | Press | Sitemap",
    "All rights reserved. Terms of use | Privacy policy | Imprint",
    "Subscribe to our newsletter! Enter your e-mail address and click here",
    "Share this page on social media | Print | Send to a friend",
    "Please enable JavaScript in your browser to view this page",
    "Log in | Register | Forgot your password?",
    "Read more ... Previous | Next | Back to top",
)
_INSULTS = ("you stupid idiot", "shut up, moron", "you worthless bastard", "go to hell, asshole", "fuck you, scum")


class Text(NamedTuple):
    """A document to damage."""

    words: list[str]
    spaces: list[str]
    """White space behind each word, so that lines and paragraphs stay."""
    others: "Text | None" = None
    """Another document."""

    def joined(self, words: Sequence[str]) -> str:
        """Words with the white space of this document, from its beginning again if there are more."""
        return "".join(word + space for word, space in zip(words, itertools.cycle(self.spaces), strict=False)).strip()


Damage = Callable[[Text, random.Random], str]
"""(document, random numbers) -> the planted text."""


def _edited(fraction: float) -> Damage:
    def damage(text: Text, draw: random.Random) -> str:
        assert text.others
        words = list(text.words)
        for at in draw.sample(range(len(words)), max(1, round(fraction * len(words)))):
            words[at] = draw.choice(text.others.words)
        return text.joined(words)

    return damage


def _shifted(text: Text, draw: random.Random) -> str:
    return Text(text.words[1:], text.spaces[1:]).joined(text.words[1:])


def _scrambled(text: Text, draw: random.Random) -> str:
    return text.joined(["".join(draw.sample(word, len(word))) for word in text.words])


def _shuffled(text: Text, draw: random.Random) -> str:
    return text.joined(draw.sample(text.words, len(text.words)))


def _repeated(text: Text, draw: random.Random) -> str:
    return "\n\n".join([" ".join(text.words[:30])] * max(2, len(text.words) // 30))


def _boilerplate(text: Text, draw: random.Random) -> str:
    lines = itertools.accumulate(draw.choices(_BOILERPLATE, k=len(text.words)), lambda page, line: f"{page}\n{line}")
    return next(page for page in lines if len(page.split()) >= len(text.words))


def _insulting(text: Text, draw: random.Random) -> str:
    words = [f"{word}, {draw.choice(_INSULTS)}" if i % 8 == 7 else word for i, word in enumerate(text.words)]
    return text.joined(words)


def _halves(text: Text, draw: random.Random) -> str:
    """Real text that no filter has seen as a document: the second halves of two."""
    assert text.others
    halves = [each.joined(each.words)[len(each.joined(each.words)) // 2 :] for each in (text, text.others)]
    return "\n\n".join(halves)


COPIES: dict[str, Damage] = {
    "copy": lambda text, draw: text.joined(text.words),
    "copy_shifted": _shifted,
    "copy_1_percent": _edited(0.01),
    "copy_5_percent": _edited(0.05),
    "copy_15_percent": _edited(0.15),
}
"""Kind -> near-copy of a document."""
DAMAGES: dict[str, Damage] = {
    "scrambled_letters": _scrambled,
    "shuffled_words": _shuffled,
    "repeated_paragraph": _repeated,
    "boilerplate": _boilerplate,
    "insults": _insulting,
}
"""Kind -> text that nobody wants."""
_UNLIKE: Damage = _edited(0.5)


def check(settings: CorpusSettings, loaded: Loaded, out: Path, number: int) -> dict[str, float]:
    """Plant `number` documents of each kind in a copy of the corpus in `out`, and write `PLANTED`.

    Returns:
        planted_KIND_recall and planted_KIND_precision, for the stage's result. Nothing if no document is long enough.
    """
    base = chosen(out, number)
    if base.num_rows < 2:
        return {}
    kinds = {kind: _find_copies(base, kind, settings, loaded) for kind in COPIES}
    halves = _prepared(plant(base, "halves", _halves), settings, loaded)
    wrong = halves.num_rows - halves["drop_reason"].null_count
    for kind, damage in DAMAGES.items():
        reasons = _prepared(plant(base, kind, damage), settings, loaded)["drop_reason"].drop_null().to_pylist()
        kinds[kind] = _row(base.num_rows, Counter(reasons), wrong)
    atomic_json(out / PLANTED, {"documents": base.num_rows, "kinds": kinds})
    return {
        f"planted_{kind}_{name}": row[name]
        for kind, row in kinds.items()
        for name in ("recall", "precision")
        if row[name] is not None
    }


def chosen(out: Path, number: int) -> pa.Table:
    """Documents of a corpus (columns of `RAW` and `cluster`), chosen by the hash of their text."""
    clusters = [np.zeros(0, np.uint64)]
    for batch in read_documents(out, columns=["cluster", "bytes"]):
        sizes = batch["bytes"].to_numpy()
        clusters.append(batch["cluster"].to_numpy()[(sizes >= MIN_BYTES) & (sizes <= MAX_BYTES)])
    unique = np.unique(np.concatenate(clusters))
    wanted = unique[np.argsort(mix(unique.copy()), kind="stable")[:number]]
    tables = [pa.table({name: pa.array([], type) for name, type in zip(_COLUMNS, _TYPES, strict=True)})]
    for batch in read_documents(out, columns=_COLUMNS):
        rows = np.isin(batch["cluster"].to_numpy(), wanted)
        if rows.any():
            tables.append(pa.Table.from_batches([batch.filter(pa.array(rows))]))
    found = pa.concat_tables(tables)
    _, first = np.unique(found["cluster"].to_numpy(), return_index=True)  # `repeat` writes a document several times
    return found.take(np.sort(first))


_COLUMNS = [*RAW.names, "cluster"]
_TYPES = [*RAW.types, pa.uint64()]


def plant(base: pa.Table, kind: str, damage: Damage) -> pa.Table:
    """Each document, damaged; what is drawn depends on the document and the kind alone."""
    texts = [_parsed(text) for text in base["text"].to_pylist()]
    planted = [
        damage(text._replace(others=other), random.Random(f"{cluster} {kind}"))
        for text, other, cluster in zip(texts, [*texts[1:], *texts[:1]], base["cluster"].to_pylist(), strict=True)
    ]
    return base.set_column(0, "text", pa.array(planted, pa.string()))


def _parsed(text: str) -> Text:
    words, spaces = zip(*re.findall(r"(\S+)(\s*)", text), strict=True)
    return Text(list(words), [*spaces[:-1], spaces[-1] or "\n"])


def _prepared(documents: pa.Table, settings: CorpusSettings, loaded: Loaded) -> pa.Table:
    raw = documents.select(RAW.names)
    parts = [raw.slice(first, _BATCH).combine_chunks() for first in range(0, raw.num_rows, _BATCH)]
    return pa.concat_tables([prepare(part, settings, loaded) for part in parts])


def _find_copies(base: pa.Table, kind: str, settings: CorpusSettings, loaded: Loaded) -> dict[str, Any]:
    """Compare the documents, their copies, and versions with half of the words changed."""
    number = base.num_rows
    tables = [base, plant(base, "unlike", _UNLIKE), plant(base, kind, COPIES[kind])]
    prepared = _prepared(pa.concat_tables(tables), settings, loaded)
    labels = np.arange(3 * number)
    exact = np.zeros(number, bool)
    if settings.dedup.exact:
        keys = prepared[KEY].to_pylist()
        first = dict(reversed([*zip(keys, labels.tolist(), strict=True)]))
        labels = np.array([first[key] for key in keys])
        exact = labels[2 * number :] == labels[:number]
    if settings.dedup.minhash:
        signatures = rows_of(prepared[SIGNATURE]).view(np.uint32)
        match = find(signatures, preference(prepared, settings.dedup.minhash), settings.dedup.minhash)
        labels = np.where(labels == np.arange(len(labels)), match.kept_for, match.kept_for[labels])
    near = (labels[2 * number :] == labels[:number]) & ~exact
    wrong = 2 * number - len(np.unique(labels[: 2 * number]))
    found = Counter({EXACT_DUPLICATE: int(exact.sum()), NEAR_DUPLICATE: int(near.sum())})
    return _row(number, +found, wrong)


def _row(planted: int, reasons: Counter[str], wrong: int) -> dict[str, Any]:
    found = reasons.total()
    precision = round(found / (found + wrong), 4) if found + wrong else None
    named = dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))
    recall = round(found / planted, 4)
    return {
        "planted": planted,
        "found": found,
        "recall": recall,
        "wrong": wrong,
        "precision": precision,
        "reasons": named,
    }
