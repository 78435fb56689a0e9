"""Published mixtures by name: `data = { mixture = "llama", commoncrawl = "crawl", c4 = "c4", ... }`.

The table names the recipe's corpus for each source of the mixture; sources that share a corpus add up. Below
them is the arithmetic of any mixture: temperature and caps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.core.errors import UserError, nearest

NAME = "mixture"
MIXTURES: dict[str, dict[str, float]] = {
    # Touvron et al. 2023, arXiv:2302.13971, table 1
    "llama": {
        "commoncrawl": 67.0,
        "c4": 15.0,
        "github": 4.5,
        "wikipedia": 4.5,
        "books": 4.5,
        "arxiv": 2.5,
        "stackexchange": 2.0,
    },
    # Gao et al. 2020, arXiv:2101.00027, table 1, column "weight"
    "pile": {
        "pile-cc": 18.11,
        "pubmed-central": 14.40,
        "books3": 12.07,
        "openwebtext2": 10.01,
        "arxiv": 8.96,
        "github": 7.59,
        "freelaw": 6.12,
        "stackexchange": 5.13,
        "uspto": 3.65,
        "pubmed-abstracts": 3.07,
        "gutenberg": 2.17,
        "opensubtitles": 1.55,
        "wikipedia": 1.53,
        "dm-mathematics": 1.24,
        "ubuntu-irc": 0.88,
        "bookcorpus2": 0.75,
        "europarl": 0.73,
        "hackernews": 0.62,
        "youtube-subtitles": 0.60,
        "philpapers": 0.38,
        "nih-exporter": 0.30,
        "enron-emails": 0.14,
    },
}
"""Name -> per cent of the tokens of each source."""


def expanded(table: Any) -> Any:
    """The mixture of corpora that a table with a named mixture means; any other value unchanged.

    Raises:
        UserError: an unknown mixture, or a source that is unknown or has no corpus.
    """
    if not isinstance(table, Mapping) or not isinstance(table.get(NAME), str):
        return table
    name, corpora = table[NAME], {source: corpus for source, corpus in table.items() if source != NAME}
    if name not in MIXTURES:
        raise UserError(f"found unknown mixture '{name}'; {nearest(name, MIXTURES)}")
    fractions = MIXTURES[name]
    for source, corpus in corpora.items():
        if source not in fractions:
            raise UserError(f"found source '{source}', which mixture '{name}' has not; {nearest(source, fractions)}")
        if not isinstance(corpus, str):
            raise UserError(f'found {source} = {corpus!r}, expected the name of a corpus, as in {source} = "clean"')
    if missing := [f"{source} ({fraction:g} %)" for source, fraction in fractions.items() if source not in corpora]:
        raise UserError(
            f"found no corpus for {', '.join(missing)} of mixture '{name}', expected one for each source; several may "
            "share one; or give fractions of your own: { clean = 0.9, code = 0.1 }"
        )
    out: dict[str, float] = {}
    for source, corpus in corpora.items():
        out[corpus] = round(out.get(corpus, 0.0) + fractions[source], 6)
    return out


def tempered(weights: Sequence[float], sizes: Sequence[float], temperature: float) -> list[float]:
    """Fractions proportional to weight x size^(1 / temperature): 1 follows the sizes, infinity ignores them
    (Arivazhagan et al. 2019, arXiv:1907.05019, section 4.2)."""
    total = sum(sizes)
    raw = [weight * (size / total) ** (1 / temperature) for weight, size in zip(weights, sizes, strict=True)]
    return [value / sum(raw) for value in raw]


def capped(fractions: Sequence[float], limits: Sequence[float]) -> list[float] | None:
    """Fractions of which none is above its limit; the others share the rest in proportion (water filling, as UniMax,
    Chung et al. 2023, arXiv:2304.09151).

    Args:
        fractions: they add up to 1.
        limits: the largest fraction of each.

    Returns:
        Fractions that add up to 1; None if the limits of all sources in use add up to less.
    """
    full: set[int] = set()
    while True:
        rest = 1 - sum(limits[i] for i in full)
        free = sum(f for i, f in enumerate(fractions) if i not in full)
        if rest < -1e-12 or (not free and rest > 1e-12):
            return None
        scale = rest / free if free else 0.0
        over = {i for i, f in enumerate(fractions) if i not in full and f * scale > limits[i]}
        if not over:
            return [limits[i] if i in full else f * scale for i, f in enumerate(fractions)]
        full |= over
