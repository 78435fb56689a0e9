"""Quality as columns: measures of a text, the bounds on them, and filters that anyone can add.

To add a filter, write one function here and one line in `FILTERS`, or keep it in a file of your own and name it in the
recipe as `"my_filters.py:too_shouty"`:

    def too_shouty(documents: pl.DataFrame) -> pl.Series:
        return documents["text"].str.count_matches("!") > 20

It gets documents (`text`, `source`, `path`, `group` and the measures below where quality is judged), answers True for
those that shall go, and its name becomes their `drop_reason`.

Words are runs of non-blank characters. Chinese, Japanese, Thai, Lao, Khmer and Burmese put no blanks between words, so
there every character counts as one, repetition is measured on pairs of characters, and word length is not asked: a
white-space split would see a page of Chinese as three words and reject it.
"""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import polars as pl

from ingot.core.errors import UserError, nearest
from ingot.core.functions import file_of, load_function
from ingot.corpus.dedup import squeeze
from ingot.corpus.settings import QualityBounds

Filter = Callable[[pl.DataFrame], pl.Series]
"""Documents in; True for each one that shall go."""

QUALITY_REASONS = (
    "too_few_words",
    "too_many_words",
    "words_too_short",
    "words_too_long",
    "too_many_special_characters",
    "too_repetitive",
)

_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_MOSTLY_UNSPACED = 0.3
SQUEEZED = "_squeezed"


def measure(documents: pl.DataFrame) -> pl.DataFrame:
    """Add `characters`, `words`, `mean_word_length`, `special_share`, `unique_word_share` (null: not asked).

    Args:
        documents: with `text`; a column `_squeezed` of the same texts, words one blank apart, saves making it here.
    """
    if SQUEEZED not in documents.columns:
        documents = documents.with_columns(pl.Series(SQUEEZED, squeeze(documents["text"])))
    text, squeezed, words = pl.col("text"), pl.col(SQUEEZED), pl.col("words")
    signs = text.str.count_matches(r"[^\p{Alphabetic}\p{M}\p{N}\s]")
    filled = squeezed != ""
    split = squeezed.str.split(" ")
    measured = (
        documents.with_columns(characters=text.str.len_chars(), _split=split)
        .with_columns(
            words=pl.when(filled).then(pl.col("_split").list.len()).otherwise(0).cast(pl.Int64),
            unique_word_share=pl.when(filled).then(pl.col("_split").list.n_unique()).otherwise(0),
        )
        .with_columns(
            special_share=signs / pl.col("characters"),
            mean_word_length=(squeezed.str.len_chars() - (words - 1).clip(0)) / words,
            unique_word_share=pl.col("unique_word_share") / words,
        )
        .drop("_split", SQUEEZED)
    )
    return _measure_unspaced(measured)


def _measure_unspaced(documents: pl.DataFrame) -> pl.DataFrame:
    """Correct the measures of rows with scripts that put no blanks between words."""
    wide = (documents["text"].str.len_bytes() > documents["characters"]).arg_true()
    rows = wide.filter(documents["text"].gather(wide).str.contains(f"[{_UNSPACED}]"))
    if not len(rows):
        return documents
    part = documents[rows]
    texts = part["text"]
    signs = texts.str.count_matches(f"[{_UNSPACED}]")
    spaced = texts.str.replace_all(f"[{_UNSPACED}]", " ")
    words = signs + spaced.str.count_matches(r"[\p{Alphabetic}\p{N}]\S*")
    mostly = signs / texts.str.len_chars() >= _MOSTLY_UNSPACED
    unique = pl.Series(
        [_unique_pairs(text) if m else None for text, m in zip(texts, mostly, strict=True)], dtype=pl.Float64
    )
    new = {
        "words": words.cast(pl.Int64),
        "mean_word_length": mostly.replace_strict({True: None, False: 1.0}, return_dtype=pl.Float64)
        * part["mean_word_length"],
        "unique_word_share": unique.fill_null(part["unique_word_share"]),
    }
    return documents.with_columns(documents[name].scatter(rows, values) for name, values in new.items())


