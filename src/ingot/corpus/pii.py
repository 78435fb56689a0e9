"""Masks personal data: e-mail addresses, phone numbers, US social security numbers and IP addresses.

Polars uses Rust's regex engine, which runs in linear time but has no look-around. Each pattern therefore captures one
character of context on both sides and puts it back, and runs twice because adjacent items share that character. A cheap
prefilter selects the few rows that need a replacement. `ipaddress` decides what a regex cannot: whether `2000::2` in
`a[2000::2]` is an IPv6 address.

A false positive destroys text and a miss leaks data, so each kind requires evidence. A phone number needs separators or
a leading + with a country code, because ten bare digits are often an ISBN or a Unix time. An SSN needs its hyphens and
an issued range. An IPv4 address needs four numbers of at most 255 without a fifth one after them. A parenthesis after
an e-mail address rules it out, because `a@b.dot(c)` is a matrix product.
"""

import functools
import ipaddress
import operator
import re

import polars as pl

KINDS = {"email": "[EMAIL]", "phone": "[PHONE]", "ssn": "[SSN]", "ip": "[IP]"}

_LETTER = r"\p{Latin}\p{Greek}\p{Cyrillic}\p{Nd}"
_EMAIL = (
    rf"[{_LETTER}_%+\-]+(?:\.[{_LETTER}_%+\-]+)*"
    rf"@[{_LETTER}](?:[{_LETTER}\-]*[{_LETTER}])?(?:\.[{_LETTER}](?:[{_LETTER}\-]*[{_LETTER}])?)*"
    r"\.(?:\p{Latin}{2,24}|\p{Greek}{2,24}|\p{Cyrillic}{2,24})"
)
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_AREA = r"(?:00[1-9]|0[1-9][0-9]|[1-57][0-9]{2}|6(?:[0-57-9][0-9]|6[0-57-9])|8[0-9]{2})"
_GROUP = r"(?:0[1-9]|[1-9][0-9])"
_SERIAL = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_SSN = rf"{_AREA}-{_GROUP}-{_SERIAL}"
_NATIONAL = r"(?:\([2-9][0-9]{2}\)[ .\-]?|[2-9][0-9]{2}[ .\-])[2-9][0-9]{2}[ .\-][0-9]{4}"
_COUNTRY = r"\+[1-9][0-9]{0,2}(?:[ .\-]?\([0-9]{1,4}\))?[ .\-][0-9]{1,5}"
_INTERNATIONAL = (
    rf"{_COUNTRY}(?:[ .\-][0-9]{{2,8}}){{0,4}}[ .\-][0-9]{{3,8}}|{_COUNTRY}(?:[ .\-][0-9]{{2}}){{4}}"
    r"|\+[1-9][0-9]{10,14}"
)
_PHONE = rf"(?:\+?1[ .\-]?)?{_NATIONAL}|{_INTERNATIONAL}"

# The context that is allowed before and after an item. A dot after it ends a sentence unless more of a number or name
# follows. Letters of scripts that no address uses may be adjacent, because Chinese and Japanese have no blanks.
_WORD = rf"{_LETTER}_"
_AFTER = rf"(\.?(?:[^{_WORD}.]|\z)|\.{{2,}})"
_AFTER_NUMBER = rf"((?:\.|-)?(?:[^{_WORD}.\-]|\z)|\.{{2,}}|-{{2,}})"
_PATTERNS = {
    "email": rf"()({_EMAIL})([^{_WORD}(.]|[._](?:[^{_WORD}]|\z)|\z)",
    "ip": rf"(\A|[^{_WORD}.])({_IPV4}){_AFTER}",
    "ssn": rf"(\A|[^{_WORD}.\-])({_SSN}){_AFTER_NUMBER}",
    "phone": rf"(\A|[^{_WORD}.+\-])({_PHONE}){_AFTER_NUMBER}",
}
_PREFILTERS = {
    "email": r"[^\s@]@[^\s@]",
    "ip": r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]",
    "ssn": r"[0-9]-[0-9]{2}-[0-9]{4}",
    "phone": r"[0-9]{3}[ .\-][0-9]{4}|\+[1-9]",
}
_IPV6_PREFILTER = (
    r"[0-9A-Fa-f]:(?:[0-9A-Fa-f]{1,4}:){6}[0-9A-Fa-f]|[0-9A-Fa-f]{2}::|::[fF]{4}:|[0-9A-Fa-f]:[0-9A-Fa-f]{1,4}::"
)
_HINTS = {"email": ("@",), "ip6": ("::", r":[0-9A-Fa-f]{1,4}:[0-9A-Fa-f]{1,4}:")}
"""Every text that matches the prefilter contains one of these, which are much faster to search."""
_IPV6 = re.compile(
    r"(?<![\w:.])(?=[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.])[0-9A-Fa-f:.]{1,45}[0-9A-Fa-f:](?![\w:])", re.ASCII
)
"""Requires two colons early and bounds the length: otherwise time is cubic in the length of a run of such characters.
"""
_ADDRESSES = [
    ipaddress.IPv6Network(n) for n in ("2000::/3", "fc00::/7", "fe80::/10", "ff00::/8", "64:ff9b::/96", "::ffff:0:0/96")
]


