"""`ingot inspect mask`: which tokens of the first documents of a store are trained on. No torch.

For a train stage it shows the documents as its rows contain them: tokens that the context cuts off are not trained on,
and a document that is in no row is marked.
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
from ingot.report.inspect.inspect import MAX_TOKENS, tokenizer_of
from ingot.report.terminal import console
from ingot.stages.job import read_record
from ingot.stages.training.trace import open_training_data
from ingot.store.reader import Store
from ingot.tokenizer.base import Tokenizer

SIDES = ("chosen", "rejected")
"""Adjacent documents in a store of pairs."""
TRAINED_STYLES, OTHER_STYLES = ("green", "bold green"), ("dim", "bright_black")
"""Alternating styles of tokens, which make their boundaries visible."""


def mask(stage: Path, rows: int) -> dict[str, Any]:
    """Which tokens of the first training documents are trained on.

    Args:
        stage: a tokens stage, a corpus stage that was encoded, or a train stage (which shows all of its corpora).
        rows: documents of each store, or pairs in a store of pairs.

    Returns:
        {stage, stores: [{name, content, documents: [{side, path, offset ..., tokens, trained, cut, shown, pieces:
        [[text, trained?], ...]}]}]}. `side` is chosen or rejected in a store of pairs, else null; `cut` is the number
        of tokens that are in no row of a train stage; `shown` is the number of tokens in `pieces`. In a store without
        a mask every token is trained on; such stores come last. The text of a token that ends within a character comes
        with the token that completes it.

    Raises:
        UserError: the stage is of another kind, is a corpus that is not encoded yet, or its store is damaged.
    """
    record = read_record(stage)
    match record["kind"]:
        case "tokens":
            stores = [_tokens(stage, record, rows)]
        case "corpus":
            stores = [_tokens(link, read_record(link), rows) for link in _encoded(stage, record)]
        case "train":
            data, _, tokenizer = open_training_data(stage)
            sources = sorted(data.train_sources, key=lambda source: "mask" not in source.store.columns)
            stores = [_store(source.name, source.store, tokenizer, rows, source.plan) for source in sources]
        case kind:
            raise UserError(
                f"{stage}: is of kind {kind}, expected a tokens, corpus or train stage, such as runs/NAME/questions@bpe"
            )
    return {"stage": record["name"], "stores": stores}


def _encoded(stage: Path, record: dict[str, Any]) -> list[Path]:
    """The tokens stages of a corpus stage in its run."""
    stages = ((p, read_record(p)) for p in sorted(stage.parent.iterdir()) if (p / RECORD).exists())
    encoded = [p for p, r in stages if r["kind"] == "tokens" and r["inputs"]["corpus"]["key"] == record["key"]]
    if not encoded:
        raise UserError(
            f"{stage}: found no tokens stage of it in this run, so it was not encoded; run a stage that trains on it"
        )
    return encoded


def _tokens(stage: Path, record: dict[str, Any], rows: int) -> dict[str, Any]:
    tokenizer = tokenizer_of(stage)
    return _store(record["name"], Store.open(stage / "train", tokenizer=tokenizer.fingerprint), tokenizer, rows, None)


def _store(name: str, store: Store, tokenizer: Tokenizer, rows: int, plan: RowPlan | None) -> dict[str, Any]:
    documents = [_document(store, n, tokenizer, plan) for n in range(min(rows * store.group, store.documents))]
    return {"name": name, "content": store.content, "documents": documents}


def _document(store: Store, number: int, tokenizer: Tokenizer, plan: RowPlan | None) -> dict[str, Any]:
    start, end = store.span(number)
    ids = store.ids.read(start, end)
    trained = np.ones(len(ids), bool)
    if "mask" in store.columns:
        trained = store.columns["mask"].read(start, end) != 0
    in_rows = len(ids) if plan is None else _tokens_in_rows(plan, number, start)
    return {
        "side": SIDES[number % 2] if store.content == "pairs" else None,
        **store.identity(number),
        "tokens": len(ids),
        "trained": int(np.count_nonzero(trained[:in_rows])),
        "cut": len(ids) - in_rows,
        "shown": min(in_rows, MAX_TOKENS),
        "pieces": _pieces(ids[: min(in_rows, MAX_TOKENS)], trained, tokenizer),
    }


def _tokens_in_rows(plan: RowPlan, document: int, start: int) -> int:
    """Number of a document's first tokens that are in some row."""
    pieces = (piece for row in plan.rows_of(document) for piece in plan.slices(row))
    return max((piece.stop - start for piece in pieces if piece.document == document), default=0)


def _pieces(ids: np.ndarray, trained: np.ndarray, tokenizer: Tokenizer) -> list[list[Any]]:
    """[text, whether it is trained on] of each token."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(ids) - 1
    return [
        [decoder.decode(tokenizer.token_bytes(token), final=n == last), bool(trained[n])]
        for n, token in enumerate(ids.tolist())
    ]


def print_mask(data: dict[str, Any]) -> None:
    """Print trained tokens in green and others dim; outside a terminal, trained tokens are in ⟦ ⟧."""
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
    for n, (piece, trained) in enumerate(document["pieces"]):
        text.append(piece, (TRAINED_STYLES if trained else OTHER_STYLES)[n % 2])
    return text.append(_remainder(document), "yellow")


def _bracketed(document: dict[str, Any]) -> Text:
    groups = itertools.groupby(document["pieces"], key=lambda piece: piece[1])
    runs = ((trained, "".join(text for text, _ in group)) for trained, group in groups)
    return Text("".join(f"⟦{text}⟧" if trained else text for trained, text in runs) + _remainder(document))


def _remainder(document: dict[str, Any]) -> str:
    """A note about the tokens that are not printed."""
    more = document["tokens"] - document["cut"] - document["shown"]
    notes = [f"{more:,} more tokens"] if more else []
    if document["cut"]:
        where = "beyond the context" if document["shown"] else "of a document that is in no row"
        notes.append(f"{document['cut']:,} tokens {where}, not trained on")
    return f" … {'; '.join(notes)}" if notes else ""


def _heading(document: dict[str, Any], content: str) -> str:
    use = {"pairs": "compared", "prompts": "trained on; the model answers"}.get(content, "trained on")
    side = f", {document['side']}" if document["side"] else ""
    counts = f"{document['trained']:,} of {document['tokens']:,} tokens {use}"
    return f"{document['path']} at {document['offset']:,}{side}: {counts}"
