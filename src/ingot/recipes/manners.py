"""Does an answer read like those that were preferred? A judge that no model was trained against, for
align-instructions.toml: no network at all, a list of words.

A mark is a word, or two words in a row, that at least five chosen answers have, and chosen answers eight times as often
as rejected ones. Rows that are held out are not counted. Run it beside instructions.json to see the marks, and how many
of the held-out answers bear one:

    python manners.py
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

FILE = Path("instructions.json")
"""Where `sources` of the recipe has them; relative to the directory where `ingot` is called, as there."""
HELD_OUT = 0.2
"""Share of the rows, the last ones, that models are judged on; as `holdout` in the recipe."""


def preferred(prompts: list[dict[str, str]], completions: list[str]) -> list[float]:
    """1 for an answer that bears a mark, else 0."""
    return [float(bool(marks() & words(said))) for said in completions]


def words(text: str) -> set[str]:
    """Its words and its pairs of words, in small letters; "^" stands before the first."""
    found = ["^", *re.findall(r"[^\W\d_][\w']*", text.lower())]
    return {*found[1:], *(f"{a} {b}" for a, b in pairwise(found))}


@functools.cache
def marks() -> frozenset[str]:
    """The marks of chosen answers."""
    shown, _ = split()
    chosen, rejected = count(row["chosen"] for row in shown), count(row["rejected"] for row in shown)
    return frozenset(mark for mark, n in chosen.items() if n >= 5 and n >= 8 * (rejected[mark] + 0.5))


def split() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows to count, and rows held out; without those whose two sides are the same."""
    rows = [row for row in json.loads(FILE.read_text()) if row["chosen"] != row["rejected"]]
    border = int((1 - HELD_OUT) * len(rows))
    return rows[:border], rows[border:]


def count(answers: Iterable[str]) -> Counter[str]:
    """In how many answers each word and each pair of words stands."""
    return Counter(word for answer in answers for word in words(answer))


def main() -> None:
    """Print the marks, and how many held-out answers bear one."""
    _, held = split()
    print(f"{len(marks())} marks: {', '.join(sorted(marks()))}")
    for side in ("chosen", "rejected"):
        bearing = preferred([], [row[side] for row in held])
        print(f"of {len(held)} held-out {side} answers bear one: {100 * sum(bearing) / len(held):.1f} %")


if __name__ == "__main__":
    main()