def mask_pii(texts: pl.Series) -> tuple[pl.Series, dict[str, pl.Series]]:
    """Replace personal data by placeholders.

    Returns:
        The masked texts, and for each of `KINDS` the number of replacements per row.
    """
    counts: dict[str, pl.Series] = {}
    for kind in ("email", "ip", "ssn", "phone"):
        texts, counts[kind] = _mask(texts, kind)
    texts, addresses = _mask_ipv6(texts)
    counts["ip"] = counts["ip"] + addresses
    return texts, {kind: counts[kind] for kind in KINDS}


def _mask(texts: pl.Series, kind: str) -> tuple[pl.Series, pl.Series]:
    mark, zero = KINDS[kind], pl.zeros(len(texts), dtype=pl.Int64, eager=True)
    rows = _matching_rows(texts, _PREFILTERS[kind], _HINTS.get(kind, ()))
    if not len(rows):
        return texts, zero
    raw = texts.gather(rows)
    masked = raw
    for _ in range(2):
        masked = masked.str.replace_all(_PATTERNS[kind], "${1}" + mark + "${3}")
    added = masked.str.count_matches(mark, literal=True) - raw.str.count_matches(mark, literal=True).cast(pl.Int64)
    return texts.clone().scatter(rows, masked), zero.scatter(rows, added)


def _matching_rows(texts: pl.Series, pattern: str, hints: tuple[str, ...]) -> pl.Series:
    """Indices of the rows that match the pattern; with hints, only rows that match one of them are searched."""
    if not hints:
        return texts.str.contains(pattern).arg_true()
    hinted = functools.reduce(operator.or_, (texts.str.contains(hint) for hint in hints)).arg_true()
    return hinted.filter(texts.gather(hinted).str.contains(pattern))


def _mask_ipv6(texts: pl.Series) -> tuple[pl.Series, pl.Series]:
    zero = pl.zeros(len(texts), dtype=pl.Int64, eager=True)
    rows = _matching_rows(texts, _IPV6_PREFILTER, _HINTS["ip6"])
    if not len(rows):
        return texts, zero
    masked, counts = zip(*map(_mask_ipv6_in, texts.gather(rows)), strict=True)
    return texts.clone().scatter(rows, list(masked)), zero.scatter(rows, list(counts))


def _mask_ipv6_in(text: str) -> tuple[str, int]:
    count = 0

    def mark(match: re.Match[str]) -> str:
        nonlocal count
        address = match.group().rstrip(".")
        dots = match.group()[len(address) :]
        for tail in ("", ":"):  # "at 2001:db8::1:" ends with punctuation
            if address.endswith(tail) and is_ipv6(address.removesuffix(tail)):
                count += 1
                return KINDS["ip"] + tail + dots
        return match.group()

    return _IPV6.sub(mark, text), count


def is_ipv6(text: str) -> bool:
    """Whether the text is an assignable IPv6 address. `12:30::`, `1::2` (a slice) and the loopback are not."""
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return False
    if "::" not in text:  # of eight groups an address has a long one; a ratio or a MAC-like number has none
        return max(len(group) for group in text.split(":")) >= 3
    return any(address in network for network in _ADDRESSES) and any(c.isdigit() for c in text)
