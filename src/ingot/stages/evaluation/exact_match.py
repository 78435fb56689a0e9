"""The held-out questions of a corpus of conversations as a task: greedy answers, compared with the corpus's."""

import json

from ingot.core.errors import UserError
from ingot.corpus.documents import iter_texts
from ingot.evaluate.tasks import Item, Task, TaskHeader
from ingot.stages.job import Input


def question_task(corpus: Input, most: int) -> Task:
    """The first question and answer of held-out conversations, as a task with the corpus's name.

    Args:
        corpus: a stage with conversations.
        most: most items, evenly spaced over the conversations.

    Raises:
        UserError: no held-out conversation begins with a question and an answer.
    """
    items = []
    for text in iter_texts(corpus.path, "val"):
        messages = json.loads(text)
        if [message["role"] for message in messages[:2]] == ["user", "assistant"]:
            question, answer = (message["content"].strip() for message in messages[:2])
            if question and answer:
                items.append(Item(prompt=question, kind="generate", targets=(answer,), check="exact"))
    if not items:
        raise UserError(
            f"exact_match: found no held-out conversation of '{corpus.name}' that begins with a question of the user "
            "and an answer of the assistant, expected some; raise its holdout.fraction, or name another corpus"
        )
    size = min(most, len(items))
    selected = tuple(items[n * len(items) // size] for n in range(size))
    head = TaskHeader(task=corpus.name, ability="held-out questions, exact match", form="question", stop=("\n\n",))
    return Task(head=head, items=selected, examples=())
