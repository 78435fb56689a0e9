"""Masks personal data: e-mail addresses, phone numbers, US social security numbers and IP addresses; and `secrets.py`.

Polars uses Rust's regex engine, which runs in linear time but has no look-around. Each pattern therefore captures one
character of context on both sides and puts it back, and runs twice because adjacent items share that character. A cheap
prefilter selects the few rows that need a replacement. IP addresses need more context than that, so they are searched
in Python: `2000::2` is an address in `[2000::2]` and none in `a[2000::2]`.

A false positive destroys text and a miss leaks data, so each kind requires evidence. A phone number needs separators or
a leading + with a country code, because ten bare digits are often an ISBN or a Unix time. An SSN needs its hyphens and
an issued range. An IPv4 address needs four numbers of at most 255 without a fifth one after them, and no sign of a
version or a section before them: `Chrome/120.0.0.0`, `tool==1.2.3.4`, `Section 4.1.2.3`. An e-mail address needs a
top-level domain that exists; a parenthesis after it rules it out, because `a@b.link(c)` is code.
"""

import functools
import ipaddress
import operator
import re
from collections.abc import Callable

import polars as pl

from ingot.corpus import secrets
from ingot.corpus.domains import ALSO_FILES, COUNTRIES, GENERIC, OTHER_SCRIPTS, PRIVATE

KINDS = {"email": "[EMAIL]", "phone": "[PHONE]", "ssn": "[SSN]", "ip": "[IP]", **secrets.KINDS}


def _any_of(*names: str) -> str:
    """A pattern for one of the names, which blanks separate."""
    return "|".join(" ".join(names).split())


