"""`ingot inspect mask`: what is trained on, token by token, in the first documents of a store.

Asked of a train stage it shows its documents as its rows hold them: what the context cuts off is not trained on, and
a document that no row holds says so. Free of torch.
"""

import codecs
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from ingot.core.artifact import RECORD
from ingot.core.errors import UserError
from ingot.data.packing import RowPlan
from ingot.report.inspect.inspect import MOST_TOKENS, tokenizer_of
from ingot.report.terminal import console
from ingot.stages.job import open_stage
from ingot.stages.training.trace import open_trained
from ingot.store.reader import Store
from ingot.tokenizer.base import Tokenizer

SIDES = ("chosen", "rejected")
"""Of the adjacent documents in a store of pairs."""
LEARNED, OTHER = ("green", "bold green"), ("dim", "bright_black")
"""Styles that tokens take in turn, so that their borders show."""


def mask(stage: Path, rows: int) -> dict[str, Any]:
    """Which tokens of the first training documents are trained on.

    Args:
        stage: a tokens stage, a corpus stage that was encoded, or a train stage (which shows all of its corpora).
        rows: documents of each store; of pairs, pairs.

    Returns:
        {stage, stores: [{name, content, documents: [{side, path, offset ..., tokens, trained, cut, shown, pieces:
        [[text, trained?], ...]}]}]}. `side` is chosen or rejected in a store of pairs, else null; `cut` counts the
        tokens that no row of a train stage holds; a store without a mask trains on every token. The text of a token
        that ends within a character comes with the token that completes it.

    Raises:
        UserError: another kind of stage, a corpus that nobody encoded yet, or a damaged store.
    """
    told = open_stage(stage)
    match told["kind"]:
        case "tokens":
            stores = [_tokens(stage, told, rows)]
        case "corpus":
            stores = [_tokens(link, open_stage(link), rows) for link in _encoded(stage, told)]
        case "train":
            data, _, tokenizer = open_trained(stage)
            stores = [_store(source.name, source.store, tokenizer, rows, source.plan) for source in data.longest]
        case kind:
            raise UserError(
                f"{stage}: is of kind {kind}, expected a tokens, corpus or train stage, such as runs/NAME/questions@bpe"
            )
    return {"stage": told["name"], "stores": stores}


def _encoded(stage: Path, told: dict[str, Any]) -> list[Path]:
    """The tokens stages of a corpus stage in its run."""
    stages = ((p, open_stage(p)) for p in sorted(stage.parent.iterdir()) if (p / RECORD).exists())
    found = [p for p, t in stages if t["kind"] == "tokens" and t["inputs"]["corpus"]["key"] == told["key"]]
    if not found:
        raise UserError(
            f"{stage}: found no tokens stage of it in this run, so it was not encoded; run a stage that trains on it"
        )
    return found


def _tokens(stage: Path, told: dict[str, Any], rows: int) -> dict[str, Any]:
    tokenizer = tokenizer_of(stage)
    return _store(told["name"], Store.open(stage / "train", tokenizer=tokenizer.fingerprint), tokenizer, rows, None)


def _store(name: str, store: Store, tokenizer: Tokenizer, rows: int, plan: RowPlan | None) -> dict[str, Any]:
    most = min(rows * store.group, store.documents)
    documents = [_document(store, n, tokenizer, plan) for n in range(most)]
    return {"name": name, "content": store.content, "documents": documents}


def _document(store: Store, number: int, tokenizer: Tokenizer, plan: RowPlan | None) -> dict[str, Any]:
    start, end = store.span(number)
    ids = store.ids.read(start, end)
    learned = np.ones(len(ids), bool)
    if "mask" in store.columns:
        learned = store.columns["mask"].read(start, end) != 0
    held = len(ids) if plan is None else _held(plan, number, start)
    return {
        "side": SIDES[number % 2] if store.content == "pairs" else None,
        **store.identity(number),
        "tokens": len(ids),
        "trained": int(np.count_nonzero(learned[:held])),
        "cut": len(ids) - held,
        "shown": min(held, MOST_TOKENS),
        "pieces": _pieces(ids[: min(held, MOST_TOKENS)], learned, tokenizer),
    }


def _held(plan: RowPlan, document: int, start: int) -> int:
    """How many of a document's first tokens stand in some row."""
    pieces = (piece for row in plan.rows_of(document) for piece in plan.slices(row))
    return max((piece.stop - start for piece in pieces if piece.document == document), default=0)


def _pieces(ids: np.ndarray, learned: np.ndarray, tokenizer: Tokenizer) -> list[list[Any]]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(ids) - 1
    return [
        [decoder.decode(tokenizer.token_bytes(token), final=n == last), bool(learned[n])]
        for n, token in enumerate(ids.tolist())
    ]


def print_mask(data: dict[str, Any]) -> None:
    """Trained tokens in green, the others dim; where there is no colour, what is trained on stands in ⟦ ⟧."""
    out = console()
    for store in data["stores"]:
        if len(data["stores"]) > 1:
            out.print(Text(store["name"], "bold underline"), soft_wrap=True)
        for document in store["documents"]:
            out.print(Text(_heading(document, store["content"]), "bold"), soft_wrap=True)
            out.print(_coloured(document) if out.is_terminal else _bracketed(document), soft_wrap=True)
            if document.get("extra"):
                out.print(Text(f"further fields: {document['extra']}", "cyan"), soft_wrap=True)
            out.print()


def _coloured(document: dict[str, Any]) -> Text:
    text = Text()
    for n, (piece, learned) in enumerate(document["pieces"]):
        text.append(piece, (LEARNED if learned else OTHER)[n % 2])
    return text.append(_rest(document), "yellow")


def _bracketed(document: dict[str, Any]) -> Text:
    runs = itertools.groupby(document["pieces"], key=lambda piece: piece[1])
    shown = ((learned, "".join(text for text, _ in run)) for learned, run in runs)
    return Text("".join(f"⟦{text}⟧" if learned else text for learned, text in shown) + _rest(document))


def _rest(document: dict[str, Any]) -> str:
    more = document["tokens"] - document["cut"] - document["shown"]
    words = [f"{more:,} more tokens"] if more else []
    if document["cut"]:
        what = "beyond the context" if document["shown"] else "of a document that no row holds"
        words.append(f"{document['cut']:,} tokens {what}, not trained on")
    return f" … {'; '.join(words)}" if words else ""


def _heading(document: dict[str, Any], content: str) -> str:
    what = {"pairs": "compared", "prompts": "trained on; the model answers"}.get(content, "trained on")
    side = f", {document['side']}" if document["side"] else ""
    counts = f"{document['trained']:,} of {document['tokens']:,} tokens {what}"
    return f"{document['path']} at {document['offset']:,}{side}: {counts}"
