"""Builder of the kind `generate`: what a model writes to the prompts of a corpus becomes documents of a corpus.

The model is one of ours (`local_model.py`) or behind an endpoint (`remote_model.py`). It writes answers, or new prompts
like those that it is shown (`instructions.py`). Both models resume: what was written is not written again.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import polars as pl
import pyarrow as pa

from ingot.core.errors import UserError
from ingot.corpus.dedup import clusters, fingerprints, squeeze
from ingot.corpus.documents import SCHEMA, DocumentWriter, Split, document_parts, read_documents
from ingot.corpus.readers.messages import exclude_from_loss, without_reasoning
from ingot.corpus.readers.row_formats import dump_document
from ingot.data.sampler import key_of, permute
from ingot.stages.job import Job
from ingot.stages.synthesis import instructions
from ingot.stages.synthesis.settings import GenerateSettings
from ingot.tokenizer.chat import parse_conversation

BATCH_ROWS = 64
"""Answers that are asked for in one batch."""
Answers = list[dict[str, Any]] | str
"""The answers {text, tokens, ended} to a request, or why the chat template refuses it; `reasoning` where it came apart
from the text, and `filtered` where an endpoint withheld the text."""
Request = tuple[int, Any]
"""The number of a prompt in its split, and the messages that the model is to answer."""
Prompts = dict[Split, list[dict[str, Any]]]
"""The prompts of each split."""
_SPLITS: tuple[Split, ...] = ("train", "val")
_OUTCOMES = {
    "unfinished": ("cut off", 'raise max_new, or keep what is cut off with unfinished = "keep"'),
    "filtered": ("filtered by the endpoint or refused", "change the prompts or system, or name another model"),
    "empty": ("empty", "train the model for longer, or name another one"),
    "unreadable": ("without a numbered list", "lower new or examples, or name a model that follows instructions"),
    "too_long": ("prompts too long for the context", "shorten the prompts, or name a model with a longer context"),
    "refused": ("prompts refused by the chat template", "change the prompts, or the template of the tokenizer"),
}
"""What may become of an answer that is not complete, and of a prompt without answers: as text, and what to do."""


class Writer(Protocol):
    """A model that answers."""

    name: str

    def __call__(self, split: int, number: int, requests: Sequence[Request]) -> list[Answers]:
        """The answers to each request of a batch, given by its split and number."""
        ...

    def finish(self) -> dict[str, int]:
        """Called when all is written; returns further numbers of the result."""
        ...


def run(job: Job) -> dict[str, Any]:
    """Answer the selected prompts of both splits, or write prompts like them."""
    settings = job.settings
    assert isinstance(settings, GenerateSettings)
    prompts: Prompts = {split: list(_prompts(job.inputs["data"].path, split)) for split in _SPLITS}
    selected = _selected(prompts, settings, job.seed)
    model = _model(job, settings, settings.samples * sum(map(len, selected.values())))
    for old in document_parts(job.out.path):
        old.unlink()
    writer, counts = DocumentWriter(job.out.path), Counter[str]()
    refused = ""
    for split, row, answers in _all_answers(job, model, settings, prompts, selected):
        if isinstance(answers, str):
            counts.update({"prompts": 1, "refused": 1})
            refused = refused or f"{row['path']}, document at {row['offset']:,}: {answers}"
            continue
        counts.update({"prompts": 1, "answers": len(answers), "too_long": int(not answers)})
        counts.update({"tokens": sum(a["tokens"] for a in answers)})
        counts.update(_outcome(answer, settings) for answer in answers)
        if settings.format == "chat":
            kept = {"complete", "unfinished"} if settings.unfinished == "keep" else {"complete"}
            texts = [_conversation(row, answer, settings) for answer in answers if _outcome(answer, settings) in kept]
            table = _table(row, texts, model.name)
        else:
            texts = [text for answer in answers for text in _new_prompts(answer, settings)]
            table = _prompt_table(row, texts, model.name, counts["train_documents"] + counts["val_documents"])
        writer.write(table)
        counts[f"{split}_documents"] += len(texts)
    writer.flush()
    if refused:
        number = f"{counts['refused']:,} of {counts['prompts']:,} prompts"
        job.display.notify(f"the chat template refuses {number}; the first is {refused}")
    result = _result(counts, settings, model)
    dropped = f"; {listed}" if (listed := _listed(counts)) else ""
    asked = f"{result['answers']:,} answers to {result['prompts']:,} prompts"
    job.display.notify(f"{result['documents']:,} documents from {asked}{dropped}")
    return result


def _result(counts: Counter[str], settings: GenerateSettings, model: Writer) -> dict[str, Any]:
    """The numbers of the result.

    Raises:
        UserError: nothing was written that can be trained on.
    """
    if not counts["train_documents"]:
        worst = max(_OUTCOMES, key=lambda name: counts[name])
        raise UserError(
            f"found no usable answer to {counts['prompts']:,} prompts ({_listed(counts) or 'no training prompt'}); "
            f"{_OUTCOMES[worst][1] if counts[worst] else 'add prompts to data'}"
        )
    names = ("prompts", "answers", "refused", "too_long", "unfinished", "filtered", "empty")
    names = (*names, *(["unreadable"] if settings.format == "prompts" else []))
    result = {name: counts[name] for name in (*names, *(f"{split}_documents" for split in _SPLITS))}
    result["documents"] = sum(counts[f"{split}_documents"] for split in _SPLITS)
    return {**result, "answer_tokens": counts["tokens"] / counts["answers"], **model.finish()}


def _listed(counts: Counter[str]) -> str:
    """What became of answers that are not complete, and of prompts without any: "8 cut off, 2 empty"."""
    return ", ".join(f"{counts[name]:,} {text}" for name, (text, _) in _OUTCOMES.items() if counts[name])


def _model(job: Job, settings: GenerateSettings, requests: int) -> Writer:
    """The model that the settings name; torch is imported only for one of ours."""
    if settings.endpoint is not None:
        from ingot.stages.synthesis.remote_model import RemoteModel

        return RemoteModel(job, settings, settings.endpoint, requests)
    from ingot.stages.synthesis.local_model import LocalModel

    return LocalModel(job, settings)


def _prompts(corpus: Path, split: Split) -> Iterator[dict[str, Any]]:
    for batch in read_documents(corpus, split):
        yield from batch.to_pylist()


def _selected(prompts: Prompts, settings: GenerateSettings, seed: int) -> dict[Split, list[int]]:
    """The numbers of the prompts to use; the same fraction of held-out prompts as of training prompts."""
    fraction = min(1.0, settings.prompts / max(1, len(prompts["train"]))) if settings.prompts else 1.0
    return {split: _select(len(rows), fraction, seed) for split, rows in prompts.items()}


def _select(prompts: int, fraction: float, seed: int) -> list[int]:
    """A random subset of the prompts, in order."""
    size = round(fraction * prompts)
    indices = np.arange(prompts)
    if size < prompts:
        indices = np.sort(permute(indices, prompts, key_of(seed, 0x67656E))[:size])
    return indices.tolist()


def _all_answers(
    job: Job,
    model: Writer,
    settings: GenerateSettings,
    prompts: Prompts,
    selected: dict[Split, list[int]],
) -> Iterator[tuple[Split, dict[str, Any], Answers]]:
    """Every selected prompt with what was written to it."""
    system = [{"role": "system", "content": settings.system}] if settings.system else []
    size = max(1, BATCH_ROWS // settings.samples)
    for number, split in enumerate(_SPLITS):
        rows, indices = prompts[split], selected[split]
        with job.display.bar(f"answering {split} prompts", len(indices), "prompts") as bar:
            for start in range(0, len(indices), size):
                batch = indices[start : start + size]
                requests = [(i, _merged(system, _messages(i, rows, settings, job.seed, number))) for i in batch]
                for i, answers in zip(batch, model(number, start // size, requests), strict=True):
                    yield split, rows[i], answers
                bar.advance(len(batch))


def _messages(
    index: int, rows: list[dict[str, Any]], settings: GenerateSettings, seed: int, split: int
) -> list[dict[str, Any]]:
    """What the model is asked with a prompt."""
    if settings.format == "chat":
        return parse_conversation(rows[index]["text"])
    numbers = instructions.shown(index, len(rows), settings.examples, seed, split)
    return instructions.request([instructions.text_of(rows[i]["text"]) for i in numbers], settings.new)


def _merged(system: list[dict[str, Any]], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages behind a system message; one that a prompt has of its own follows in the same message."""
    if system and messages[0]["role"] == "system":
        both = "\n\n".join(message["content"] for message in (system[0], messages[0]))
        return [{**system[0], "content": both}, *messages[1:]]
    return [*system, *messages]


