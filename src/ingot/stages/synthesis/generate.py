"""Builder of the kind `generate`: samples a model's answers to prompts and writes them as documents of a corpus.

The random numbers of an answer are keyed by (seed, split, prompt, sample), so answers depend neither on batching nor on
interruptions. Finished batches are saved in small files, with which a killed stage resumes.
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
from ingot.corpus.readers.messages import exclude_from_loss
from ingot.corpus.readers.row_formats import dump_document
from ingot.data.sampler import key_of, permute
from ingot.infer.generate import generate
from ingot.infer.streaming import completion_text, sampling_for
from ingot.stages.job import Job
from ingot.stages.models.load import LoadedModel, load_model
from ingot.stages.synthesis.settings import GenerateSettings
from ingot.tokenizer.chat import parse_conversation, render
from ingot.tokenizer.template_sandbox import ConversationRefused

BATCH_ROWS = 64
"""Answers that are sampled in one batch."""
Answers = list[dict[str, Any]] | str
"""The answers {text, tokens, ended} to a prompt, or why the chat template refuses it."""
_BATCHES = "parts"
"""Directory of the finished batches of an unfinished stage."""
_SPLITS: tuple[Split, ...] = ("train", "val")


def run(job: Job) -> dict[str, Any]:
    """Answer the selected prompts of both splits."""
    settings = job.settings
    assert isinstance(settings, GenerateSettings)
    loaded = load_model(job.inputs["model"].path, job.display.notify, settings.device, exact=True)
    for old in document_parts(job.out.path):
        old.unlink()
    writer, counts = DocumentWriter(job.out.path), Counter[str]()
    refused = ""
    for split, row, answers in _all_answers(job, loaded, settings):
        if isinstance(answers, str):
            counts.update({"prompts": 1, "refused": 1})
            refused = refused or f"{row['path']}, document at {row['offset']:,}: {answers}"
            continue
        kept = [a for a in answers if a["text"].strip() and (a["ended"] or settings.unfinished == "keep")]
        counts.update(_counts(answers))
        counts[f"{split}_documents"] += len(kept)
        if kept:
            writer.write(_table(job.inputs["model"].name, split, row, kept))
    writer.flush()
    if refused:
        number = f"{counts['refused']:,} of {counts['prompts']:,} prompts"
        job.display.notify(f"the chat template refuses {number}; the first is {refused}")
    names = ("prompts", "answers", "refused", "too_long", "unfinished", "empty")
    names = (*names, *(f"{split}_documents" for split in _SPLITS))
    result = {name: counts[name] for name in names}
    if not counts["train_documents"]:
        raise UserError(
            f"found no usable answer to {counts['prompts']} prompts ({counts['unfinished']} cut off, {counts['empty']} "
            f"empty, {counts['too_long']} prompts too long, {counts['refused']} refused by the chat template); raise "
            "max_new, train the model for longer, or keep "
            'answers that are cut off with unfinished = "keep"'
        )
    shutil.rmtree(job.out / _BATCHES, ignore_errors=True)
    documents = sum(counts[f"{split}_documents"] for split in _SPLITS)
    return {**result, "documents": documents, "answer_tokens": counts["tokens"] / counts["answers"]}


def _all_answers(
    job: Job, loaded: LoadedModel, settings: GenerateSettings
) -> Iterator[tuple[Split, dict[str, Any], Answers]]:
    """Every selected prompt with its answers; the same fraction of held-out prompts as of training prompts."""
    fraction = 1.0
    for split in _SPLITS:
        prompts = list(_prompts(job.inputs["data"].path, split))
        if split == "train" and settings.prompts:
            fraction = min(1.0, settings.prompts / max(1, len(prompts)))
        selected = _select(prompts, fraction, job.seed)
        with job.display.bar(f"answering {split} prompts", len(selected), "prompts") as bar:
            for number, batch in enumerate(_batches(selected, max(1, BATCH_ROWS // settings.samples))):
                batch_answers = _answer(job, loaded, settings, split, number, batch)
                for (_, row), answers in zip(batch, batch_answers, strict=True):
                    yield split, row, answers
                bar.advance(len(batch))


def _counts(answers: list[dict[str, Any]]) -> dict[str, int]:
    """Counts for one prompt. A prompt without answers was too long."""
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


def _select(prompts: list[dict[str, Any]], fraction: float, seed: int) -> list[tuple[int, dict[str, Any]]]:
    """A random subset of the prompts with their indices, in order."""
    size = round(fraction * len(prompts))
    indices = np.arange(len(prompts))
    if size < len(prompts):
        indices = np.sort(permute(indices, len(prompts), key_of(seed, 0x67656E))[:size])
    return [(int(i), prompts[i]) for i in indices]


def _batches(rows: list[Any], size: int) -> Iterator[list[Any]]:
    yield from (rows[start : start + size] for start in range(0, len(rows), size))


def _answer(
    job: Job,
    loaded: LoadedModel,
    settings: GenerateSettings,
    split: Split,
    number: int,
    rows: list[tuple[int, dict[str, Any]]],
) -> list[Answers]:
    """The answers to each prompt of a batch, sampled now or read from an earlier attempt.

    A prompt that fills the context has no answers.
    """
    path = job.out / _BATCHES / f"{split}-{number:06d}.json"
    if path.exists():
        return read_json(path)
    prompts: list[np.ndarray] = []
    answers: list[Answers] = [[] for _ in rows]
    fits: list[int] = []
    for i, (_, row) in enumerate(rows):
        try:
            ids, _ = render(parse_conversation(row["text"]), loaded.tokenizer, generation_prompt=True)
        except ConversationRefused as error:
            answers[i] = str(error)
            continue
        if len(ids) < loaded.config.context:
            prompts.append(ids)
            fits.append(i)
    sampling = sampling_for(
        loaded.tokenizer, max_new=settings.max_new, temperature=settings.temperature, top_p=settings.top_p
    )
    completions = generate(
        loaded.model,
        prompts,
        sampling,
        samples=settings.samples,
        seed=job.seed,
        step=_SPLITS.index(split),
        keys=[(rows[i][0], 0) for i in fits],
    )
    sampled: list[list[dict[str, Any]]] = [[] for _ in fits]
    for n, completion in enumerate(completions):
        text, ended = completion_text(loaded.tokenizer, completion), completion.stop_reason == "stop"
        answer = {"text": text, "tokens": len(completion.ids), "ended": ended}
        sampled[n // settings.samples].append(answer)
    for i, answers_of_row in zip(fits, sampled, strict=True):
        answers[i] = answers_of_row
    atomic_json(path, answers)
    return answers


def _table(model: str, split: Split, row: dict[str, Any], answers: list[dict[str, Any]]) -> pa.Table:
    """Documents of one prompt's answers. All have the prompt's source and split."""
    history = exclude_from_loss(json.loads(row["text"]))
    texts = [dump_document([*history, {"role": "assistant", "content": a["text"]}]) for a in answers]
    sizes = [len(text.encode()) for text in texts]
    common = {**row, "source": f"generate:{model}", "split": split}
    rows = [{**common, "text": text, "bytes": size} for text, size in zip(texts, sizes, strict=True)]
    return pa.Table.from_pylist(rows, schema=SCHEMA)
