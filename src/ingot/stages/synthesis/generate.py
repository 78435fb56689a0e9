"""Builder of the `generate` kind: a model's answers to prompts, as documents that any reader of a corpus takes.

An answer's randomness is keyed by (seed, split, prompt, sample), so neither how prompts are batched nor a kill leaves a
trace: what is done is kept in small files, and a killed stage goes on after them.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ingot.core.artifact import atomic_json, read_json
from ingot.core.errors import UserError
from ingot.corpus.documents import SCHEMA, DocumentWriter, Split, document_parts, read_documents
from ingot.corpus.readers.row_formats import dump_document, unlearned
from ingot.data.sampler import key_of, permute
from ingot.infer.generate import generate
from ingot.infer.streaming import completion_text, sampling_for
from ingot.stages.job import Job
from ingot.stages.models.load import Loaded, load_model
from ingot.stages.synthesis.settings import GenerateSettings
from ingot.tokenizer.chat import parse_conversation, render

ROWS = 64
"""Answers that are made together."""
_PARTS = "parts"
_SPLITS: tuple[Split, ...] = ("train", "val")


def run(job: Job) -> dict[str, Any]:
    """Answer the chosen prompts of both splits."""
    settings = job.settings
    assert isinstance(settings, GenerateSettings)
    loaded = load_model(job.inputs["model"].path, job.display.say, settings.device, exact=True)
    for old in document_parts(job.out.path):
        old.unlink()
    writer, tally = DocumentWriter(job.out.path), Counter[str]()
    for split, row, answers in _all_answers(job, loaded, settings):
        kept = [a for a in answers if a["text"].strip() and (a["ended"] or settings.unfinished == "keep")]
        tally.update(_counts(answers))
        tally[f"{split}_documents"] += len(kept)
        if kept:
            writer.write(_table(job.inputs["model"].name, split, row, kept))
    writer.flush()
    names = ("prompts", "answers", "too_long", "unfinished", "empty", *(f"{split}_documents" for split in _SPLITS))
    result = {name: tally[name] for name in names}
    if not tally["train_documents"]:
        raise UserError(
            f"found no answer to keep of {tally['prompts']} prompts ({tally['unfinished']} cut off, {tally['empty']} "
            f"empty, {tally['too_long']} prompts too long); raise max_new, train the model for longer, or keep what is "
            'cut off with unfinished = "keep"'
        )
    shutil.rmtree(job.out / _PARTS, ignore_errors=True)
    documents = sum(tally[f"{split}_documents"] for split in _SPLITS)
    return {**result, "documents": documents, "answer_tokens": tally["tokens"] / tally["answers"]}


def _all_answers(
    job: Job, loaded: Loaded, settings: GenerateSettings
) -> Iterator[tuple[Split, dict[str, Any], list[dict[str, Any]]]]:
    """Every chosen prompt with its answers; of held-out ones the same share as of those to train on."""
    share = 1.0
    for split in _SPLITS:
        asked = list(_prompts(job.inputs["data"].path, split))
        if split == "train" and settings.prompts:
            share = min(1.0, settings.prompts / max(1, len(asked)))
        chosen = _chosen(asked, share, job.seed)
        with job.display.bar(f"answering {split} prompts", len(chosen), "prompts") as bar:
            for part, rows in enumerate(_cut(chosen, max(1, ROWS // settings.samples))):
                answered = _answered(job, loaded, settings, split, part, rows)
                for (_, row), answers in zip(rows, answered, strict=True):
                    yield split, row, answers
                bar.advance(len(rows))


def _counts(answers: list[dict[str, Any]]) -> dict[str, int]:
    """Of one prompt; no answers say that it was too long."""
    return {
        "prompts": 1,
        "answers": len(answers),
        "too_long": not answers,
        "unfinished": sum(not a["ended"] for a in answers),
        "empty": sum(not a["text"].strip() for a in answers),
        "tokens": sum(a["tokens"] for a in answers),
    }


def _prompts(corpus: Path, split: Split) -> Iterator[dict[str, Any]]:
    for batch in read_documents(corpus, split):
        yield from batch.to_pylist()


def _chosen(asked: list[dict[str, Any]], share: float, seed: int) -> list[tuple[int, dict[str, Any]]]:
    """That share of the prompts with their numbers, in order, drawn by the seed."""
    many = round(share * len(asked))
    numbers = np.arange(len(asked))
    if many < len(asked):
        numbers = np.sort(permute(numbers, len(asked), key_of(seed, 0x67656E))[:many])
    return [(int(n), asked[n]) for n in numbers]


def _cut(rows: list[Any], size: int) -> Iterator[list[Any]]:
    yield from (rows[start : start + size] for start in range(0, len(rows), size))


def _answered(
    job: Job,
    loaded: Loaded,
    settings: GenerateSettings,
    split: Split,
    part: int,
    rows: list[tuple[int, dict[str, Any]]],
) -> list[list[dict[str, Any]]]:
    """For each prompt its answers {text, tokens, ended}, made now or by the process before; none if too long."""
    path = job.out / _PARTS / f"{split}-{part:06d}.json"
    if path.exists():
        return read_json(path)
    prompts = [render(parse_conversation(row["text"]), loaded.tokenizer, generation_prompt=True)[0] for _, row in rows]
    fits = [i for i, prompt in enumerate(prompts) if len(prompt) < loaded.config.context]
    sampling = sampling_for(
        loaded.tokenizer, max_new=settings.max_new, temperature=settings.temperature, top_p=settings.top_p
    )
    made = generate(
        loaded.model,
        [prompts[i] for i in fits],
        sampling,
        samples=settings.samples,
        seed=job.seed,
        step=_SPLITS.index(split),
        keys=[(rows[i][0], 0) for i in fits],
    )
    found: list[list[dict[str, Any]]] = [[] for _ in rows]
    for place, completion in enumerate(made):
        text, ended = completion_text(loaded.tokenizer, completion), completion.stop_reason == "stop"
        answer = {"text": text, "tokens": len(completion.ids), "ended": ended}
        found[fits[place // settings.samples]].append(answer)
    atomic_json(path, found)
    return found


def _table(model: str, split: Split, row: dict[str, Any], answers: list[dict[str, Any]]) -> pa.Table:
    """Documents of one prompt's answers; they share where the prompt is from, and so what is held out with it."""
    history = unlearned(json.loads(row["text"]))
    texts = [dump_document([*history, {"role": "assistant", "content": a["text"]}]) for a in answers]
    sizes = [len(text.encode()) for text in texts]
    same = {**row, "source": f"generate:{model}", "split": split}
    rows = [{**same, "text": text, "bytes": size} for text, size in zip(texts, sizes, strict=True)]
    return pa.Table.from_pylist(rows, schema=SCHEMA)
