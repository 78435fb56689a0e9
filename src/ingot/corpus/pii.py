"""Personal data: e-mail addresses, phone numbers, US social security numbers and IP addresses become placeholders.

Polars replaces with Rust's regex engine (linear time, about 20 times Python's speed) which has no look-around. So a
pattern takes one character of context on either side and puts it back, and runs twice, since neighbours share that
character. A cheap search picks the few rows that get that far. What a regex cannot decide (is it an IPv6 address, or
`a[2000::2]`?) is decided by `ipaddress`.

A false mask destroys text and a missed one leaks, so each kind demands evidence: ten bare digits are an ISBN or a Unix
time as often as a phone number, hence separators or a leading + with a country code are required; an SSN needs its
hyphens and an issued range; an IPv4 address needs four parts of at most 255 that no fifth part follows. `a@b.dot(c)`
is a matrix product, not an address.
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

# What may stand before and after. A dot after is the end of a sentence unless more of a number or name follows it.
# Letters of scripts that no address is written in may stand beside one: Chinese and Japanese have no blanks.
_WORD = rf"{_LETTER}_"
_AFTER = rf"(\.?(?:[^{_WORD}.]|\z)|\.{{2,}})"
_AFTER_NUMBER = rf"((?:\.|-)?(?:[^{_WORD}.\-]|\z)|\.{{2,}}|-{{2,}})"
_REPLACED = {
    "email": rf"()({_EMAIL})([^{_WORD}(.]|[._](?:[^{_WORD}]|\z)|\z)",
    "ip": rf"(\A|[^{_WORD}.])({_IPV4}){_AFTER}",
    "ssn": rf"(\A|[^{_WORD}.\-])({_SSN}){_AFTER_NUMBER}",
    "phone": rf"(\A|[^{_WORD}.+\-])({_PHONE}){_AFTER_NUMBER}",
}
_SEARCHED = {
    "email": r"[^\s@]@[^\s@]",
    "ip": r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]",
    "ssn": r"[0-9]-[0-9]{2}-[0-9]{4}",
    "phone": r"[0-9]{3}[ .\-][0-9]{4}|\+[1-9]",
}
_IPV6_SEARCHED = (
    r"[0-9A-Fa-f]:(?:[0-9A-Fa-f]{1,4}:){6}[0-9A-Fa-f]|[0-9A-Fa-f]{2}::|::[fF]{4}:|[0-9A-Fa-f]:[0-9A-Fa-f]{1,4}::"
)
_HINTS = {"email": ("@",), "ip6": ("::", r":[0-9A-Fa-f]{1,4}:[0-9A-Fa-f]{1,4}:")}
"""One of these is in every text that a search above finds; what begins with a fixed sign is looked for much faster."""
_IPV6 = re.compile(
    r"(?<![\w:.])(?=[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.])[0-9A-Fa-f:.]{1,45}[0-9A-Fa-f:](?![\w:])", re.ASCII
)
"""Two colons soon, and no more signs than an address has: otherwise time grows with the cube of a text of them."""
_ADDRESSES = [
    ipaddress.IPv6Network(n) for n in ("2000::/3", "fc00::/7", "fe80::/10", "ff00::/8", "64:ff9b::/96", "::ffff:0:0/96")
]


def mask_pii(texts: pl.Series) -> tuple[pl.Series, dict[str, pl.Series]]:
    """Texts with placeholders, and per kind how many replacements each row got."""
    counts: dict[str, pl.Series] = {}
    for kind in ("email", "ip", "ssn", "phone"):
        texts, counts[kind] = _mask(texts, kind)
    texts, addresses = _mask_ipv6(texts)
    counts["ip"] = counts["ip"] + addresses
    return texts, {kind: counts[kind] for kind in KINDS}


def _mask(texts: pl.Series, kind: str) -> tuple[pl.Series, pl.Series]:
    mark, zero = KINDS[kind], pl.zeros(len(texts), dtype=pl.Int64, eager=True)
    rows = _found(texts, _SEARCHED[kind], _HINTS.get(kind, ()))
    if not len(rows):
        return texts, zero
    found = texts.gather(rows)
    masked = found
    for _ in range(2):
        masked = masked.str.replace_all(_REPLACED[kind], "${1}" + mark + "${3}")
    added = masked.str.count_matches(mark, literal=True) - found.str.count_matches(mark, literal=True).cast(pl.Int64)
    return texts.clone().scatter(rows, masked), zero.scatter(rows, added)


def _found(texts: pl.Series, pattern: str, hints: tuple[str, ...]) -> pl.Series:
    """The rows in which a pattern is found; of texts without one of its hints (if it has any) it is not asked."""
    if not hints:
        return texts.str.contains(pattern).arg_true()
    hinted = functools.reduce(operator.or_, (texts.str.contains(hint) for hint in hints)).arg_true()
    return hinted.filter(texts.gather(hinted).str.contains(pattern))


def _mask_ipv6(texts: pl.Series) -> tuple[pl.Series, pl.Series]:
    zero = pl.zeros(len(texts), dtype=pl.Int64, eager=True)
    rows = _found(texts, _IPV6_SEARCHED, _HINTS["ip6"])
    if not len(rows):
        return texts, zero
    done = [_mask_ipv6_in(text) for text in texts.gather(rows)]
    return texts.clone().scatter(rows, [d[0] for d in done]), zero.scatter(rows, [d[1] for d in done])


def _mask_ipv6_in(text: str) -> tuple[str, int]:
    count = 0

    def mark(match: re.Match[str]) -> str:
        nonlocal count
        found = match.group().rstrip(".")
        rest = match.group()[len(found) :]
        for tail in ("", ":"):  # "at 2001:db8::1:" ends with punctuation
            if found.endswith(tail) and is_ipv6(found.removesuffix(tail)):
                count += 1
                return KINDS["ip"] + tail + rest
        return match.group()

    return _IPV6.sub(mark, text), count


def is_ipv6(text: str) -> bool:
    """Whether this is an address that something can have: `12:30::`, `1::2` (a slice) and the loopback are not."""
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return False
    if "::" not in text:  # eight written groups: an address has a long one, a ratio or a MAC-like number has none
        return max(len(part) for part in text.split(":")) >= 3
    return any(address in network for network in _ADDRESSES) and any(c.isdigit() for c in text)
