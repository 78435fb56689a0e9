"""The published quality rules of Gopher, C4 and FineWeb, as filters for a recipe: `filters = ["gopher_quality"]`.

A set measures a batch and has a table of rules, one line a rule: the reason, the measure, and the bound that a document
to keep does not cross. Each document is dropped for the first rule that it breaks. To change a bound, copy the table
into a filter of your own.

The rules are for English prose. Source code and other languages break most of them for no fault of theirs, so they are
not judged (`is_judged`).

    Gopher quality     Rae et al. 2021, arXiv:2112.11446, section A1.1
    Gopher repetition  the same, table A1
    C4                 Raffel et al. 2020, JMLR 21(140), section 2.2; only what drops a document: lines that C4 would
                       remove do not count as sentences, but stay in the text
    FineWeb            Penedo et al. 2024, arXiv:2406.17557, section 3.4
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from ingot.corpus.measures import (
    REPEATED,
    Chunk,
    Measures,
    in_chunks,
    is_unspaced,
    quality,
    repetition,
    web_lines,
    web_sentences,
)
from ingot.corpus.readers.suffixes import CODE_SUFFIXES
from ingot.corpus.rules import Rule

JUDGED = "_judged"
"""Column with the answer of `is_judged`, where it was asked before."""


def is_judged(documents: pl.DataFrame) -> pl.Series:
    """Whether the rules are made for a document: no file of source code, and in English.

    Without the setting `languages`, only scripts without blanks between words are known not to be English.
    """
    english = (documents["language"] == "en").fill_null(~is_unspaced(documents["text"]))
    return english & ~is_code(documents["path"])


def is_code(paths: pl.Series) -> pl.Series:
    """Whether a file's suffix is that of source code."""
    suffix = paths.str.extract(r"(\.[A-Za-z0-9]+)$").str.to_lowercase()
    return suffix.is_in(list(CODE_SUFFIXES)).fill_null(False)


class RuleSet(NamedTuple):
    """Rules that share their measures."""

    name: str
    measure: Callable[[Chunk], Measures]
    rules: Mapping[str, Rule]

    def full_name(self, measure: str) -> str:
        """The name of a measure beside those of other sets."""
        return f"{self.name}.{measure}"

    @property
    def measures(self) -> list[str]:
        """Full names of the measures that the rules read."""
        return [*dict.fromkeys(self.full_name(rule.measure) for rule in self.rules.values())]


class RuleSets(NamedTuple):
    """A filter (`filters.py`) of several sets, which share the words and lines of a document."""

    sets: Sequence[RuleSet]

    @property
    def rules(self) -> dict[str, Rule]:
        """Reason -> rule, with the full name of its measure, in order."""
        return {
            reason: rule._replace(measure=one.full_name(rule.measure))
            for one in self.sets
            for reason, rule in one.rules.items()
        }

    def measures(self, documents: pl.DataFrame) -> Measures:
        """Full name -> value of each document, NaN for one that is not judged."""
        judged = documents[JUDGED] if JUDGED in documents.columns else is_judged(documents)
        rows = judged.arg_true()
        out = {name: np.full(len(documents), np.nan) for one in self.sets for name in one.measures}
        first = 0
        for chunk in in_chunks(documents["text"].gather(rows)):
            own = rows[first : first + len(chunk.texts)].to_numpy()
            for one in self.sets:
                values = one.measure(chunk)
                for measure in {rule.measure for rule in one.rules.values()}:
                    out[one.full_name(measure)][own] = values[measure]
            first += len(chunk.texts)
        return out


GOPHER_QUALITY = RuleSet(
    "gopher_quality",
    quality,
    {
        "gopher_few_words": Rule("words", least=50),
        "gopher_many_words": Rule("words", most=100_000),
        "gopher_short_words": Rule("word_length", least=3),
        "gopher_long_words": Rule("word_length", most=10),
        "gopher_hashes": Rule("hashes_per_word", most=0.1),
        "gopher_ellipses": Rule("ellipses_per_word", most=0.1),
        "gopher_bullet_lines": Rule("bullet_lines", most=0.9),
        "gopher_ellipsis_lines": Rule("ellipsis_lines", most=0.3),
        "gopher_words_without_letters": Rule("words_with_letters", least=0.8),
        "gopher_few_stop_words": Rule("stop_words", least=2),
    },
)

GOPHER_REPETITION = RuleSet(
    "gopher_repetition",
    repetition,
    {
        "gopher_repeated_paragraphs": Rule("repeated_paragraphs", most=0.30),
        "gopher_repeated_paragraph_characters": Rule("repeated_paragraph_characters", most=0.20),
        "gopher_repeated_lines": Rule("repeated_lines", most=0.30),
        "gopher_repeated_line_characters": Rule("repeated_line_characters", most=0.20),
        "gopher_top_2_words": Rule("top_2_words", most=0.20),
        "gopher_top_3_words": Rule("top_3_words", most=0.18),
        "gopher_top_4_words": Rule("top_4_words", most=0.16),
        **{f"gopher_repeated_{n}_words": Rule(f"repeated_{n}_words", most=most) for n, most in REPEATED.items()},
    },
)

C4 = RuleSet(
    "c4",
    web_sentences,
    {
        "c4_lorem_ipsum": Rule("lorem_ipsum", most=0),
        "c4_brackets": Rule("brackets", most=0),
        "c4_few_sentences": Rule("sentences", least=5),
    },
)

FINEWEB = RuleSet(
    "fineweb",
    web_lines,
    {
        "fineweb_lines_without_end": Rule("lines_with_an_end", least=0.12),
        "fineweb_short_lines": Rule("short_lines", most=0.67),
        "fineweb_repeated_characters": Rule("repeated_characters", most=0.01),
        "fineweb_lines_per_word": Rule("lines_per_word", most=0.3),
    },
)

RULE_SETS: dict[str, RuleSet] = {one.name: one for one in (GOPHER_QUALITY, GOPHER_REPETITION, C4, FINEWEB)}
