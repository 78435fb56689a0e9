"""Builder of the kind `label`: turns answers into preference pairs or conversations.

A reward model, a function or the majority scores the answers to a prompt, of which the best and the worst become a
pair. People compare two answers at a time. Pairs of equal scores are counted as ties and left out.
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
from ingot.corpus.readers.messages import without_train
from ingot.corpus.readers.row_formats import dump_document
from ingot.objectives.reward_functions import call_reward_function, prompt_table
from ingot.stages.job import TOKENIZER, Job
from ingot.stages.models.reward_scores import RewardStage
from ingot.stages.synthesis import human_labels
from ingot.stages.synthesis.majority import agreement
from ingot.stages.synthesis.settings import MAJORITY, LabelSettings
from ingot.tokenizer.byte_bpe import Tokenizer, load_tokenizer
from ingot.tokenizer.chat import length_to_last_target, render
from ingot.tokenizer.template_sandbox import ConversationRefused

Answers = list[dict[str, Any]]
"""Documents of the answers to one prompt."""
ScoredAnswers = list[tuple[dict[str, Any], float]]
"""Answers that are compared with each other, with their scores."""


def run(job: Job) -> dict[str, Any]:
    """Score the answers and write the pairs or conversations."""
    settings = job.settings
    assert isinstance(settings, LabelSettings)
    groups = list(_groups(job.inputs["samples"].path))
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path / TOKENIZER) if "tokenizer" in job.inputs else None
    left_over = 0
    if settings.label_file:
        left_over = sum(len(group) - 2 * len([*_comparisons(group)]) for group in groups)
        scored_groups = _scores_of_people(settings.label_file, groups)
    else:
        scored_groups = _scores(job, settings, groups, tokenizer)
    for old in document_parts(job.out.path):
        old.unlink()
    writer, written = DocumentWriter(job.out.path), {"train": 0, "val": 0}
    ties = unscored = low = 0
    chosen, rejected, scores = [], [], []
    for group in scored_groups:
        scored = [(row, score) for row, score in group if math.isfinite(score)]
        unscored += len(group) - len(scored)
        if not scored:
            continue
        best, worst = (pick(scored, key=lambda answer: answer[1]) for pick in (max, min))
        scores += [score for _, score in scored]
        if settings.format == "pairs" and best[1] == worst[1]:
            ties += 1
            continue
        if settings.min_score is not None and best[1] < settings.min_score:
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
            f"found no usable answers to {len(groups)} prompts ({ties} with answers of equal scores, {low} below "
            f"min_score, {unscored} answers without a score); generate more samples, or score them in another way"
        )
    answers = sum(map(len, groups))
    what = "pairs" if settings.format == "pairs" else "conversations"
    reasons = {
        "prompts with equal scores": ties,
        "prompts with a best score below min_score": low,
        "answers without a score": unscored,
        "answers that people did not compare, because they are equal or the last of an odd number": left_over,
    }
    dropped = "".join(f"; {number:,} {name}" for name, number in reasons.items() if number)
    job.display.notify(f"{sum(written.values()):,} {what} from {answers:,} answers to {len(groups):,} prompts{dropped}")
    counts = {"documents": sum(written.values()), "train_documents": written["train"], "val_documents": written["val"]}
    counts |= {"prompts": len(groups), "ties": ties, "below_min_score": low, "unscored": unscored}
    counts |= {"uncompared": left_over} if settings.label_file else {}
    return counts | {"score": _mean(scores), "best_score": _mean(chosen), "worst_score": _mean(rejected)}


def _groups(samples: Path) -> Iterator[Answers]:
    """The answers to each prompt; they are adjacent."""
    rows = (row for batch in read_documents(samples) for row in batch.to_pylist())
    for _, group in itertools.groupby(rows, key=lambda row: (row["path"], row["offset"], row["split"])):
        yield list(group)


def _scores(
    job: Job, settings: LabelSettings, groups: list[Answers], tokenizer: Tokenizer | None
) -> list[ScoredAnswers]:
    """The answers with scores of a reward model or a function, or with their agreement."""
    if settings.by == MAJORITY:
        return [list(zip(group, agreement([*map(_answer, group)]), strict=True)) for group in groups]
    rows = [row for group in groups for row in group]
    with job.display.bar("scoring", len(rows), "answers") as bar:
        if settings.reward:
            assert tokenizer is not None
            conversations = [_conversation(row, tokenizer) for row in rows]
            usable = [ids for ids in conversations if ids is not None]
            found = iter(RewardStage(job.inputs["reward"], job, settings.device)(usable, bar.advance).tolist())
            scores = [math.nan if ids is None else next(found) for ids in conversations]
        else:
            tables = [_prompt(row, tokenizer) for row in rows]
            scores = call_reward_function(
                settings.by, load_function(settings.by, "by"), tables, [_answer(row) for row in rows], "by"
            )
            bar.advance(len(rows))
    scored = iter(zip(rows, scores, strict=True))
    return [list(itertools.islice(scored, len(group))) for group in groups]


def _conversation(row: dict[str, Any], tokenizer: Tokenizer) -> np.ndarray | None:
    """The ids (int64) of a conversation up to the end of its answer, or None if the chat template refuses it."""
    try:
        ids, mask = render(json.loads(row["text"]), tokenizer)
    except ConversationRefused:
        return None
    return ids[: length_to_last_target(mask)].astype(np.int64)


def _scores_of_people(path: Path, groups: list[Answers]) -> list[ScoredAnswers]:
    """Two answers at a time with scores from a file of human labels: 1 and 0, or 0 and 0 for a tie.

    Writes the file if it does not exist.

    Raises:
        UserError: labels are missing, or the file is about other answers.
    """
    comparisons = [comparison for group in groups for comparison in _comparisons(group)]
    expected = [(_question(a), _answer(a), _answer(b)) for a, b in comparisons]
    if not path.exists():
        human_labels.write(path, expected)
    rows = human_labels.read(path)
    found = [(row["prompt"], row["a"], row["b"]) for row in rows]
    if found != expected:
        both = zip(expected, found, strict=False)
        first = next((n for n, (now, then) in enumerate(both, 1) if now != then), len(rows) + 1)
        raise UserError(
            f"{path}:{first}: found other answers than the stage has, expected its {len(expected)} lines; name another "
            "file, or move this one away, and a new one is written"
        )
    if why := human_labels.waiting_for(path):
        raise UserError(f"waiting {why}; fill them in and run the same command again")
    scores = {"a": (1.0, 0.0), "b": (0.0, 1.0), "tie": (0.0, 0.0)}
    return [list(zip(pair, scores[row["better"]], strict=True)) for pair, row in zip(comparisons, rows, strict=True)]


def _comparisons(group: Answers) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Two different answers at a time."""
    for a, b in zip(group[::2], group[1::2], strict=False):
        if _answer(a) != _answer(b):
            yield a, b


def _answer(row: dict[str, Any]) -> str:
    return json.loads(row["text"])[-1]["content"]


def _question(row: dict[str, Any]) -> str:
    return "\n\n".join(message["content"] for message in json.loads(row["text"])[:-1])


def _prompt(row: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The prompt as a reward function receives it: as in training, or, of answers of an endpoint, its text."""
    if tokenizer is None:
        return {**(json.loads(row["extra"]) if row["extra"] else {}), "prompt": _question(row)}
    ids, _ = render(json.loads(row["text"])[:-1], tokenizer, generation_prompt=True)
    return prompt_table(ids, row["extra"], tokenizer)


def _pair(best: dict[str, Any], worst: dict[str, Any]) -> dict[str, Any]:
    *prompt, chosen = json.loads(best["text"])
    rejected = json.loads(worst["text"])[-1]
    text = dump_document({"prompt": without_train(prompt), "chosen": [chosen], "rejected": [rejected]})
    return {**best, "text": text, "bytes": len(text.encode())}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
