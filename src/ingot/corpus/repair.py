"""Repairs text that was decoded wrongly, and removes lines that pages repeat around their content.

**Mojibake.** `cafÃ©` is UTF-8 that somebody read as Latin-1. A line is repaired if ftfy calls it implausible, its bytes
in one of ftfy's single-byte encodings are UTF-8, the reverse gives the line back, and all encodings with a plausible
result agree on it. A line that mixes both is left alone: no encoding has its bytes. So every repair can be undone.

**Boilerplate.** A line is removed if all of it is one of the patterns below: cookie notices, buttons that share a page,
menus, footers. A sentence that contains such words is kept.
"""

import re
import unicodedata
from collections.abc import Callable

import polars as pl

REPAIRED, BOILERPLATE = "repaired_lines", "boilerplate_lines"
"""Columns with the number of lines of a document that were changed or removed."""
MAX_LAYERS = 3
"""Times that a text may have been decoded wrongly, one after the other."""
_LONE_MARK = re.compile("[\u0300-\u036f]")
"""A mark that is composed with no letter (after NFC): bytes that were no such text can look like one."""


def repair_unicode(texts: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Each text with its lines repaired, and the number of these lines."""
    return _by_row(texts, (texts.str.len_bytes() != texts.str.len_chars()).arg_true(), _repair_lines)


def _repair_lines(text: str) -> tuple[str, int]:
    lines = text.split("\n")
    repaired = [line if line.isascii() else _repair(line) for line in lines]
    return "\n".join(repaired), sum(before != after for before, after in zip(lines, repaired, strict=True))


def _repair(line: str) -> str:
    from ftfy.badness import is_bad

    for _ in range(MAX_LAYERS):
        if not is_bad(line) or len(readings := _readings(line)) != 1:
            break
        line = readings.pop()
    return line


def _readings(line: str) -> set[str]:
    """The plausible texts whose UTF-8 bytes are this line in a single-byte encoding."""
    import ftfy.bad_codecs  # noqa: F401  (registers the encodings)
    from ftfy.badness import badness
    from ftfy.chardata import CHARMAP_ENCODINGS

    readings, limit = set[str](), badness(line)
    for encoding in CHARMAP_ENCODINGS:
        try:
            reading = line.encode(encoding).decode()
            reversible = reading.encode().decode(encoding) == line
        except UnicodeError:
            continue
        if reversible and badness(reading) < limit and not _LONE_MARK.search(unicodedata.normalize("NFC", reading)):
            readings.add(reading)
    return readings


_SITES = "facebook|twitter|x|linkedin|pinterest|whatsapp|reddit|instagram|telegram|tumblr|e-?mail"
_ITEMS = (
    r"home|start|about(?: us)?|contact(?: us)?|blog|news|articles|events|press|careers|jobs|products|services|shop"
    r"|store|cart|account|my account|log ?in|log ?out|sign ?in|sign ?up|register|search|menu|help|faqs?|support"
    r"|site ?map|archives?|categories|tags|gallery|privacy(?: policy| notice)?|cookie policy|cookies|imprint"
    r"|legal(?: notice)?|terms(?: of use| of service|(?: and| &) conditions)?|accessibility|advertise|subscribe"
    r"|newsletter|rss|next|previous"
)
_BETWEEN = r"[ \t]*(?:[|•·»›>/–—-]|\t)[ \t]*"
_ON = r"(?:[^\n]{0,200})"
LINES: dict[str, str] = {
    "cookie notices": (
        rf"(?:(?:this|our) (?:web)?site|we)(?: and our partners)? (?:use|uses|store) cookies\b{_ON}"
        rf"\b(?:experience|site|website|browsing|consent|accept|agree|analy\w+|traffic|personali\w+)\b{_ON}"
        rf"|by (?:using|continuing to (?:use|browse)|browsing) (?:this|our|the) (?:web)?site{_ON}\bcookies\b{_ON}"
        r"|(?:accept|reject|allow|manage)(?: all)? cookies|cookie (?:settings|preferences)"
    ),
    "buttons that share a page": (
        r"(?:click to )?(?:share|tweet|pin|post|like|follow|find)(?: (?:this|it|us))?"
        rf"(?: (?:on|to|via|by|with) (?:{_SITES}))(?: \(opens in new window\))?"
        r"|share this(?: (?:article|page|post|story|entry))?"
    ),
    "menus": (
        rf"(?:{_ITEMS})(?:{_BETWEEN}(?:{_ITEMS})){{2,}}"
        r"|skip to (?:main |the )?(?:content|navigation)"
    ),
    "buttons": (
        r"back to top|(?:(?:read|show|load|see|learn) more|continue reading)(?:\.{3}|…|[ \t]*[»›→>]+)?"
        r"|(?:leave|post|add|write) a (?:comment|reply)|(?:\d{1,4}|no) comments?(?: yet)?|print this (?:page|article)"
        r"|(?:subscribe to|sign up for|join) (?:our|the) (?:newsletter|mailing list|rss feed|blog)"
    ),
    "advertisements": r"advertisements?|sponsored content|article continues below(?: advertisement)?",
    "what a browser lacks": (
        rf"(?:please )?(?:enable|turn on) javascript\b{_ON}|your browser (?:does not|doesn't) support{_ON}"
        rf"|javascript (?:is|must be|has to be)[^\n]{{0,20}}(?:enabled|disabled|required){_ON}"
    ),
    "footers": (
        rf"(?:copyright[ \t]*)?(?:©|\(c\)){_ON}\ball rights reserved|all rights reserved"
        r"|(?:proudly )?powered by (?:wordpress|blogger|drupal|joomla|shopify|squarespace|wix|disqus|vbulletin|phpbb)"
    ),
}
"""What kind of line -> the pattern of a complete line, without blanks and punctuation around it, in any case."""
_PATTERN = rf"(?im)^[ \t*#>•·»›-]*(?:{'|'.join(LINES.values())})[ \t.!:»›*-]*$\n?"


def remove_boilerplate(texts: pl.Series) -> tuple[pl.Series, pl.Series]:
    """Each text without lines that are boilerplate, and the number of these lines."""
    counts = texts.str.count_matches(_PATTERN).cast(pl.Int64)
    rows = (counts > 0).arg_true()
    if not len(rows):
        return texts, counts
    return texts.clone().scatter(rows, texts.gather(rows).str.replace_all(_PATTERN, "")), counts


def _by_row(texts: pl.Series, rows: pl.Series, change: Callable[[str], tuple[str, int]]) -> tuple[pl.Series, pl.Series]:
    """A function of one text, which returns it changed with a count, applied to the given rows."""
    counts = pl.zeros(len(texts), dtype=pl.Int64, eager=True)
    if not len(rows):
        return texts, counts
    changed, numbers = zip(*map(change, texts.gather(rows)), strict=True)
    return texts.clone().scatter(rows, list(changed)), counts.scatter(rows, list(numbers))
