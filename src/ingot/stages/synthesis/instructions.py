"""Writes new prompts from examples, as in Self-Instruct (Wang et al. 2022, arXiv:2212.10560) and Alpaca.

A request shows some prompts as a numbered list and asks to continue it. New prompts are read from the numbers.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ingot.data.sampler import key_of, permute

_ITEM = re.compile(
    r"^(?P<indent>[ \t]*)(?:\*\*)?(?:task[ \t]+)?(?P<number>\d{1,4})[.):](?:\*\*)?(?!\d)[ \t]*",
    re.IGNORECASE | re.MULTILINE,
)
"""The beginning of an item of a numbered list; 3.14 and 12:30 begin none."""


def shown(index: int, prompts: int, examples: int, seed: int, split: int) -> list[int]:
    """The numbers of the prompts that are shown with one: itself, and others of the same split."""
    drawn = permute(np.arange(min(prompts, examples)), prompts, key_of(seed, 0x73686F77, split, index)).tolist()
    return [index, *(i for i in drawn if i != index)][:examples]


def request(texts: Sequence[str], new: int) -> list[dict[str, Any]]:
    """The messages that ask for new prompts.

    Args:
        texts: the prompts that are shown.
        new: how many to ask for.
    """
    listed = "\n".join(f"{number}. {text.strip()}" for number, text in enumerate(texts, 1))
    first, last = len(texts) + 1, len(texts) + new
    ask = (
        f"These are {len(texts)} tasks for an assistant:\n\n{listed}\n\nContinue the list with the tasks {first} to "
        f"{last}. They are different from these and from each other, in subject, form and wording, and each contains "
        "all that it needs. Write the numbered list and nothing else, without solutions."
    )
    return [{"role": "user", "content": ask}]


def read_list(text: str, new: int, complete: bool) -> list[str]:
    """The items of a numbered list, at most `new`; what stands before the first number is left out.

    Args:
        text: an answer.
        new: how many were asked for.
        complete: whether the last item is; if not, it is left out.
    """
    text = text.rpartition("</think>")[2]
    begins: list[re.Match[str]] = []
    for found in _ITEM.finditer(text):  # a list inside of an item is indented, or begins at 1 again
        if not begins or (
            len(found["indent"]) <= len(begins[0]["indent"]) and int(found["number"]) > int(begins[-1]["number"])
        ):
            begins.append(found)
    ends = [*(found.start() for found in begins[1:]), len(text)]
    items = [text[found.end() : end].strip() for found, end in zip(begins, ends, strict=False)]
    return list(filter(None, items if complete else items[:-1]))[:new]


def text_of(document: str) -> str:
    """The text of a document of format `prompts`."""
    return "\n\n".join(message["content"] for message in json.loads(document))