def _unique_pairs(text: str) -> float:
    pairs = max(len(text) - 1, 1)
    return len(set(itertools.pairwise(text))) / pairs


def judge(documents: pl.DataFrame, bounds: QualityBounds) -> pl.Series:
    """The first broken bound of each measured document as its reason, or null. A null measure breaks nothing."""
    words, length = pl.col("words"), pl.col("mean_word_length")
    broken = {
        "too_few_words": words < bounds.min_words,
        "too_many_words": words > bounds.max_words,
        "words_too_short": length < bounds.min_mean_word_length,
        "words_too_long": length > bounds.max_mean_word_length,
        "too_many_special_characters": pl.col("special_share") > bounds.max_special_share,
        "too_repetitive": pl.col("unique_word_share") < bounds.min_unique_share,
    }
    reasons = [pl.when(broken[reason]).then(pl.lit(reason)) for reason in QUALITY_REASONS]
    return documents.select(drop_reason=pl.coalesce(reasons))["drop_reason"]


def lorem_ipsum(documents: pl.DataFrame) -> pl.Series:
    """Placeholder text of unfinished pages."""
    return documents["text"].str.contains("(?i)lorem ipsum dolor")


def generated_code(documents: pl.DataFrame) -> pl.Series:
    """Files that say near their top that a program wrote them."""
    head = documents["text"].str.slice(0, 1000)
    return head.str.contains(r"(?i)do not edit|@generated\b|auto-?(?:matically )?generated (?:by|from|file|code)")


FILTERS: dict[str, Filter] = {
    "lorem_ipsum": lorem_ipsum,
    "generated_code": generated_code,
}


def load_filters(names: list[str]) -> dict[str, Filter]:
    """Filters by the name that becomes their reason, in the recipe's order.

    Raises:
        UserError: an unknown name, a file that is missing or does not load, no such function in it, or two of a name.
    """
    found: dict[str, Filter] = {}
    for name in names:
        reason, function = _load_filter(name)
        if reason in found:
            raise UserError(f"filters: found two called '{reason}', expected different names; rename one of them")
        found[reason] = function
    return found


def user_files(names: list[str]) -> list[Path]:
    """The files of the user's own filters; their content determines the result, so it belongs in the stage's key."""
    return [file_of(name) for name in names if ":" in name]


def apply_filters(documents: pl.DataFrame, filters: Mapping[str, Filter]) -> pl.Series:
    """The name of the first filter that rejects each document, or null."""
    reason = pl.Series("drop_reason", [None] * len(documents), dtype=pl.String)
    for name, rejects in filters.items():
        answer = _ask(name, rejects, documents).fill_null(False)
        reason = reason.scatter((answer & reason.is_null()).arg_true(), name)
    return reason


def _ask(name: str, rejects: Filter, documents: pl.DataFrame) -> pl.Series:
    try:
        answer = rejects(documents)
    except (Exception, SystemExit) as error:
        first, last = documents["path"][0], documents["path"][-1]
        raise UserError(
            f"filters: '{name}' raised {type(error).__name__}: {error}, on the {len(documents)} documents from {first} "
            f"to {last}; mend it"
        ) from error
    if not isinstance(answer, pl.Series) or answer.dtype != pl.Boolean or len(answer) != len(documents):
        found = f"{answer.dtype} x {len(answer)}" if isinstance(answer, pl.Series) else type(answer).__name__
        raise UserError(
            f"filters: '{name}' returned {found}, expected a Boolean polars Series of {len(documents)} values "
            "(True drops a document); mend its return value"
        )
    return answer


def _load_filter(name: str) -> tuple[str, Filter]:
    if ":" in name:
        return name.rpartition(":")[2], load_function(name, "filters")
    if name not in FILTERS:
        raise UserError(f"filters: unknown filter '{name}'; {nearest(name, FILTERS)}; your own is \"file.py:function\"")
    return name, FILTERS[name]
