"""Texts, settings and documents that the tests of this folder share."""

import argparse
import inspect
import json
import textwrap
from typing import Any

import pyarrow as pa

from ingot.corpus.documents import SCHEMA
from ingot.tokenizer.settings import TokenizerSettings

SOURCES = [inspect.getsource(module) for module in (argparse, textwrap, json.decoder, json.encoder)]


def settings(**values: Any) -> TokenizerSettings:
    return TokenizerSettings.model_validate({"from": "clean", **values})


def labelled(*texts: str) -> list[tuple[str, str]]:
    """Texts of one source."""
    return [("notes", text) for text in texts]


def documents(
    texts: list[str], split: str = "train", first: int = 0, extras: list[str | None] | None = None
) -> pa.Table:
    """Documents of the corpus contract with made-up identities."""
    numbers = range(first, first + len(texts))
    columns = {
        "text": texts,
        "source": ["notes"] * len(texts),
        "path": [f"notes/{n // 3}.jsonl" for n in numbers],
        "offset": [100 * n for n in numbers],
        "bytes": [len(text.encode()) for text in texts],
        "group": [f"{n // 3}.jsonl" for n in numbers],
        "cluster": [2**63 + n for n in numbers],
        "split": [split] * len(texts),
        "extra": extras or [None] * len(texts),
        **dict.fromkeys(("metadata", "language", "language_score"), [None] * len(texts)),
    }
    return pa.table(columns, schema=SCHEMA)
