"""`ingot inspect corpus`: rules, planted documents, kinds of instructions and masked places as text."""

from typing import Any

from rich.text import Text

from ingot.report.terminal import console


def print_checks(data: dict[str, Any]) -> None:
    """Print what a corpus stage knows of its rules and checks."""
    out = console()
    for name, rule in data["rules"].items():
        if rule["alone"]:
            out.print(f"  {name}: alone {rule['alone']:,}, only it {rule['only']:,}", soft_wrap=True)
        for near in rule.get("near", ())[:1]:
            out.print(Text(f"  {name}, near miss: {near['value']:g}, {near['path']}", "dim"), soft_wrap=True)
    for name, kind in data["planted"].items():
        precision = "–" if kind["precision"] is None else f"{kind['precision']:.3f}"
        numbers = f"{kind['found']:,} of {kind['planted']:,} found, recall {kind['recall']:.3f}, precision {precision}"
        out.print(f"planted {name}: {numbers}", soft_wrap=True)
    if instructions := data["instructions"]:
        kinds = ", ".join(f"{name} {kind['documents']:,}" for name, kind in instructions["kinds"].items())
        out.print(f"instructions: {kinds}", soft_wrap=True)
        for name, text in instructions["facts"].items():
            out.print(f"  {name}: {text}", soft_wrap=True)
    for kind, places in data["masked"].items():
        for place in places:
            out.print(Text(f"masked {kind}: {place['before']!r} -> {place['after']!r}"), soft_wrap=True)
