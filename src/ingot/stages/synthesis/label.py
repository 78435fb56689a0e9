"""Builder of the `label` kind: answers are judged, and become pairs or conversations to learn from.

A judge is a reward model, a function, or people. Of scored answers to one prompt, the best and the worst make a pair;
people are shown two at a time. Answers that are as good as each other teach nothing and are counted as ties.
"""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ingot.core.errors import UserError
from ingot.core.functions import load_function
from ingot.corpus.documents import SCHEMA, DocumentWriter, document_parts, read_documents
from ingot.corpus.readers.row_formats import dump_document
from ingot.objectives.reward_functions import ask, prompt_table
from ingot.stages.job import TOKENIZER, Job
from ingot.stages.models.reward_scores import RewardStage
from ingot.stages.synthesis import human_labels
from ingot.stages.synthesis.settings import LabelSettings
from ingot.tokenizer.byte_bpe import Tokenizer, load_tokenizer
from ingot.tokenizer.chat import render, to_the_end

Answers = list[dict[str, Any]]
"""The documents of one prompt's answers."""
Judged = list[tuple[dict[str, Any], float]]
"""Answers that are compared with each other, with their scores."""


def run(job: Job) -> dict[str, Any]:
    """Judge, and write what was judged."""
    settings = job.settings
    assert isinstance(settings, LabelSettings)
    groups = list(_groups(job.inputs["samples"].path))
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path / TOKENIZER)
    judged = _by_people(settings.people, groups) if settings.people else _by_score(job, settings, groups, tokenizer)
    for old in document_parts(job.out.path):
        old.unlink()
    writer, written = DocumentWriter(job.out.path), {"train": 0, "val": 0}
    ties = unscored = low = 0
    chosen, rejected, scores = [], [], []
    for group in judged:
        scored = [(row, score) for row, score in group if not math.isnan(score)]
        unscored += len(group) - len(scored)
        if not scored:
            continue
        best, worst = (pick(scored, key=lambda one: one[1]) for pick in (max, min))
        scores += [score for _, score in scored]
        if settings.format == "pairs" and best[1] == worst[1]:
            ties += 1
            continue
        if settings.least is not None and best[1] < settings.least:
            low += 1
            continue
        document = _pair(best[0], worst[0]) if settings.format == "pairs" else best[0]
        writer.write(pa.Table.from_pylist([{**document, "source": f"label:{settings.by}"}], schema=SCHEMA))
        written[document["split"]] += 1
        chosen.append(best[1])
        rejected.append(worst[1])
    writer.flush()
    if not written["train"]:
        raise UserError(
            f"found nothing to keep of {len(groups)} prompts ({ties} with answers as good as each other, {low} below "
            f"least, {unscored} answers without a score); ask for more samples, or judge otherwise"
        )
    counts = {"documents": sum(written.values()), "train_documents": written["train"], "val_documents": written["val"]}
    counts |= {"prompts": len(groups), "ties": ties, "below_least": low, "unscored": unscored}
    return counts | {"score": _mean(scores), "best_score": _mean(chosen), "worst_score": _mean(rejected)}


def _groups(samples: Path) -> Iterator[Answers]:
    """The answers of each prompt, which stand side by side."""
    rows = (row for batch in read_documents(samples) for row in batch.to_pylist())
    for _, group in itertools.groupby(rows, key=lambda row: (row["path"], row["offset"], row["split"])):
        yield list(group)


def _by_score(job: Job, settings: LabelSettings, groups: list[Answers], tokenizer: Tokenizer) -> list[Judged]:
    rows = [row for group in groups for row in group]
    with job.display.bar("judging", len(rows), "answers") as bar:
        if settings.reward:
            rendered = [render(json.loads(row["text"]), tokenizer) for row in rows]
            whole = [ids[: to_the_end(mask)].astype(np.int64) for ids, mask in rendered]
            scores = RewardStage(job.inputs["reward"], job, settings.device)(whole, bar.advance).tolist()
        else:
            tables = [_prompt(row, tokenizer) for row in rows]
            scores = ask(settings.by, load_function(settings.by, "by"), tables, [_answer(row) for row in rows], "by")
            bar.advance(len(rows))
    found = iter(zip(rows, scores, strict=True))
    return [list(itertools.islice(found, len(group))) for group in groups]


def _by_people(path: Path, groups: list[Answers]) -> list[Judged]:
    """What people said of two answers each: 1 for the better one, equal scores for a tie.

    Raises:
        UserError: the file is still open (it is written where there is none), or is of other answers.
    """
    couples = [couple for group in groups for couple in _couples(group)]
    wanted = [(_question(a), _answer(a), _answer(b)) for a, b in couples]
    if not path.exists():
        human_labels.write(path, wanted)
    rows = human_labels.read(path)
    found = [(row["prompt"], row["a"], row["b"]) for row in rows]
    if found != wanted:
        both = zip(wanted, found, strict=False)
        first = next((n for n, (now, then) in enumerate(both, 1) if now != then), len(rows) + 1)
        raise UserError(
            f"{path}:{first}: is not about the answers that are there now, of which there are {len(wanted)} lines; "
            "name another file, or move this one away, and a new one is written"
        )
    if why := human_labels.waits(path):
        raise UserError(f"waits {why}; fill them in and run the same command again")
    worth = {"a": (1.0, 0.0), "b": (0.0, 1.0), "tie": (0.0, 0.0)}
    return [list(zip(couple, worth[row["better"]], strict=True)) for couple, row in zip(couples, rows, strict=True)]


def _couples(group: Answers) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Two answers at a time that are not the same."""
    for a, b in zip(group[::2], group[1::2], strict=False):
        if _answer(a) != _answer(b):
            yield a, b


def _answer(row: dict[str, Any]) -> str:
    return json.loads(row["text"])[-1]["content"]


def _question(row: dict[str, Any]) -> str:
    return "\n\n".join(message["content"] for message in json.loads(row["text"])[:-1])


def _prompt(row: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The table that a function gets, the same as in training on a reward."""
    ids, _ = render(json.loads(row["text"])[:-1], tokenizer, generation_prompt=True)
    return prompt_table(ids, row["extra"], tokenizer)


def _pair(best: dict[str, Any], worst: dict[str, Any]) -> dict[str, Any]:
    *prompt, chosen = json.loads(best["text"])
    rejected = json.loads(worst["text"])[-1]
    plain = [{"role": m["role"], "content": m["content"]} for m in prompt]
    text = dump_document({"prompt": plain, "chosen": [chosen], "rejected": [rejected]})
    return {**best, "text": text, "bytes": len(text.encode())}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
