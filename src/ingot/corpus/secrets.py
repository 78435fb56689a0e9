"""Masks payment cards, bank accounts (IBAN) and secret keys.

Each kind has a check that chance rarely passes: a card's issuer, length and Luhn digit, an IBAN's country, length and
remainder modulo 97, the fixed prefix of a provider's keys. Texts that a cheap pattern rules out are not checked.
"""

import functools
import re
from collections.abc import Callable

KINDS = {"card": "[CARD]", "iban": "[IBAN]", "key": "[KEY]"}
PREFILTERS = {
    "card": r"[2-6][0-9]{3}(?:[0-9]{9}|[ \-][0-9]{4}[ \-][0-9]{4}|[ \-][0-9]{6}[ \-])",
    "iban": r"[A-Z]{2}[0-9]{2} ?[0-9A-Z]{4} ?[0-9A-Z]{3}",
    "key": (
        r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(?:AKIA|ASIA|AIza|gh[pousr]_|github_pat_|glpat-|xox[abeoprs]-|hf_|npm_|pypi-"
        r"|sk-|sk_live_|rk_live_|SG\.|eyJ)[A-Za-z0-9_\-]{10}"
    ),
}

_CARD = re.compile(
    r"(?<![\w.+\-/])(?:[0-9]{13,19}|[0-9]{4}([ \-])[0-9]{4}\1[0-9]{4}\1[0-9]{1,7}|[0-9]{4}([ \-])[0-9]{6}\2[0-9]{4,5})"
    r"(?![\w\-/]|\.[0-9])"
)
_ISSUERS = (  # (first, last) number of the first digits, lengths: ISO/IEC 7812 ranges of the large networks
    (4, 4, (13, 16, 19)),  # Visa
    (51, 55, (16,)),  # Mastercard
    (2221, 2720, (16,)),
    (34, 34, (15,)),  # American Express
    (37, 37, (15,)),
    (6011, 6011, (16, 19)),  # Discover
    (644, 659, (16, 19)),
    (3528, 3589, (16, 19)),  # JCB
    (300, 305, (14, 16)),  # Diners Club
    (36, 36, (14, 16)),
    (38, 39, (14, 16)),
    (62, 62, (16, 17, 18, 19)),  # UnionPay
)
_IBAN = re.compile(r"(?<!\w)([A-Z]{2})([0-9]{2})((?: ?[0-9A-Z]{4}){2,7}(?: ?[0-9A-Z]{1,3})?)(?!\w)")
_IBAN_LENGTHS = {
    name: int(length)
    for length, names in {
        "15": "NO", "16": "BE", "18": "DK FI FO GL NL SD", "19": "MK SI", "20": "AT BA EE KZ LT LU MN XK",
        "21": "CH HR LI LV", "22": "BG BH CR DE GB GE IE ME RS VA", "23": "AE GI IL IQ OM SO TL",
        "24": "AD CZ ES MD PK RO SA SE SK TN VG", "25": "LY PT ST", "26": "IS TR", "27": "BI DJ FR GR IT MC MR SM",
        "28": "AL AZ BY CY DO GT HU LB NI PL SV", "29": "BR EG PS QA UA", "30": "JO KW MU", "31": "MT SC", "32": "LC",
        "33": "RU",
    }.items()
    for name in names.split()
}  # fmt: skip
"""Length of an account by country, of the registry of ISO 13616."""
_KEY = re.compile(
    r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----[A-Za-z0-9+/=\s:,\-\\]*?-----END \1-----"
    r"|(?<![\w\-])(?:(?:AKIA|ASIA)[A-Z0-9]{16}"  # Amazon
    r"|AIza[A-Za-z0-9_\-]{35}"  # Google
    r"|gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{50,255}|glpat-[A-Za-z0-9_\-]{20,64}"  # GitHub, GitLab
    r"|xox[abeoprs]-[A-Za-z0-9\-]{20,255}"  # Slack
    r"|hf_[A-Za-z0-9]{34,64}|npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_\-]{50,255}"  # Hugging Face, npm, PyPI
    r"|sk-(?:ant-|proj-|or-v1-)?[A-Za-z0-9_\-]{32,255}"  # OpenAI, Anthropic, OpenRouter
    r"|[sr]k_live_[A-Za-z0-9]{20,255}|SG\.[A-Za-z0-9_\-]{22}\.[A-Za-z0-9_\-]{43}"  # Stripe, SendGrid
    r"|eyJ[A-Za-z0-9_\-]{15,}\.eyJ[A-Za-z0-9_\-]{15,}\.[A-Za-z0-9_\-]{20,})(?![\w\-])"  # JSON web tokens
)


def replace_matches(
    pattern: re.Pattern[str], replacement: Callable[[re.Match[str]], str | None], text: str
) -> tuple[str, int]:
    """The text with matches replaced, and their number; a match with no replacement stays."""
    count = 0

    def replaced(match: re.Match[str]) -> str:
        nonlocal count
        if (new := replacement(match)) is None:
            return match[0]
        count += 1
        return new

    return pattern.sub(replaced, text), count


def mask_cards(text: str) -> tuple[str, int]:
    """The text with cards masked, and their number."""
    return replace_matches(_CARD, lambda m: KINDS["card"] if _is_card(re.sub(r"\D", "", m[0])) else None, text)


def mask_ibans(text: str) -> tuple[str, int]:
    """The text with bank accounts masked, and their number."""

    def mark(match: re.Match[str]) -> str | None:
        """The longest part from the beginning that is an account: words may follow in capitals."""
        length = _IBAN_LENGTHS.get(match[1], 0)
        compact = match[0].replace(" ", "")
        if not length or len(compact) < length or not _is_iban(compact[:length]):
            return None
        end = _end_of(match[0], length)
        return KINDS["iban"] + match[0][end:] if match[0][end : end + 1] in ("", " ") else None

    return replace_matches(_IBAN, mark, text)


def mask_keys(text: str) -> tuple[str, int]:
    """The text with secret keys masked, and their number."""
    # a row of x is a placeholder
    return replace_matches(_KEY, lambda match: KINDS["key"] if len(set(match[0][-20:])) > 6 else None, text)


MASKS = {"key": mask_keys, "iban": mask_ibans, "card": mask_cards}
"""In the order in which they are applied."""


def _is_card(digits: str) -> bool:
    issued = any(low <= int(digits[: len(str(low))]) <= high and len(digits) in sizes for low, high, sizes in _ISSUERS)
    return issued and len(set(digits)) > 3 and _luhn(digits)


def _luhn(digits: str) -> bool:
    """Whether the last digit checks the others (ISO/IEC 7812-1, annex B)."""
    doubled = (2 * int(digit) if i % 2 else int(digit) for i, digit in enumerate(reversed(digits)))
    return sum(number - 9 if number > 9 else number for number in doubled) % 10 == 0


@functools.cache
def _value(character: str) -> str:
    return str(int(character, 36))


def _is_iban(account: str) -> bool:
    """Whether the account's number is 1 modulo 97 (ISO 13616)."""
    return int("".join(map(_value, account[4:] + account[:4]))) % 97 == 1


def _end_of(text: str, characters: int) -> int:
    """Where the first characters of a text end, blanks not counted."""
    end = 0
    while characters:
        characters -= text[end] != " "
        end += 1
    return end
