"""`ingot inspect tokenizer`: facts of a vocabulary, the tokens of a text, merges step by step, the cost of sizes."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from rich.text import Text

from ingot.core.errors import UserError
from ingot.report import figures, reading
from ingot.report.terminal import console
from ingot.stages.job import TOKENIZER, read_record
from ingot.tokenizer import reference, vocab_size
from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.byte_bpe import load_tokenizer
from ingot.tokenizer.merges import applied_merges, symbol_text
from ingot.tokenizer.settings import TURNS

EXAMPLE_CORPUS = "low low low low low lowest lowest newer newer newer wider wider wider wider"
"""The usual example of BPE merges."""
SENTENCE = "The quick brown fox jumps over the lazy dog"
"""43 characters, 9 words."""
MAX_MERGES, MAX_PAIRS, MAX_WORDS, MAX_TOKENS = 20, 6, 12, 24
"""Merges printed, and pairs, words and tokens printed of each."""
TIE_BREAKS = {
    "bpe": "its symbols occur less often apart, else first in alphabetical order",
    "wordpiece": "more frequent, else older symbols",
}
"""Rule -> how ties are broken."""
COLOURS = ("cyan", "yellow", "green", "magenta")


def tokenizer(
    stage: Path | None, text: str = "", steps: bool = False, sizes: bool = False, width: int = 4096, layers: int = 32
) -> dict[str, Any]:
    """The data of `ingot inspect tokenizer`.

    Args:
        stage: a stage with a tokenizer; required unless `steps` or `sizes` is set.
        text: the text to encode; with `steps` the text to merge; with `sizes` the sentence to count.
        steps: show the merges with which the stage's tokenizer encodes `text` (default: `SENTENCE`), or without a stage
            how a BPE learns merges from `text` (default: `EXAMPLE_CORPUS`).
        sizes: show what vocabularies cost a model of `width` and `layers`.

    Returns:
        `stage` with `type`, `vocab`, `specials`, `template`, `report`; `pieces` [{id, text}]; `applied` {text, tokens,
        merges} (of the stage's tokenizer) or `steps` {merges, ...} (learned from the text); `tradeoff` {sentence, rows,
        ...}; only those that were requested.

    Raises:
        UserError: a stage is required, or the stage has no tokenizer, or with `steps` one without merges.
    """
    if stage is None and not (steps or sizes):
        raise UserError("inspect tokenizer: no stage, expected one such as runs/NAME/bpe, or --steps, or --tradeoff")
    loaded = _load(stage) if stage else None
    data: dict[str, Any] = {}
    if stage and loaded:
        data |= _facts(stage, loaded)
    if text and loaded and not steps:
        data["pieces"] = [{"id": id, "text": _token_text(loaded, id)} for id in loaded.encode(text).tolist()]
    if steps:
        data |= {"applied": _applied(loaded, text or SENTENCE)} if loaded else {"steps": merges(text or EXAMPLE_CORPUS)}
    if sizes:
        report = reading.read_json(stage / "report.json") if stage else {}
        data["tradeoff"] = _sizes(loaded, report, text, width, layers)
    return data


def merges(text: str, rule: str = "bpe") -> dict[str, Any]:
    """The words and symbols of a text, and every merge with its counts.

    Args:
        text: words separated by spaces.
        rule: `bpe` merges the most frequent pair, `wordpiece` the pair with the highest score.
    """
    choose = {"bpe": reference.bpe, "wordpiece": reference.wordpiece}[rule]
    words = reference.words_of(text, reference.END if rule == "bpe" else "")
    steps = [
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
        "merges": steps,
    }


def _applied(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    """The symbols of each token of a text, and every merge of the tokenizer that leads to them."""
    start, applied = applied_merges(tokenizer, text)

    def texts(symbols: Iterable[str]) -> list[str]:
        return [symbol_text(tokenizer, symbol) for symbol in symbols]

    rows = [
        {
            "number": merge.number,
            "pair": texts(merge.pair),
            "symbol": symbol_text(tokenizer, "".join(merge.pair)),
            "count": merge.count,
            "tokens": [texts(token) for token in merge.tokens],
        }
        for merge in applied
    ]
    return {"text": text, "tokens": [texts(token) for token in start], "merges": rows}


def _load(stage: Path) -> Tokenizer:
    kind = read_record(stage)["kind"]
    if not (stage / TOKENIZER).exists():
        raise UserError(
            f"{stage}: a {kind} stage without a {TOKENIZER}, expected a tokenizer stage, such as runs/NAME/bpe"
        )
    return load_tokenizer(stage / TOKENIZER)


def _facts(stage: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "stage": read_record(stage)["name"],
        "type": tokenizer.kind,
        "vocab": tokenizer.vocab,
        "fingerprint": tokenizer.fingerprint,
        "specials": tokenizer.specials,
        "roles": dict(tokenizer.special_tokens_map),
        "template": tokenizer.template,
        "lossless": tokenizer.lossless,
        "encodes_any_text": tokenizer.lossless and getattr(tokenizer, "alphabet", None) is None,
        "report": reading.read_json(stage / "report.json"),
    }


def _sizes(tokenizer: Tokenizer | None, report: dict[str, Any], text: str, width: int, layers: int) -> dict[str, Any]:
    """Cost of the tokenizer's vocabulary, of smaller ones nested in it, and of common sizes."""
    sentence = text or SENTENCE
    nested = {smaller.vocab: smaller for smaller in vocab_size.nested(tokenizer)} if tokenizer else {}
    measured = {row["vocab"]: row["bytes_per_token"] for row in report.get("tradeoff", ())}
    rows = vocab_size.table([*nested, *vocab_size.PRESETS], width, layers)
    for row in rows:
        row["bytes_per_token"] = measured.get(row["vocab"])
        row["tokens"] = len(nested[row["vocab"]].encode(sentence)) if row["vocab"] in nested else None
    return {
        "width": width,
        "layers": layers,
        "sentence": sentence,
        "characters": len(sentence),
        "words": len(sentence.split()),
        "rows": rows,
    }


