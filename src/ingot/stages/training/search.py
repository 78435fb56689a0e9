"""Finds a text in the data that a model was trained on, and the steps at which it was seen. No torch.

All corpora of a train stage are searched, their held-out text included, and those of the stages that its model was
started from. A text that a corpus does not contain is searched there once more as cleaning leaves it: with personal
data masked, characters repaired and line ends changed, as the settings of the corpus say.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from ingot.core.errors import UserError
from ingot.core.events import Display
from ingot.corpus.contents import clean_documents
from ingot.corpus.pii import KINDS
from ingot.corpus.settings import CorpusSettings
from ingot.stages.job import in_role, inputs_of, read_record
from ingot.stages.models.lineage import lineage
from ingot.stages.training.data import Data
from ingot.stages.training.timeline import Timeline
from ingot.stages.training.trace import open_training_data, steps_of
from ingot.store.reader import ANSWERS
from ingot.store.search import Place, SearchIndex, open_index
from ingot.tokenizer.byte_bpe import Tokenizer

CONTEXT_BYTES = 80
"""Text that is shown before and after a place."""
WORD = re.compile(r"[^\W\u3000-\u9fff]+(?:['’][^\W\u3000-\u9fff]+)*|(?=\w)[\u3000-\u9fff]")
"""A word. Chinese and Japanese characters are words by themselves, as in `corpus/minhash.py`."""


class Part(NamedTuple):
    """A part of a text, from character `first` to `last` (exclusive), that is in the training data and that no longer
    part contains."""

    first: int
    last: int
    words: int


@dataclass(frozen=True)
class _Stage:
    """A train stage."""

    name: str
    """In the recipe."""
    data: Data
    timeline: Timeline

    def steps(self, corpus: str, document: int, tokens: tuple[int, int]) -> list[int]:
        return steps_of(self.data, self.timeline, self.data.names.index(corpus), document, tokens)


@dataclass(frozen=True)
class _Split:
    """The training documents or the held-out documents of a corpus."""

    corpus: str
    held_out: bool
    index: SearchIndex
    tokenizer: Tokenizer
    clean: Callable[[str], str]
    """Cleans a text as the documents were cleaned."""
    masks: bool
    """Whether personal data was masked."""
    stages: list[_Stage] = field(default_factory=list)
    """The stages that use it, the newest first."""

    def places(self, phrase: str) -> Iterator[Place]:
        return self.index.places(phrase.encode())


class TrainingSearch:
    """The training data of a model, indexed.

    Args:
        stage: directory of a train stage.
        display: shows the progress of indexing, which the first search needs.

    Raises:
        UserError: not a train stage, or an index cannot be built.
    """

    def __init__(self, stage: Path, display: Display):
        if (kind := read_record(stage)["kind"]) != "train":
            raise UserError(f"{stage}: is a {kind} stage, expected a train stage, such as runs/NAME/base")
        by_store: dict[Path, _Split] = {}
        for ancestor in lineage(stage):
            if read_record(ancestor)["kind"] != "train":
                display.notify(f"{ancestor}: not searched, because the training data of an imported model are unknown")
                continue
            try:
                _add_splits(ancestor, by_store, display)
            except UserError as error:
                if not by_store:
                    raise
                display.notify(f"{ancestor}: not searched: {error}")
        self._splits = [*by_store.values()]
        self.tokenizer = self._splits[0].tokenizer

    def as_stored(self, text: str) -> str:
        """The text as the tokenizer restores it, which loses something with some tokenizers."""
        return text if self.tokenizer.lossless else self.tokenizer.decode(self.tokenizer.encode(text))

    def find(self, text: str, min_words: int, limit: int | None) -> dict[str, Any]:
        """The places of a text, or else of its longest parts.

        Args:
            min_words: words of the shortest part.
            limit: the first places that are described, of the text or of each part; None: all.

        Returns:
            {text, min_words, count, places, parts}: the number of places and the first of them (`_describe`), by
            corpus; `parts` as `found_parts` returns them, empty where the text itself has places. `text` is as
            written, or as the cleaning of a corpus leaves it if more words of that are in parts.

        Raises:
            UserError: nothing to search for, or no UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("--text: found bytes that are no UTF-8, expected text in UTF-8; convert it") from None
        written, text = text, self.as_stored(text)
        if not text.strip():
            raise UserError("--text: found only blanks, expected words to search for")
        found = self._places(text, limit, written)
        parts: list[dict[str, Any]] = []
        if not found["count"]:
            forms = dict.fromkeys([text, *(self.as_stored(split.clean(written)) for split in self._splits)])
            text = max(forms, key=lambda form: sum(part.words for part in self.parts(form, min_words)))
            parts = self.found_parts(text, min_words, limit)
        return {"text": text, "min_words": min_words, **found, "parts": parts}

    def found_parts(self, text: str, min_words: int, limit: int | None) -> list[dict[str, Any]]:
        """`parts` with their text and places: {first, last, words, text, count, places}. Arguments as in `find`; the
        text as `as_stored` returns it, or as the model wrote it."""
        parts = [(part, text[part.first : part.last]) for part in self.parts(text, min_words)]
        return [{**part._asdict(), "text": piece, **self._places(piece, limit)} for part, piece in parts]

    def parts(self, text: str, min_words: int) -> list[Part]:
        """The longest parts of a text, in complete words, that are in the training data, in the order of the text.

        Args:
            text: as `as_stored` returns it.
            min_words: words of the shortest part.
        """
        words = [match.span() for match in WORD.finditer(text)]
        parts: list[Part] = []
        end = 0  # words before it are in the last part
        for number in range(len(words) - min_words + 1):
            first = words[number][0]
            rest = text[first:].encode()
            length = max(split.index.longest_prefix(rest) for split in self._splits)
            reached = first + len(rest[:length].decode(errors="ignore"))
            last = number
            while last < len(words) and words[last][1] <= reached:
                last += 1
            if last > end and last - number >= min_words:
                parts.append(Part(first, words[last - 1][1], last - number))
                end = last
        return parts

    def _places(self, text: str, limit: int | None, written: str | None = None) -> dict[str, Any]:
        """`count` and `places` of a text."""
        searched = [*self._searched(text, text if written is None else written)]
        places = (_describe(split, place, phrase) for split, phrase, _ in searched for place in split.places(phrase))
        return {"count": sum(count for _, _, count in searched), "places": [*itertools.islice(places, limit)]}

    def _searched(self, text: str, written: str) -> Iterator[tuple[_Split, str, int]]:
        """Each split that contains a text, with the form of the text that it contains and the number of places.

        Args:
            text: as `as_stored` returns it.
            written: what cleaning sees, before a tokenizer changes it.
        """
        for split in self._splits:
            count, phrase = split.index.count(text.encode()), text
            if not count and (phrase := self.as_stored(split.clean(written))) not in ("", text):
                count = split.index.count(phrase.encode())
            if count:
                yield split, phrase, count


