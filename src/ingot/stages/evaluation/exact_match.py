"""The held-out questions of a corpus as a task: greedy answers, compared with the corpus's."""

import json
from collections.abc import Callable
from typing import Any

from ingot.core.errors import UserError
from ingot.corpus.documents import read_documents
from ingot.evaluate.abilities import Subject
from ingot.evaluate.tasks import Item, Task, TaskHeader
from ingot.stages.job import Input


def question_task(corpus: Input, most: int, notify: Callable[[str], None]) -> Task:
    """The first question and answer of held-out conversations, or prompts with their field `answer`, as a task.

    A system message before the question is part of it. An answer may be a number, which is compared as its text.

    Args:
        corpus: a stage with conversations or prompts.
        most: most items, evenly spaced.
        notify: receives how many documents have no such question.

    Raises:
        UserError: no held-out document has a question and an answer.
    """
    items, left_out = [], 0
    for batch in read_documents(corpus.path, "val", ["text", "extra"]):
        for text, extra in zip(batch["text"].to_pylist(), batch["extra"].to_pylist(), strict=True):
            item = _item(json.loads(text), json.loads(extra) if extra else {})
            items += [item] if item else []
            left_out += item is None
    if not items:
        raise UserError(
            f"exact_match: found no held-out question with an answer in '{corpus.name}', expected conversations of "
            "user and assistant, or prompts with a field answer; raise its holdout.fraction, or name another corpus"
        )
    if left_out:
        notify(
            f"exact_match: {left_out:,} of {left_out + len(items):,} held-out documents of {corpus.name} are left out, "
            "because they have no answer right after one question"
        )
    size = min(most, len(items))
    selected = tuple(items[n * len(items) // size] for n in range(size))
    head = TaskHeader(task=corpus.name, ability="held-out questions, exact match", form="question", stop=("\n\n",))
    return Task(head=head, items=selected, examples=())


def _item(messages: list[dict[str, Any]], fields: dict[str, Any]) -> Item | None:
    """The first question and its answer; None without them."""
    system = ""
    if messages and messages[0]["role"] == "system":
        system, messages = messages[0]["content"].strip(), messages[1:]
    answer = fields.get("answer")
    if len(messages) == 1 and isinstance(answer, str | int | float) and not isinstance(answer, bool):
        messages = [*messages, {"role": "assistant", "content": str(answer)}]
    if [message["role"] for message in messages[:2]] != ["user", "assistant"]:
        return None
    question, answer = (message["content"].strip() for message in messages[:2])
    if not (question and answer):
        return None
    return Item(prompt=question, system=system, kind="generate", targets=(answer,), check="exact")


def with_room(task: Task, subject: Subject, notify: Callable[[str], None]) -> Task:
    """The task with as many new tokens as the longest answer needs, and one more, as far as the context has them.

    Args:
        task: of `question_task`.
        subject: the model that answers.
        notify: receives how many answers are too long, and so can't be right.
    """
    lengths = [len(subject.answer(item.targets[0], subject.chats, item.prompt)) for item in task.items]
    longest = max(len(subject.prompt(item.prompt, subject.chats, item.system)) for item in task.items)
    context = int(subject.model.config.context)
    room = min(max(lengths) + 1, max(context - longest, context // 2))
    if too_long := sum(length > room for length in lengths):
        notify(
            f"exact_match: {too_long:,} of {len(lengths):,} answers of {task.head.task} are longer than the {room:,} "
            f"tokens that the context of {context:,} has after a question, so they count as wrong"
        )
    return task.model_copy(update={"head": task.head.model_copy(update={"max_new": room})})