def _outcome(answer: dict[str, Any], settings: GenerateSettings) -> str:
    """What became of an answer: `complete`, or a name of `_OUTCOMES`."""
    if answer.get("filtered"):
        return "filtered"
    empty = not _content(answer, settings).strip()
    if settings.format == "prompts" and not empty and not instructions.read_list(answer["text"], settings.new, True):
        return "unreadable"
    if not answer["ended"] and not (empty and settings.unfinished == "keep"):
        return "unfinished"
    return "empty" if empty else "complete"


def _content(answer: dict[str, Any], settings: GenerateSettings) -> str:
    """The text of an answer, with `reasoning` = "drop" without what it thought, also where that was cut off."""
    if settings.reasoning != "drop":
        return answer["text"]
    return without_reasoning({"role": "assistant", "content": answer["text"]})["content"].partition("<think>")[0]


def _conversation(row: dict[str, Any], answer: dict[str, Any], settings: GenerateSettings) -> str:
    """A prompt with an answer, of which only the answer is trained on."""
    message = {"role": "assistant", "content": _content(answer, settings)}
    if answer.get("reasoning") and settings.reasoning != "drop":
        message["reasoning_content"] = answer["reasoning"]
    return dump_document([*exclude_from_loss(json.loads(row["text"])), message])


def _new_prompts(answer: dict[str, Any], settings: GenerateSettings) -> list[str]:
    """The documents of the prompts in an answer."""
    if answer.get("filtered"):
        return []
    complete = answer["ended"] or settings.unfinished == "keep"
    items = instructions.read_list(answer["text"], settings.new, complete)
    return [dump_document([{"role": "user", "content": item}]) for item in items]


def _table(row: dict[str, Any], texts: list[str], model: str) -> pa.Table:
    """Documents with the place, the cluster and the split of a prompt."""
    common = {**row, "source": f"generate:{model}"}
    rows = [{**common, "text": text, "bytes": len(text.encode())} for text in texts]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _prompt_table(row: dict[str, Any], texts: list[str], model: str, first: int) -> pa.Table:
    """New prompts. Each has a cluster and, as `label` groups answers by it, a place of its own.

    Args:
        row: the prompt that they were written to.
        texts: the documents.
        model: what has written them.
        first: documents of the stage before them.
    """
    table = _table({**row, "path": f"{row['path']}:{row['offset']}", "extra": None}, texts, model)
    own = clusters(fingerprints(squeeze(pl.Series(texts, dtype=pl.String))))
    for name, values in (("offset", range(first, first + len(texts))), ("cluster", own)):
        at = SCHEMA.get_field_index(name)
        table = table.set_column(at, SCHEMA.field(at), pa.array(values, SCHEMA.field(at).type))
    return table
