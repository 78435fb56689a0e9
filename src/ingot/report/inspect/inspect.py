"""`ingot inspect`: the output of a stage, as plain data (for `--json`) and as text. No torch."""

import json
import struct
from pathlib import Path
from typing import Any

from rich.text import Text

from ingot.core.artifact import CHECKPOINTS, STATE, checkpoint_problem, damaged
from ingot.core.errors import UserError
from ingot.corpus.funnel import location
from ingot.report import figures, reading
from ingot.report.inspect.corpus_checks import print_checks
from ingot.report.terminal import console
from ingot.stages.job import TOKENIZER, inputs_of, read_record, read_result
from ingot.store.reader import Store
from ingot.tokenizer.byte_bpe import Tokenizer, load_tokenizer

MAX_TOKENS = 1000
"""Tokens shown of a document."""
MAX_TENSORS = 24
"""Tensors shown of a checkpoint."""
MAX_CHARACTERS = 400
"""Characters shown of a store's first document."""
_EXAMPLES = {"corpus": "clean", "tokens": "questions@bpe", "train": "base"}
"""Kind -> a stage's name, for error messages."""


def corpus(stage: Path) -> dict[str, Any]:
    """A corpus stage's counts, samples of dropped documents, and unreadable input.

    Raises:
        UserError: the stage is of another kind, or not finished.
    """
    record = _record(stage, "corpus")
    result = read_result(stage)
    return {
        "stage": record["name"],
        "result": result,
        "funnel": _funnel(stage / "funnel.json"),
        "rules": reading.read_json(stage / "rules.json").get("rules", {}),
        "planted": reading.read_json(stage / "planted.json").get("kinds", {}),
        "instructions": reading.read_json(stage / "instructions.json"),
        "masked": reading.read_json(stage / "pii_audit.json").get("places", {}),
        "dropped": reading.dropped_samples(stage),
        "near_duplicates": reading.near_duplicates(stage),
        "contamination": reading.contamination(stage),
        "quarantined": reading.quarantined(stage),
    }


def _funnel(path: Path) -> dict[str, Any]:
    if funnel := reading.read_json(path):
        return funnel
    raise damaged(path)


def print_corpus(data: dict[str, Any]) -> None:
    """Print the funnel and the samples."""
    out, funnel = console(), data["funnel"]
    total = funnel["in"]
    rows = [("in", total), *((f"- {name}", c) for name, c in funnel["dropped"].items())]
    rows += [("- quarantined", funnel["quarantined"]), ("kept", funnel["kept"])]
    width = max(28, *(len(name) + 2 for name, _ in rows))
    for name, counts in rows:
        style = "bold" if name in ("in", "kept") else ""
        line = f"{name:<{width}}{counts['documents']:>12,} documents {figures.size(counts['bytes']):>14}"
        out.print(Text(f"{line} {figures.percentage(counts['documents'], total['documents']):>8}", style))
    print_checks(data)
    for name, counts in funnel["sources"].items():
        out.print(f"  {name}: {counts['in']['documents']:,} in, {counts['kept']['documents']:,} kept", soft_wrap=True)
    masked = ", ".join(f"{n:,} {kind}" for kind, n in funnel["pii"].items() if n)
    out.print(f"personal data masked: {masked or 'none'}")
    for name, n in funnel.get("lines", {}).items():
        out.print(f"{name.replace('_', ' ')}: {n:,}")
    if languages := funnel.get("languages"):
        out.print(f"languages: {', '.join(f'{name} {n:,}' for name, n in languages.items())}", soft_wrap=True)
    for cluster in data["near_duplicates"].get("largest", []):
        place = f"{cluster['path']}, document at {cluster['offset']:,}"
        out.print(Text(f"near-duplicates: {cluster['documents']:,} documents like {place}"), soft_wrap=True)
    for entry in data["contamination"]:
        place = f"{entry['path']}, document at {entry['offset']:,}"
        out.print(Text(f"contaminated: {place} contains {entry['item']}"), soft_wrap=True)
    read = total["documents"] - funnel["quarantined"]["documents"]  # fields are counted before anything is dropped
    for entry in funnel.get("fields", []):
        rows = f"{entry['rows']:,} of {read:,} rows"
        out.print(Text(f"field {entry['field']}: {entry['use']}, {rows}"), soft_wrap=True)
    for sample in data["dropped"]:
        out.print(
            Text(f"\n{sample['reason']}: {sample['path']}, {figures.size(sample['bytes'])}", "yellow"), soft_wrap=True
        )
        out.print(Text(sample["text"], "dim"), soft_wrap=True)
    _print_quarantined(data)


def _print_quarantined(data: dict[str, Any]) -> None:
    for record in data["quarantined"]:
        more = f" (and {record['alike'] - 1:,} like it in this file)" if record["alike"] > 1 else ""
        console().print(Text(f"not read: {location(record)}: {record['reason']}{more}", "red"), soft_wrap=True)


