"""`ingot inspect tokenizer`: what a vocabulary is, how it cuts a text, how merging goes, and what its size costs."""

from itertools import islice
from pathlib import Path
from typing import Any

from rich.text import Text

from ingot.core.errors import UserError
from ingot.report import figures, reading
from ingot.report.terminal import console
from ingot.stages.job import open_stage
from ingot.tokenizer import reference, vocab_size
from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.byte_bpe import load_tokenizer
from ingot.tokenizer.settings import TURNS

TOLD = "low low low low low lowest lowest newer newer newer wider wider wider wider"
"""The corpus on which merging is usually told."""
SENTENCE = "The quick brown fox jumps over the lazy dog"
"""43 characters, 9 words."""
SHOWN_STEPS, SHOWN_PAIRS, SHOWN_WORDS = 20, 6, 12
WHY = {"bpe": "its halves are seen less apart, else first by letters", "wordpiece": "more frequent, else older symbols"}
"""How ties are broken."""
COLOURS = ("cyan", "yellow", "green", "magenta")
FILE = "tokenizer.json"


def tokenizer(
    stage: Path | None, text: str = "", steps: bool = False, sizes: bool = False, width: int = 4096, layers: int = 32
) -> dict[str, Any]:
    """What is asked of a tokenizer.

    Args:
        stage: a stage that holds one; needed unless only `steps` or `sizes` are asked for.
        text: cut into pieces, merged step by step, or counted.
        steps: merge `text` (or the usual corpus) step by step.
        sizes: what vocabularies cost a model of `width` and `layers`.

    Returns:
        `stage` with `type`, `vocab`, `specials`, `template`, `report`; `pieces` [{id, text}]; `steps` [{pair, ...}];
        `tradeoff` {sentence, rows}; as far as they were asked for.

    Raises:
        UserError: no stage where one is needed, or one without a tokenizer.
    """
    if stage is None and not (steps or sizes):
        raise UserError("inspect tokenizer: no stage, expected one such as runs/NAME/bpe, or --steps, or --tradeoff")
    found = _load(stage) if stage else None
    data: dict[str, Any] = {}
    if stage and found:
        data |= _facts(stage, found)
    if text and found and not steps:
        data["pieces"] = [{"id": id, "text": _spelled(found, id)} for id in found.encode(text).tolist()]
    if steps:
        data["steps"] = merges(text or TOLD, "wordpiece" if found and found.kind == "wordpiece" else "bpe")
    if sizes:
        data["tradeoff"] = _sizes(found, reading.read_json(stage / "report.json") if stage else {}, text, width, layers)
    return data


def merges(text: str, rule: str) -> dict[str, Any]:
    """Merging as it is told: the words, the alphabet, and every merge with its reason.

    Args:
        text: words, cut at blanks.
        rule: `bpe` (the most frequent pair) or `wordpiece` (the highest score).
    """
    choose = {"bpe": reference.together, "wordpiece": reference.wordpiece}[rule]
    words = reference.words_of(text, reference.END if rule == "bpe" else "")
    made = [
        {
            "pair": list(step.pair),
            "symbol": step.symbol,
            "count": step.pairs[step.pair],
            "score": float(step.score),
            "tied": [list(pair) for pair in step.tied[1:]],
            "pairs": {" ".join(pair): count for pair, count in step.pairs.items()},
            "words": {" ".join(word): count for word, count in step.words.items()},
        }
        for step in reference.steps(words, choose)
    ]
    return {
        "rule": rule,
        "words": {" ".join(word): count for word, count in words.items()},
        "symbols": reference.symbols_of(words),
        "merges": made,
    }


def _load(stage: Path) -> Tokenizer:
    kind = open_stage(stage)["kind"]
    if not (stage / FILE).exists():
        raise UserError(f"{stage}: a {kind} stage without a {FILE}, expected a tokenizer stage, such as runs/NAME/bpe")
    return load_tokenizer(stage / FILE)


def _facts(stage: Path, found: Tokenizer) -> dict[str, Any]:
    return {
        "stage": open_stage(stage)["name"],
        "type": found.kind,
        "vocab": found.vocab,
        "fingerprint": found.fingerprint,
        "specials": found.specials,
        "roles": dict(found.names),
        "template": found.template,
        "lossless": found.lossless,
        "report": reading.read_json(stage / "report.json"),
    }


def _sizes(found: Tokenizer | None, report: dict[str, Any], text: str, width: int, layers: int) -> dict[str, Any]:
    sentence = text or SENTENCE
    held = {one.vocab: one for one in vocab_size.smaller(found)} if found else {}
    measured = {row["vocab"]: row["bytes_per_token"] for row in report.get("tradeoff", ())}
    rows = vocab_size.table([*held, *vocab_size.PRESETS], width, layers)
    for row in rows:
        row["bytes_per_token"] = measured.get(row["vocab"])
        row["tokens"] = len(held[row["vocab"]].encode(sentence)) if row["vocab"] in held else None
    return {
        "width": width,
        "layers": layers,
        "sentence": sentence,
        "characters": len(sentence),
        "words": len(sentence.split()),
        "rows": rows,
    }


def _spelled(found: Tokenizer, id: int) -> str:
    return found.token_bytes(id).decode("utf-8", errors="replace")


