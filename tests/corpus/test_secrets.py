"""Cards, bank accounts and keys are masked; numbers that only look like them are not."""

import random

import polars as pl
import pytest

from ingot.corpus import secrets
from ingot.corpus.pii import mask_pii


def mask(text: str) -> str:
    return mask_pii(pl.Series([text]))[0][0]


def key(
    prefix: str, length: int, alphabet: str = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
) -> str:
    """A key of a provider's form, made here so that no scanner takes this file for a leak."""
    draw = random.Random(length)
    return prefix + "".join(draw.choice(alphabet) for _ in range(length))


UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
PEM = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEow\nIBAAKC==\n-----END RSA " + "PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("card 4111 1111 1111 1111.", "card 4111 1111 1111 1111."),  # three different digits: an example
        ("card 4539 1488 0343 6467.", "card [CARD]."),
        ("4539148803436467, 5425-2334-3010-9903", "[CARD], [CARD]"),
        ("Amex 3782 822463 10005", "Amex [CARD]"),
        ("DE89 3704 0044 0532 0130 00", "[IBAN]"),
        ("to GB82WEST12345698765432, please", "to [IBAN], please"),
        ("FR14 2004 1010 0505 0001 3M02 606 BIC PSSTFRPP", "[IBAN] BIC PSSTFRPP"),
        (f"export KEY={key('AKIA', 16, UPPER)}", "export KEY=[KEY]"),
        (f"token: '{key('ghp_', 36)}'", "token: '[KEY]'"),
        (f"{key('hf_', 34)} and {key('sk-proj-', 48)}", "[KEY] and [KEY]"),
        (f"Bearer {key('eyJ', 20)}.{key('eyJ', 40)}.{key('', 43)}", "Bearer [KEY]"),
        (f"a\n{PEM}\nb", "a\n[KEY]\nb"),
    ],
)
def test_B1_secrets(text: str, masked: str):
    assert mask(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "4539 1488 0343 6468 and 1234567812345678",  # wrong check digit, no issuer
        "0.4539148803436467 and 4539148803436467.5 and id-4539148803436467",
        "9780306406157 8 and 20240115123045123",
        "sha 45391488034364670a and 4539148803436467_x",
        "DE89 3704 0044 0532 0130 01",  # wrong remainder
        "AB12 CDEF 3456 GHIJ 7890 and ISO 9001 2015 2020 2021",
        "sk-learn sk-image-processing-toolkit xoxb-short AKIAEXAMPLE",
        "sk-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx hf_" + "x" * 34,
        "eyJhbGciOi is the beginning of a token",
        "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
    ],
)
def test_B1_what_only_looks_secret(text: str):
    assert mask(text) == text


def test_B1_counts_of_secrets_by_kind():
    texts, counts = mask_pii(
        pl.Series(["5425-2334-3010-9903 DE89370400440532013000", "nothing", key("ghp_", 36) + " x@y.org"])
    )
    assert texts.to_list() == ["[CARD] [IBAN]", "nothing", "[KEY] [EMAIL]"]
    assert {k: c.to_list() for k, c in counts.items() if c.sum()} == {
        "email": [0, 0, 1],
        "card": [1, 0, 0],
        "iban": [1, 0, 0],
        "key": [0, 0, 1],
    }


def test_B1_chance_rarely_passes_the_checks():
    """Of numbers of the right form one in ten passes the check of cards, and one in 97 that of IBANs."""
    draw = random.Random(0)
    cards = sum(secrets.mask_cards(f"id {draw.randrange(10**15, 10**16)} x")[1] for _ in range(20_000))
    ibans = sum(secrets.mask_ibans(f"DE{draw.randrange(10**20):020} x")[1] for _ in range(5_000))
    assert cards / 20_000 < 0.04
    assert ibans / 5_000 == pytest.approx(1 / 97, abs=0.006)


def test_B1_a_long_row_of_digits_or_capitals_takes_no_time():
    for text in ("4" * 200_000, "DE89 " * 40_000, "AB12" * 50_000, "-----BEGIN PRIVATE KEY-----" + "A\n" * 50_000):
        assert mask(text) == text
