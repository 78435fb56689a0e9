"""Document filters: quality measures with bounds, built-in filters, and filters from the user's own files.

To add a filter, write a function here and a line in `FILTERS`, or write it in a file of your own and name it in the
recipe as `"my_filters.py:too_shouty"`:

    def too_shouty(documents: pl.DataFrame) -> pl.Series:
        return documents["text"].str.count_matches("!") > 20

A filter gets the columns `text`, `source`, `path`, `group` (and those of `measure` if the recipe sets quality bounds)
and returns True for each document to drop; its name becomes the `drop_reason`. A filter of several rules returns the
reason as a string, or null. Filters with a measure and bounds are rules (`published_rules.py`).

Words are runs of non-blank characters. Chinese, Japanese, Thai, Lao, Khmer and Burmese have no blanks between words: in
these scripts each character counts as a word, repetition is measured on pairs of characters, and word length is not
bounded. A white-space split would count a page of Chinese as three words and drop it.
"""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import polars as pl

from ingot.core.errors import UserError, nearest
from ingot.core.functions import function_files, load_function
from ingot.corpus.dedup import squeeze
from ingot.corpus.measures import UNSPACED, is_unspaced
from ingot.corpus.published_rules import RULE_SETS, RuleSets
from ingot.corpus.rules import Rule
from ingot.corpus.settings import QualityBounds
from ingot.corpus.word_lists import WordLists

RULE_FILTERS = RuleSets | WordLists
"""Filters whose `measures` of documents are compared with the bounds of their `rules`."""
Filter = Callable[[pl.DataFrame], pl.Series] | RULE_FILTERS
"""Takes documents; returns for each True to drop it, or a reason (a string) to drop it for. Or rules with measures."""

QUALITY = "quality"
"""Name of the set of rules of `quality`."""
QUALITY_RULES: dict[str, Callable[[QualityBounds], Rule]] = {
    "too_few_words": lambda bounds: Rule("words", least=bounds.min_words),
    "too_many_words": lambda bounds: Rule("words", most=bounds.max_words),
    "words_too_short": lambda bounds: Rule("mean_word_length", least=bounds.min_mean_word_length),
    "words_too_long": lambda bounds: Rule("mean_word_length", most=bounds.max_mean_word_length),
    "too_many_special_characters": lambda bounds: Rule("special_fraction", most=bounds.max_special_fraction),
    "too_repetitive": lambda bounds: Rule("unique_word_fraction", least=bounds.min_unique_fraction),
}
"""Reason -> rule, in the order of the checks."""

SQUEEZED = "_squeezed"


def measure(documents: pl.DataFrame) -> pl.DataFrame:
    """Add columns `characters`, `words`, `mean_word_length`, `special_fraction` and `unique_word_fraction`.

    A measure is null where it does not apply to the script.

    Args:
        documents: with a column `text`; an optional column `_squeezed` holds `dedup.squeeze` of it.
    """
    if SQUEEZED not in documents.columns:
        documents = documents.with_columns(pl.Series(SQUEEZED, squeeze(documents["text"])))
    text, squeezed, words = pl.col("text"), pl.col(SQUEEZED), pl.col("words")
    special = text.str.count_matches(r"[^\p{Alphabetic}\p{M}\p{N}\s]")
    nonempty = squeezed != ""
    split = squeezed.str.split(" ")
    measured = (
        documents.with_columns(characters=text.str.len_chars(), _split=split)
        .with_columns(
            words=pl.when(nonempty).then(pl.col("_split").list.len()).otherwise(0).cast(pl.Int64),
            unique_word_fraction=pl.when(nonempty).then(pl.col("_split").list.n_unique()).otherwise(0),
        )
        .with_columns(
            special_fraction=special / pl.col("characters"),
            mean_word_length=(squeezed.str.len_chars() - (words - 1).clip(0)) / words,
            unique_word_fraction=pl.col("unique_word_fraction") / words,
        )
        .drop("_split", SQUEEZED)
    )
    return _measure_unspaced(measured)


def _measure_unspaced(documents: pl.DataFrame) -> pl.DataFrame:
    """Correct the measures of documents in scripts without blanks between words."""
    multibyte = (documents["text"].str.len_bytes() > documents["characters"]).arg_true()
    rows = multibyte.filter(documents["text"].gather(multibyte).str.contains(f"[{UNSPACED}]"))
    if not len(rows):
        return documents
    selected = documents[rows]
    texts = selected["text"]
    characters = texts.str.count_matches(f"[{UNSPACED}]")
    spaced = texts.str.replace_all(f"[{UNSPACED}]", " ")
    words = characters + spaced.str.count_matches(r"[\p{Alphabetic}\p{N}]\S*")
    mostly = is_unspaced(texts)
    unique = pl.Series(
        [_unique_pairs(text) if m else None for text, m in zip(texts, mostly, strict=True)], dtype=pl.Float64
    )
    new = {
        "words": words.cast(pl.Int64),
        "mean_word_length": mostly.replace_strict({True: None, False: 1.0}, return_dtype=pl.Float64)
        * selected["mean_word_length"],
        "unique_word_fraction": unique.fill_null(selected["unique_word_fraction"]),
    }
    return documents.with_columns(documents[name].scatter(rows, values) for name, values in new.items())


