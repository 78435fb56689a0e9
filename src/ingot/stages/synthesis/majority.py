"""Agreement of several answers to one prompt (self-consistency, Wang et al. 2022, arXiv:2203.11171).

Right answers agree more often than wrong ones, which differ from each other. The final answers are compared: what
follows the last of `####`, `Answer:` and `answer is` in its line, or the content of the last `\\boxed{...}`, or else
the last line.
"""

import re
from collections import Counter
from collections.abc import Sequence


def _balanced(depth: int) -> str:
    """A pattern of text whose braces are balanced, nested up to `depth` times."""
    return r"(?:[^{}]|\{" + _balanced(depth - 1) + r"\})*" if depth else "[^{}]*"


_BOXED = r"\\boxed\{(?P<boxed>" + _balanced(8) + r")\}"
_MARKED = re.compile(
    r"####[ \t]*(?P<hashes>.+)|" + _BOXED + r"|\banswer(?:[ \t]+is\b[ \t]*:?|[ \t]*:)[ \t]*(?P<named>.+)",
    re.IGNORECASE,
)


def agreement(answers: Sequence[str]) -> list[float]:
    """For each answer, the fraction of all answers that have its final answer."""
    final = [*map(final_answer, answers)]
    counts = Counter(final)
    return [counts[one] / len(final) for one in final]


def final_answer(text: str) -> str:
    """The final answer of a text, in lower case, without emphasis, currency, commas in numbers and a full stop. A mark
    with nothing behind it in its line marks nothing.
    """
    marked = [_plain(next(filter(None, match.groups()), "")) for match in _MARKED.finditer(text)]
    found = [*filter(None, marked)] or [*filter(None, map(_plain, text.splitlines()))]
    return found[-1] if found else ""


def _plain(found: str) -> str:
    boxed = re.findall(_BOXED, found)
    found = re.sub(r"[*_`$]|\\[()\[\]]", "", boxed[-1] if boxed else found)
    return " ".join(re.sub(r"(?<=\d),(?=\d{3}\b)", "", found).casefold().split()).strip(" .:")