def store(stage: Path) -> dict[str, Any]:
    """Both splits of a tokens stage (sizes, columns, first document), and the conversations that it left out.

    Raises:
        UserError: the stage is of another kind, or its store is damaged.
    """
    record = _record(stage, "tokens")
    tokenizer = tokenizer_of(stage)
    splits = {}
    for split in ("train", "val"):
        opened = Store.open(stage / split, tokenizer=tokenizer.fingerprint)
        manifest = {k: v for k, v in opened.manifest.items() if k not in ("files", "columns")}
        columns = {name: f"{s['dtype']} a {s['per']}" for name, s in opened.manifest["columns"].items()}
        splits[split] = {**manifest, "columns": columns, "first": _first(opened, tokenizer)}
    return {"stage": record["name"], "splits": splits, "quarantined": reading.quarantined(stage)}


def _first(opened: Store, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The first document of a store."""
    if not opened.documents:
        return None
    start, end = opened.span(0)
    text = tokenizer.decode(opened.ids.read(start, min(end, start + MAX_TOKENS)))
    return {**opened.identity(0), "tokens": end - start, "text": text}


def print_store(data: dict[str, Any]) -> None:
    """Print both manifests and the first document of each split."""
    out = console()
    for split, numbers in data["splits"].items():
        counts = ", ".join(f"{numbers[unit]:,} {unit}" for unit in ("documents", "tokens", "bytes"))
        if numbers["content"] == "pairs":
            counts = f"{numbers['documents'] // 2:,} pairs ({counts})"
        out.print(Text(f"{data['stage']}/{split}: {counts}", "bold"), soft_wrap=True)
        out.print(
            f"  {numbers['content']}, tokenizer {numbers['tokenizer']}, vocabulary {numbers['vocab']:,}", soft_wrap=True
        )
        out.print(
            "  columns " + ", ".join(f"{name} ({kind})" for name, kind in numbers["columns"].items()), soft_wrap=True
        )
        if numbers["first"]:
            out.print(
                f"  first document {numbers['first']['path']}, {numbers['first']['tokens']:,} tokens", soft_wrap=True
            )
            out.print(Text(numbers["first"]["text"][:MAX_CHARACTERS], "dim"), soft_wrap=True)
    _print_quarantined(data)


def checkpoints(stage: Path) -> dict[str, Any]:
    """Every checkpoint of a train stage: state, tensors, and whether its files match their digests.

    Returns:
        {stage, checkpoints: [{name, bytes, problem, state, tensors: [{name, shape, dtype}]}]}, newest last. `problem`
        is None if all files match.

    Raises:
        UserError: the stage is of another kind, or has no checkpoint yet.
    """
    record = _record(stage, "train")
    paths = sorted(p for p in (stage / CHECKPOINTS).glob("*") if p.is_dir() and not p.name.startswith("."))
    if not paths:
        raise UserError(f"{stage}: no checkpoint yet; `ingot run` trains it")
    return {"stage": record["name"], "checkpoints": [_checkpoint(path) for path in paths]}


def _checkpoint(path: Path) -> dict[str, Any]:
    problem = checkpoint_problem(path)
    return {
        "name": path.name,
        "bytes": sum(f.stat().st_size for f in path.iterdir() if f.is_file()),
        "problem": problem,
        "state": {} if problem else reading.read_json(path / STATE),
        "tensors": [] if problem else [t for f in sorted(path.glob("*.safetensors")) for t in _tensors(f)],
    }


def _tensors(path: Path) -> list[dict[str, Any]]:
    """Names, shapes and types from the header of a safetensors file: a length (u64), then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return [{"name": n, "shape": t["shape"], "dtype": t["dtype"]} for n, t in header.items() if n != "__metadata__"]


def print_checkpoints(data: dict[str, Any]) -> None:
    """Print each checkpoint with its state, and the tensors of the newest intact one."""
    out = console()
    for checkpoint in data["checkpoints"]:
        problem = checkpoint["problem"]
        verdict = Text("digests match", "green") if problem is None else Text(problem, "red")
        out.print(Text.assemble((checkpoint["name"], "bold"), f"  {figures.size(checkpoint['bytes'])}  ", verdict))
        for name, value in checkpoint["state"].items():
            out.print(f"  {name} {figures.value(value)}", soft_wrap=True)
    intact = [c for c in data["checkpoints"] if c["tensors"]]
    if intact:
        tensors = intact[-1]["tensors"]
        out.print(f"\n{len(tensors)} tensors in {intact[-1]['name']}:")
        for tensor in tensors[:MAX_TENSORS]:
            shape = " x ".join(map(str, tensor["shape"])) or "scalar"
            out.print(f"  {tensor['name']:<48} {tensor['dtype']:<5} {shape}", soft_wrap=True)
        if len(tensors) > MAX_TENSORS:
            out.print(f"  ... {len(tensors) - MAX_TENSORS} more; --json lists all")


def _record(stage: Path, kind: str) -> dict[str, Any]:
    """The record of a stage.

    Raises:
        UserError: the stage is not of that kind.
    """
    record = read_record(stage)
    if record["kind"] != kind:
        article = "an" if record["kind"][0] in "aeiou" else "a"
        example = f"runs/NAME/{_EXAMPLES[kind]}"
        raise UserError(f"{stage}: is {article} {record['kind']} stage, expected a {kind} stage, such as {example}")
    return record


def tokenizer_of(stage: Path) -> Tokenizer:
    """The tokenizer of a tokens stage."""
    return load_tokenizer(inputs_of(stage)["tokenizer"].path / TOKENIZER)