def _unique_pairs(text: str) -> float:
    pairs = max(len(text) - 1, 1)
    return len(set(itertools.pairwise(text))) / pairs


def quality_rules(bounds: QualityBounds) -> dict[str, Rule]:
    """Reason -> rule, with the full name of its measure."""
    rules = {reason: rule(bounds) for reason, rule in QUALITY_RULES.items()}
    return {reason: rule._replace(measure=f"{QUALITY}.{rule.measure}") for reason, rule in rules.items()}


def quality_measures(measured: pl.DataFrame) -> dict[str, np.ndarray]:
    """The measures of `quality` by full name; NaN where one does not apply to the script.

    Args:
        measured: documents, as `measure` returns them.
    """
    names = ("words", "mean_word_length", "special_fraction", "unique_word_fraction")
    return {f"{QUALITY}.{name}": measured[name].cast(pl.Float64).to_numpy() for name in names}


def lorem_ipsum(documents: pl.DataFrame) -> pl.Series:
    """Placeholder text of unfinished pages."""
    return documents["text"].str.contains("(?i)lorem ipsum dolor")


def generated_code(documents: pl.DataFrame) -> pl.Series:
    """Files whose first 1000 characters contain a notice that a program generated them."""
    head = documents["text"].str.slice(0, 1000)
    return head.str.contains(r"(?i)do not edit|@generated\b|auto-?(?:matically )?generated (?:by|from|file|code)")


FILTERS: dict[str, Filter] = {
    "lorem_ipsum": lorem_ipsum,
    "generated_code": generated_code,
    **{name: RuleSets([rule_set]) for name, rule_set in RULE_SETS.items()},
}


def load_filters(names: list[str]) -> dict[str, Filter]:
    """`drop_reason` -> filter, in the recipe's order.

    Args:
        names: keys of `FILTERS`, or "file.py:function".

    Raises:
        UserError: an unknown name, a missing or invalid file, a missing function, or two filters of one name.
    """
    filters: dict[str, Filter] = {}
    for name in names:
        reason, function = _load_filter(name)
        if reason in filters:
            raise UserError(f"filters: found two called '{reason}', expected different names; rename one of them")
        filters[reason] = function
    return _joined(filters)


def _joined(filters: dict[str, Filter]) -> dict[str, Filter]:
    """Published sets that follow each other as one filter, because they share the most costly measures."""
    joined: dict[str, Filter] = {}
    for name, function in filters.items():
        last = next(reversed(joined), "")
        before = joined.get(last)
        if isinstance(function, RuleSets) and isinstance(before, RuleSets):
            del joined[last]
            name, function = f"{last}, {name}", RuleSets([*before.sets, *function.sets])
        joined[name] = function
    return joined


def user_files(names: list[str]) -> list[Path]:
    """The files that determine the user's own filters. Their content is part of the stage's key."""
    return [file for name in names if ":" in name for file in function_files(name, "filters")]


def rules_of(filters: Mapping[str, Filter], bounds: QualityBounds | None) -> dict[str, Rule]:
    """Reason -> rule of all filters that have a measure, in the order of the checks."""
    rules = quality_rules(bounds) if bounds is not None else {}
    for function in filters.values():
        rules |= function.rules if isinstance(function, RULE_FILTERS) else {}
    return rules


def apply_filter(
    name: str, function: Callable[[pl.DataFrame], pl.Series], documents: pl.DataFrame
) -> dict[str, np.ndarray]:
    """Reason -> whether each document is dropped for it, of a filter without measures."""
    found = _call(name, function, documents)
    if found.dtype == pl.Boolean:
        return {name: found.fill_null(False).to_numpy()}
    return {reason: (found == reason).fill_null(False).to_numpy() for reason in found.drop_nulls().unique().sort()}


def _call(name: str, function: Callable[[pl.DataFrame], pl.Series], documents: pl.DataFrame) -> pl.Series:
    try:
        drop = function(documents)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        first, last = documents["path"][0], documents["path"][-1]
        raise UserError(
            f"filters: '{name}' raised {type(error).__name__}: {error}, on the {len(documents)} documents from {first} "
            f"to {last}; fix the filter"
        ) from error
    if not isinstance(drop, pl.Series) or drop.dtype not in (pl.Boolean, pl.String) or len(drop) != len(documents):
        returned = f"{drop.dtype} x {len(drop)}" if isinstance(drop, pl.Series) else type(drop).__name__
        raise UserError(
            f"filters: '{name}' returned {returned}, expected a Boolean polars Series of {len(documents)} values "
            "(True drops a document), or one of reasons; fix its return value"
        )
    return drop


def _load_filter(name: str) -> tuple[str, Filter]:
    if ":" in name:
        return name.rpartition(":")[2], load_function(name, "filters")
    if name not in FILTERS:
        raise UserError(
            f"filters: unknown filter '{name}'; {nearest(name, FILTERS)}; name your own as \"file.py:function\""
        )
    return name, FILTERS[name]
