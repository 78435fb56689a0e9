"""Places of texts in the training data (`stages/training/search.py`) as text for the terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from ingot.core.errors import shortened
from ingot.report import figures
from ingot.report.terminal import MAX_PIECE_CHARACTERS, MAX_STEPS, console

MARKS = "«", "»"
"""Signs around the parts of an answer that are in the training data."""


def print_found(found: Mapping[str, Any]) -> None:
    """Print the places of a text, or of its longest parts."""
    out = console()
    for line in found_lines(found):
        out.print(line, soft_wrap=True)


def found_lines(found: Mapping[str, Any]) -> Iterator[Text]:
    """The lines of `print_found`."""
    if found["count"]:
        yield Text(f"{_places(found['count'])} in the training data", "bold")
        for place in found["places"]:
            yield from place_lines(place)
        yield from _more(found)
        return
    what = "its longest parts:" if found["parts"] else f"nor are any {found['min_words']} words of it"
    yield Text(f"the text is not in the training data; {what}", "bold")
    yield from part_lines(found["parts"])


def part_lines(parts: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """The parts of a text, each with its places."""
    for part in parts:
        text = shortened(" ".join(part["text"].split()), MAX_PIECE_CHARACTERS)
        yield Text(f'"{text}": {part["words"]:,} words, {_places(part["count"])}', "bold")
        for place in part["places"]:
            yield from place_lines(place)
        yield from _more(part)


def place_lines(place: Mapping[str, Any]) -> Iterator[Text]:
    """The document of a place, named as `ingot without` takes it, its steps, and the text there with what is around."""
    first, last = place["first_token"], place["first_token"] + place["tokens"] - 1
    seen = "; held out" if place["held_out"] else "".join(f"; {_steps(*stage)}" for stage in place["steps"].items())
    masked = "".join(f"; {number:,} x {kind} masked" for kind, number in place["masked"].items())
    name = f"{place['path']}#{place['offset']}{', ' if place['answer'] else ''}{place['answer']}"
    yield Text(f"  {place['corpus']}: {name}, tokens {first:,} to {last:,}{seen}{masked}", "cyan")
    text = shortened(place["text"], MAX_PIECE_CHARACTERS)
    around = (" ".join(part.split("\n")) for part in (place["before"], text, place["after"]))
    yield Text("    {}{}{}{}{}".format(*[x for pair in zip(around, (*MARKS, ""), strict=True) for x in pair]), "dim")


def marked(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """The text with marks around the characters of any span [first, last), given in the order of `first`."""
    out, end = [], 0
    for first, last in merged(spans):
        out += [text[end:first], MARKS[0], text[first:last], MARKS[1]]
        end = last
    return "".join(out) + text[end:]


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in the order of their starts, with those that overlap as one."""
    out: list[tuple[int, int]] = []
    for first, last in spans:
        if out and first <= out[-1][1]:
            out[-1] = out[-1][0], max(last, out[-1][1])
        else:
            out.append((first, last))
    return out


def _steps(stage: str, steps: Sequence[int]) -> str:
    if not steps:
        return f"in no step of {stage}"
    first = ", ".join(f"{step:,}" for step in steps[:MAX_STEPS])
    more = f" and {len(steps) - MAX_STEPS:,} more" if len(steps) > MAX_STEPS else ""
    return f"step{'s' if len(steps) > 1 else ''} {first}{more} of {stage}"


def _places(count: int) -> str:
    return f"{figures.count(count)} place{'s' if count != 1 else ''}"


def _more(found: Mapping[str, Any]) -> Iterator[Text]:
    if left := found["count"] - len(found["places"]):
        yield Text(f"  and {left:,} more; --rows shows more", "dim")