def _token_text(tokenizer: Tokenizer, id: int) -> str:
    return tokenizer.token_bytes(id).decode("utf-8", errors="replace")


def print_tokenizer(data: dict[str, Any]) -> None:
    """Print the data of `tokenizer`."""
    if "stage" in data:
        _print_facts(data)
    if "pieces" in data:
        _print_pieces(data["pieces"])
    if "applied" in data:
        _print_applied(data["applied"])
    if "steps" in data:
        _print_steps(data["steps"])
    if "tradeoff" in data:
        _print_sizes(data["tradeoff"])


def _print_facts(data: dict[str, Any]) -> None:
    out, report = console(), data["report"]
    lossless = "cannot encode every text"
    if data["lossless"]:
        lossless = "encodes any text" if data["encodes_any_text"] else "encodes exactly, but its own characters alone"
    specials = f"{len(data['specials'])} special tokens"
    line = f"{data['stage']}: {data['type']}, {data['vocab']:,} ids, {specials}; {lossless}"
    out.print(Text(line, "bold"), soft_wrap=True)
    roles = ", ".join(f"{role.removesuffix('_token')} {name}" for role, name in data["roles"].items())
    template = {"": "none", TURNS: TURNS}.get(data["template"], "its own (Jinja)")
    out.print(f"  chat format: {template}{'; ' + roles if roles else ''}", soft_wrap=True)
    if "bytes_per_token" in report:
        numbers = f"{report['bytes_per_token']:.3f} bytes per token, {report['tokens_per_word']:.3f} tokens per word"
        out.print(f"  {numbers}, {report['unused_ids']:,} unused ids, on {figures.size(report['sample_bytes'])}")
    for key, label in (("unknown_fraction", "of the tokens are unknown"), ("changed_fraction", "of the texts change")):
        if key in report:
            out.print(f"  {100 * report[key]:.2f} % {label}")
    for by in ("source", "script"):
        for name, row in report.get(f"by_{by}", {}).items():
            numbers = f"{row['bytes_per_token']:>8.3f} bytes per token {row['tokens_per_word']:>8.3f} tokens per word"
            out.print(f"  {by} {name:<24} {figures.size(row['bytes']):>10} {numbers}", soft_wrap=True)
    if "longest_tokens" in report:
        out.print("  longest: " + " ".join(map(figures.visible, report["longest_tokens"])), soft_wrap=True)