def print_tokenizer(data: dict[str, Any]) -> None:
    """All that was asked for, in colour where there is colour."""
    if "stage" in data:
        _print_facts(data)
    if "pieces" in data:
        _print_pieces(data["pieces"])
    if "steps" in data:
        _print_steps(data["steps"])
    if "tradeoff" in data:
        _print_sizes(data["tradeoff"])


def _print_facts(data: dict[str, Any]) -> None:
    out, report = console(), data["report"]
    lossless = "spells any text" if data["lossless"] else "does not spell every text"
    specials = f"{len(data['specials'])} special tokens"
    line = f"{data['stage']}: {data['type']}, {data['vocab']:,} ids, {specials}; {lossless}"
    out.print(Text(line, "bold"), soft_wrap=True)
    roles = ", ".join(f"{role.removesuffix('_token')} {name}" for role, name in data["roles"].items())
    template = {"": "none", TURNS: TURNS}.get(data["template"], "its own (Jinja)")
    out.print(f"  chat format: {template}{'; ' + roles if roles else ''}", soft_wrap=True)
    if "bytes_per_token" in report:
        numbers = f"{report['bytes_per_token']:.3f} bytes a token, {report['tokens_per_word']:.3f} tokens a word"
        out.print(f"  {numbers}, {report['unused_ids']:,} ids never needed, on {figures.size(report['sample_bytes'])}")
    for share, what in (("unknown_share", "of the tokens are unknown"), ("changed_share", "of the texts change")):
        if share in report:
            out.print(f"  {100 * report[share]:.2f} % {what}")
    for by in ("source", "script"):
        for name, row in report.get(f"by_{by}", {}).items():
            numbers = f"{row['bytes_per_token']:>8.3f} bytes a token {row['tokens_per_word']:>8.3f} tokens a word"
            out.print(f"  {by} {name:<24} {figures.size(row['bytes']):>10} {numbers}", soft_wrap=True)
    if "longest_tokens" in report:
        out.print("  longest: " + " ".join(map(figures.visible, report["longest_tokens"])), soft_wrap=True)


def _print_pieces(pieces: list[dict[str, Any]]) -> None:
    out, text = console(), Text()
    for number, piece in enumerate(pieces):
        shown = piece["text"].replace(" ", "·").replace("\n", "⏎\n")
        text.append(shown if out.is_terminal else f"[{shown}]", COLOURS[number % len(COLOURS)])
        text.append(f"{piece['id']} ", "dim")
    out.print(text, soft_wrap=True)
    out.print(f"{len(pieces):,} tokens")


def _print_steps(steps: dict[str, Any]) -> None:
    out = console()
    out.print(Text(_joined(steps["words"], SHOWN_WORDS, ", ", "{0} ({1}x)"), "bold"), soft_wrap=True)
    out.print(f"{len(steps['symbols'])} symbols: {' '.join(steps['symbols'])}", soft_wrap=True)
    for number, step in enumerate(islice(steps["merges"], SHOWN_STEPS), 1):
        counts = dict(sorted(step["pairs"].items(), key=lambda item: -item[1]))
        out.print(Text(f"  pairs: {_joined(counts, SHOWN_PAIRS, ', ', '{0} {1}')}", "dim"), soft_wrap=True)
        worth = f"{step['count']:,} times" + (f", score {step['score']:.5g}" if steps["rule"] == "wordpiece" else "")
        line = Text(f"{number:>3}  {' + '.join(step['pair'])} -> ").append(step["symbol"], "green").append(f"  {worth}")
        if step["tied"]:
            others = ", ".join(" ".join(pair) for pair in step["tied"])
            line.append(f"; tied with {others}: {WHY[steps['rule']]}", "yellow")
        out.print(line, soft_wrap=True)
        out.print(f"     {_joined(step['words'], SHOWN_WORDS, ', ', '{0}')}", soft_wrap=True)
    if len(steps["merges"]) > SHOWN_STEPS:
        out.print(f"... {len(steps['merges']) - SHOWN_STEPS} more merges; --json lists all")


def _print_sizes(sizes: dict[str, Any]) -> None:
    from rich.table import Table

    out = console()
    out.print(f'"{sizes["sentence"]}": {sizes["characters"]:,} characters, {sizes["words"]:,} words', soft_wrap=True)
    table = Table(title=f"embedding of width {sizes['width']:,}, {sizes['layers']} layers, fp32", title_justify="left")
    for name in (
        "vocabulary",
        "parameters",
        "bytes",
        "",
        "with head, of the model",
        "bytes a token",
        "tokens of the text",
    ):
        table.add_column(name, justify="right")
    for row in sizes["rows"]:
        measured = "–" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:.3f}"
        tokens = "–" if row["tokens"] is None else f"{row['tokens']:,}"
        share = f"{100 * row['share']:.1f} %"
        numbers = (f"{row['vocab']:,}", f"{row['parameters']:,}", f"{row['bytes']:,}", figures.size(row["bytes"]))
        table.add_row(*numbers, share, measured, tokens)
    out.print(table)


def _joined(counts: dict[str, int], most: int, sign: str, form: str) -> str:
    shown = sign.join(form.format(*item) for item in islice(counts.items(), most))
    return shown + (" ..." if len(counts) > most else "")
