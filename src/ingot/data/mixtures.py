"""Published mixtures by name: `data = { mixture = "llama", commoncrawl = "crawl", c4 = "c4", ... }`.

The table names the recipe's corpus for each source of the mixture; sources that share a corpus add up.
"""

from collections.abc import Mapping
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