def _print_pieces(pieces: list[dict[str, Any]]) -> None:
    out, text = console(), Text()
    for number, piece in enumerate(pieces):
        visible = piece["text"].replace(" ", "·").replace("\n", "⏎\n")
        text.append(visible if out.is_terminal else f"[{visible}]", COLOURS[number % len(COLOURS)])
        text.append(f"{piece['id']} ", "dim")
    out.print(text, soft_wrap=True)
    out.print(f"{len(pieces):,} tokens")


def _print_applied(applied: dict[str, Any]) -> None:
    out, rows = console(), applied["merges"]
    symbols = sum(map(len, applied["tokens"]))
    line = f"{symbols:,} symbols become {len(applied['tokens']):,} tokens by {len(rows):,} of the tokenizer's merges"
    out.print(Text(f"{_visible(applied['text'])}: {line}", "bold"), soft_wrap=True)
    out.print(f"     {_split(applied['tokens'])}", soft_wrap=True)
    for row in rows[:MAX_MERGES]:
        left, right, symbol = map(_visible, (*row["pair"], row["symbol"]))
        times = f"{row['count']:,} time{'s' if row['count'] != 1 else ''}"
        line = Text(f"  merge {row['number']:,}: {left} + {right} -> ").append(symbol, "green").append(f"  {times}")
        out.print(line, soft_wrap=True)
        out.print(f"     {_split(row['tokens'])}", soft_wrap=True)
    if len(rows) > MAX_MERGES:
        out.print(f"... {len(rows) - MAX_MERGES} more merges, which end in")
        out.print(f"     {_split(rows[-1]['tokens'])}", soft_wrap=True)


def _split(tokens: list[list[str]]) -> str:
    """The symbols of the first tokens: blanks between symbols, bars between tokens."""
    shown = " | ".join(" ".join(map(_visible, symbols)) for symbols in tokens[:MAX_TOKENS])
    return shown + (" ..." if len(tokens) > MAX_TOKENS else "")


def _visible(text: str) -> str:
    return text.replace(" ", "·").replace("\n", "⏎")


def _print_steps(steps: dict[str, Any]) -> None:
    out = console()
    out.print(Text(_joined(steps["words"], MAX_WORDS, "{0} ({1}x)"), "bold"), soft_wrap=True)
    out.print(f"{len(steps['symbols'])} symbols: {' '.join(steps['symbols'])}", soft_wrap=True)
    for number, step in enumerate(islice(steps["merges"], MAX_MERGES), 1):
        counts = dict(sorted(step["pairs"].items(), key=lambda item: -item[1]))
        out.print(Text(f"  pairs: {_joined(counts, MAX_PAIRS, '{0} {1}')}", "dim"), soft_wrap=True)
        times = f"{step['count']:,} times" + (f", score {step['score']:.5g}" if steps["rule"] == "wordpiece" else "")
        line = Text(f"{number:>3}  {' + '.join(step['pair'])} -> ").append(step["symbol"], "green").append(f"  {times}")
        if step["tied"]:
            others = ", ".join(" ".join(pair) for pair in step["tied"])
            line.append(f"; tied with {others}: {TIE_BREAKS[steps['rule']]}", "yellow")
        out.print(line, soft_wrap=True)
        out.print(f"     {_joined(step['words'], MAX_WORDS, '{0}')}", soft_wrap=True)
    if len(steps["merges"]) > MAX_MERGES:
        out.print(f"... {len(steps['merges']) - MAX_MERGES} more merges; --json lists all")


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
        "bytes per token",
        "tokens of the text",
    ):
        table.add_column(name, justify="right")
    for row in sizes["rows"]:
        measured = "–" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:.3f}"
        tokens = "–" if row["tokens"] is None else f"{row['tokens']:,}"
        fraction = f"{100 * row['fraction']:.1f} %"
        numbers = (f"{row['vocab']:,}", f"{row['parameters']:,}", f"{row['bytes']:,}", figures.size(row["bytes"]))
        table.add_row(*numbers, fraction, measured, tokens)
    out.print(table)


def _joined(counts: dict[str, int], max_items: int, form: str) -> str:
    """The first items of `counts`, formatted by `form` (0 is the key, 1 the count)."""
    first = ", ".join(form.format(*item) for item in islice(counts.items(), max_items))
    return first + (" ..." if len(counts) > max_items else "")