def _add_splits(stage: Path, by_store: dict[Path, _Split], display: Display) -> None:
    """Add the splits of a train stage that are not among them yet, and the stage to all that it uses."""
    data, timeline, tokenizer = open_training_data(stage)
    used, inputs = _Stage(read_record(stage)["name"], data, timeline), in_role(inputs_of(stage), "data")
    cleaning = {name: _cleaning(tokens.path, display) for name, tokens in inputs.items()}
    for held_out, sources in ((False, data.train_sources), (True, data.held_out)):
        for source in sources:
            path = source.store.path.resolve()
            if path not in by_store:
                index, settings = open_index(source.store, tokenizer, display), cleaning[source.name]
                clean = lru_cache(partial(_cleaned, settings)) if settings else str
                masks = settings is not None and settings.pii
                by_store[path] = _Split(source.name, held_out, index, tokenizer, clean, masks)
            by_store[path].stages.append(used)


def _cleaning(tokens: Path, display: Display) -> CorpusSettings | None:
    """The settings of the corpus stage that a tokens stage's documents come from, where they come from one."""
    try:
        inputs = inputs_of(tokens)
        while source := inputs.get("corpus") or inputs.get("data"):
            record = read_record(source.path)
            if record["kind"] == "corpus":
                return CorpusSettings.model_validate(record["settings"])
            inputs = inputs_of(source.path)
    except UserError as error:  # what cleaning made of the documents is all here; how it did is not
        display.notify(f"{error}; texts are searched for as they are written, and not as they would be cleaned")
    return None


def _cleaned(settings: CorpusSettings, text: str) -> str:
    """The text as a corpus stage cleans it; "" where nothing is left of it."""
    prose = pl.Series([settings.quality != "code"])
    extras = pl.Series([None], dtype=pl.String)
    cleaned = clean_documents(pl.Series([text]), extras, prose, settings.model_copy(update={"format": "text"}))
    return cleaned.texts[0] if cleaned.reasons[0] is None else ""


def _describe(split: _Split, place: Place, text: str) -> dict[str, Any]:
    """A place of a text in a split.

    Returns:
        {corpus, held_out, answer, identity ..., before, text, after, first_token, tokens, steps, masked}: "chosen" or
        "rejected" of a pair, else ""; the text as it stands there and what is around it; tokens counted in the
        document; for each stage the steps whose batch contains some of these tokens; for each kind of personal data the
        number of its masks in the document.
    """
    index, store, length = split.index, split.index.store, len(text.encode())
    start, stop = index.tokens(place, length)
    if text.encode() not in split.tokenizer.decode_bytes(store.ids.read(start, stop)):
        raise UserError(f"{index.path}: does not agree with its store; delete that directory and search again")
    before, after = index.around(place, length, CONTEXT_BYTES)
    stages = [] if split.held_out else split.stages
    return {
        "corpus": split.corpus,
        "held_out": split.held_out,
        "answer": ANSWERS[place.document % 2] if store.content == "pairs" else "",
        **store.identity(place.document),
        "before": before,
        "text": text,
        "after": after,
        "first_token": start - store.span(place.document)[0],
        "tokens": stop - start,
        "steps": {stage.name: stage.steps(split.corpus, place.document, (start, stop)) for stage in stages},
        "masked": _masks(index.document_text(place.document)) if split.masks else {},
    }


def _masks(document: bytes) -> dict[str, int]:
    """Kind of personal data -> number of its marks in a document."""
    counts = {kind: document.count(mark.encode()) for kind, mark in KINDS.items()}
    return {kind: count for kind, count in counts.items() if count}
