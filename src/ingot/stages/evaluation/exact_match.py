"""The held-out questions of a corpus as a task: greedy answers, compared with the corpus's."""

import json

from ingot.core.errors import UserError
from ingot.corpus.documents import read_documents
from ingot.evaluate.tasks import Item, Task, TaskHeader
from ingot.stages.job import Input


def question_task(corpus: Input, most: int) -> Task:
    """The first question and answer of held-out conversations, or prompts with their field `answer`, as a task.

    Args:
        corpus: a stage with conversations or prompts.
        most: most items, evenly spaced.

    Raises:
        UserError: no held-out document has a question and an answer.
    """
    items = []
    for batch in read_documents(corpus.path, "val", ["text", "extra"]):
        for text, extra in zip(batch["text"].to_pylist(), batch["extra"].to_pylist(), strict=True):
            messages = json.loads(text)
            fields = json.loads(extra) if extra else {}
            if len(messages) == 1 and isinstance(fields.get("answer"), str):
                messages.append({"role": "assistant", "content": fields["answer"]})
            if [message["role"] for message in messages[:2]] == ["user", "assistant"]:
                question, answer = (message["content"].strip() for message in messages[:2])
                if question and answer:
                    items.append(Item(prompt=question, kind="generate", targets=(answer,), check="exact"))
    if not items:
        raise UserError(
            f"exact_match: found no held-out question with an answer in '{corpus.name}', expected conversations of "
            "user and assistant, or prompts with a field answer; raise its holdout.fraction, or name another corpus"
        )
    size = min(most, len(items))
    selected = tuple(items[n * len(items) // size] for n in range(size))
    head = TaskHeader(task=corpus.name, ability="held-out questions, exact match", form="question", stop=("\n\n",))
    return Task(head=head, items=selected, examples=())