_LETTER = r"\p{Latin}\p{Greek}\p{Cyrillic}\p{Nd}"
_LABEL = rf"[{_LETTER}](?:[{_LETTER}\-]*[{_LETTER}])?"
_NAMED_LABEL = rf"[{_LETTER}\-]*[\p{{Latin}}\p{{Greek}}\p{{Cyrillic}}](?:[{_LETTER}\-]*[{_LETTER}])?"
"""A label with a letter. Two labels of digits are a version: `tool@5.4.dev`."""
_DOMAIN = (
    rf"(?:{_LABEL}|(?:{_LABEL}\.)*{_NAMED_LABEL}(?:\.{_LABEL})*)"
    rf"\.(?:(?i-u:xn--[a-z0-9\-]+|{_any_of(COUNTRIES, GENERIC, PRIVATE)})|(?i:{_any_of(OTHER_SCRIPTS)}))"
    rf"|(?:{_LABEL}\.)*\pL(?:[{_LETTER}\-]*[{_LETTER}])?\.(?i-u:{_any_of(ALSO_FILES)})"
)
_EMAIL = rf"[{_LETTER}_%+\-]+(?:\.[{_LETTER}_%+\-]+)*@(?:{_DOMAIN})"
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
_AFTER_NUMBER = rf"((?:\.|-)?(?:[^{_WORD}.\-]|\z)|\.{{2,}}|-{{2,}})"
_PATTERNS = {
    "email": rf"()({_EMAIL})([^{_WORD}(.]|[._](?:[^{_WORD}]|\z)|\z)",
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
_PYTHON_WORD = r"0-9A-Z_a-z\u00aa\u00b5\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02af\u0370-\u052f\u1e00-\u1fff"
"""`_WORD` for Python's `re`, which knows no scripts."""
_IPV4_ADDRESS = re.compile(rf"(?<![{_PYTHON_WORD}.]){_IPV4}(?=\.?(?:[^{_PYTHON_WORD}.]|\Z)|\.{{2,}})")
_CONTEXT = 80
"""Characters before an address that are searched for signs of a version."""
_VERSION_WORDS = re.compile(
    ".*versions?|"
    + _any_of(
        "abschnitt annex appendix art articles? artikel build capítulo chapters? clauses? criterion definition driver",
        "ec enzyme equation exercise fig figures? firmware item kapitel kernel lemma oid paragraphs? rel releases? req",
        "requirements? rev revisions? rule sec sección sect sections? step tables? tag theorem v ver versione versión",
        "версии версия глава раздел §+ .*版本 .*バージョン .*버전 .*第",
    )
)
"""Words before versions and before numbers of sections."""
_PROGRAMS = re.compile(
    _any_of(
        "android bluetooth chrome chromium cuda directx edge excel firefox framework gcc glibc ios java jdk jre macos",
        "msie office openssl opera php player python ruby safari sdk",
    )
)
"""Programs and systems before their versions; no servers, whose names are before addresses in logs."""
_UPDATE = re.compile(r".*\b(?:down|up)(?:dat|grad)(?:e|es|ed|ing) (?:from|to)", re.IGNORECASE)
_FILLERS = re.compile(_any_of(r"= is no no\. number was"))
"""Words between such a word and the number."""
_LIST_WORDS = re.compile(_any_of("& - / – — and bis et oder or through to und y и или"))
"""Words between the members of a list: `versions 1.2.3.3 and 1.2.3.4`."""
_ADDRESS_WORD = "addr|address|client|destination|dst|gateway|host|ip|ip4|ipv4|localhost|node|peer|server|source|src"
_OPERATOR = r"===?|[~<>!]=|~>|\^|~"
_REQUIREMENT = re.compile(
    rf"[(\"'\[]*(?!(?:[\w.\-]*[._\-])?(?:{_ADDRESS_WORD})(?:\W|\Z))[a-z][\w.\-]*(?:\[[\w,]*\])?({_OPERATOR})?", re.I
)
"""`tool==` of `tool==1.2.3.4`; not `ip.addr==`."""
_PRODUCT = re.compile(rf"[(\"'\[]*(?!(?:{_ADDRESS_WORD})/)[a-z][\w+\-]*/|(?!(?:{_ADDRESS_WORD})-)\S*[a-z]-", re.I)
"""`Chrome/` of `Chrome/120.0.0.1`, `tool-` of `tool-1.2.3.4-any.whl`."""
_COORDINATE = re.compile(r"\S*[\w\-]+[./:][\w.\-]+:", re.I)
"""`group.name:tool:` of `group.name:tool:1.2.3.4`, `owner/image:` of `owner/image:1.2.3.4`."""
_FOLDER = re.compile(rf"\S*/(?!(?:{_ADDRESS_WORD})/)[a-z][\w.\-]*/", re.I)
"""`.../tool/` of `https://host/tool/1.2.3.4/file`."""
_HEADING = re.compile(r"\.?[ \t]+([^\W\d_])")
"""`. Results` of a line `4.1.2.3. Results`."""
_MAX_HEADING = 30
"""Largest number in the number of a heading."""
_MEMBER = re.compile(r"[0-9]+(?:\.[0-9]+)+")
_VERSION_AFTER = re.compile(
    r"[\-+](?:alpha|beta|build|dev|final|ga|generic|post|pre|rc|release|snapshot|stable)", re.IGNORECASE
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
    for kind, mask in secrets.MASKS.items():  # before phone numbers, which could be a part of them
        texts, counts[kind] = _mask_in_python(texts, secrets.PREFILTERS[kind], (), mask)
    texts, counts["email"] = _mask(texts, "email")
    texts, counts["ip"] = _mask_in_python(texts, _PREFILTERS["ip"], (), _mask_ipv4_in)
    for kind in ("ssn", "phone"):
        texts, counts[kind] = _mask(texts, kind)
    texts, addresses = _mask_in_python(texts, _IPV6_PREFILTER, _HINTS["ip6"], _mask_ipv6_in)
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


def _mask_in_python(
    texts: pl.Series, prefilter: str, hints: tuple[str, ...], mask: Callable[[str], tuple[str, int]]
) -> tuple[pl.Series, pl.Series]:
    """`_mask` with a function of one text, which returns it masked with the number of replacements."""
    zero = pl.zeros(len(texts), dtype=pl.Int64, eager=True)
    rows = _matching_rows(texts, prefilter, hints)
    if not len(rows):
        return texts, zero
    masked, counts = zip(*map(mask, texts.gather(rows)), strict=True)
    return texts.clone().scatter(rows, list(masked)), zero.scatter(rows, list(counts))


def _mask_ipv4_in(text: str) -> tuple[str, int]:
    return secrets.replace_matches(_IPV4_ADDRESS, lambda match: None if _is_version(match) else KINDS["ip"], text)


def _is_version(match: re.Match[str]) -> bool:
    """Whether four numbers with dots are a version or the number of a section, or an address of no host."""
    text, start, end = match.string, match.start(), match.end()
    if match.group().endswith(".0.0.0"):  # the first version of a major release; with a slash, a network
        return not re.match(r"/[0-9]", text[end : end + 2])
    if match.group().startswith(("127.", "255.")):  # this computer; a mask
        return True
    if _VERSION_AFTER.match(text, end):
        return True
    before = text[max(0, start - _CONTEXT) : start]
    words = before.split()
    attached = words.pop() if words and not before[-1].isspace() else ""
    if _is_heading(match, before):
        return True
    attached = attached.strip("\"'(<[>")
    if attached:
        if _COORDINATE.fullmatch(attached) or (_FOLDER.fullmatch(attached) and text[end : end + 1] == "/"):
            return True
        if _PRODUCT.fullmatch(attached):
            return not (attached.endswith("/") and re.match(r":[0-9]", text[end : end + 2]))  # Java's name/address:port
        requirement = _REQUIREMENT.fullmatch(attached)
        if (requirement and requirement[1]) or _is_version_word(attached):
            return True
        if not re.fullmatch(_OPERATOR, attached):
            return False
        words.append(attached)
    if words and re.fullmatch(_OPERATOR, words[-1].strip("\"'(")):
        return len(words) > 1 and _REQUIREMENT.fullmatch(words[-2].strip("\"',:;")) is not None
    if words and words[-1] == "(=":  # of a package of Debian
        return True
    if _UPDATE.fullmatch(" ".join(words[-2:])):
        return True
    while words and (_LIST_WORDS.fullmatch(words[-1]) or _MEMBER.fullmatch(words[-1].strip(",;()"))):
        words.pop()
    if len(words) > 1 and _FILLERS.fullmatch(words[-1].lower()):
        words.pop()
    if words and (_PROGRAMS.fullmatch(words[-1].lower()) or _UPDATE.fullmatch(" ".join(words[-2:]))):
        return True
    in_heading = words and not words[-1].strip("#") and before.rpartition("\n")[2].strip() == words[-1]  # of Markdown
    return bool(in_heading or (words and _is_version_word(words[-1])))


def _is_heading(match: re.Match[str], before: str) -> bool:
    """Whether four small numbers begin a line and a word in upper case follows; `10.` begins local networks."""
    title = _HEADING.match(match.string, match.end())
    if before.rpartition("\n")[2].strip(" \t#*|") or not title or not title[1].isupper():
        return False
    numbers = [int(number) for number in match.group().split(".")]
    return numbers[0] < 10 and min(numbers) > 0 and max(numbers) <= _MAX_HEADING


def _is_version_word(word: str) -> bool:
    return _VERSION_WORDS.fullmatch(word.lower().strip("\"'(<[>.:：=,_")) is not None


def _mask_ipv6_in(text: str) -> tuple[str, int]:
    def mark(match: re.Match[str]) -> str | None:
        address = match.group().rstrip(".")
        dots = match.group()[len(address) :]
        for tail in ("", ":"):  # "at 2001:db8::1:" ends with punctuation
            if address.endswith(tail) and is_ipv6(address.removesuffix(tail)):
                return KINDS["ip"] + tail + dots
        return None

    return secrets.replace_matches(_IPV6, mark, text)


def is_ipv6(text: str) -> bool:
    """Whether the text is an assignable IPv6 address. `12:30::`, `1::2` (a slice) and the loopback are not."""
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return False
    if "::" not in text:  # of eight groups an address has a long one; a ratio or a MAC-like number has none
        return max(len(group) for group in text.split(":")) >= 3
    return any(address in network for network in _ADDRESSES) and any(c.isdigit() for c in text)
