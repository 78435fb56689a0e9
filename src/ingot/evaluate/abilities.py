"""A model sits a task: choices by likelihood, answers by a check, code by running it.

Abilities come late and suddenly by accuracy, so each task also measures something that moves before it does: the
probability of the right choice, or the nats per byte of a right answer (Schaeffer et al. 2023, arXiv:2304.15004).

Intervals: Wilson's for accuracies, a bootstrap over items for the others.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.core.statistics import wilson
from ingot.evaluate.bootstrap import ratio
from ingot.evaluate.checks import right
from ingot.evaluate.continuations import score
from ingot.evaluate.sandbox import program_of, run_code
from ingot.evaluate.tasks import Item, Task
from ingot.infer.streaming import TextGeneration, prompt_ids, room_for_prompt, sampling_for
from ingot.model.transformer import Transformer
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.tokenizer.chat import render, stop_ids
from ingot.train.settings import rows_per_pass

RUNNERS = 2
"""Programs that run at the same time."""


@dataclass(frozen=True)
class Answered:
    """What a model made of one item."""

    prompt: str
    """With its examples."""
    answer: str
    """The choice taken, or the text written."""
    right: bool
    why: str
    """Of code that failed: its error."""
    measure: float | None
    """The probability of the right choice; else the nats of the target, where there is one within the context."""
    bytes: int
    """UTF-8 bytes of the target whose nats these are."""


@dataclass(frozen=True)
class Examinee:
    """A model with what it needs to be asked."""

    model: Transformer
    tokenizer: Tokenizer
    chats: bool
    """Whether it was trained on conversations: questions are then asked as a user."""

    def prompt(self, text: str, asked: bool) -> Sequence[int]:
        """The ids that an answer follows."""
        if not asked:
            return prompt_ids(self.tokenizer, text)
        return render([{"role": "user", "content": text}], self.tokenizer, generation_prompt=True)[0].tolist()

    def answer(self, text: str, asked: bool) -> Sequence[int]:
        """The ids of an answer; of one that is asked for, with the end of the turn."""
        if not asked:
            return self.tokenizer.encode(text).tolist()
        return [*self.tokenizer.encode(text.strip()).tolist(), stop_ids(self.tokenizer)[0]]

    def nats(self, pairs: Sequence[tuple[str, str]], asked: bool, advance: Callable[[int], None]) -> list[float]:
        """-ln p of each answer to its prompt."""
        requests = [(self.prompt(prompt, asked), self.answer(answer, asked)) for prompt, answer in pairs]
        return [-scored.logp for scored in score(self.model, requests, advance)]

    def write(
        self, prompts: Sequence[str], asked: bool, max_new: int, stop: Sequence[str], advance: Callable[[int], None]
    ) -> list[str]:
        """The likeliest answers, token by token (temperature 0)."""
        sampling = sampling_for(self.tokenizer, max_new=max_new, temperature=0.0)
        room = room_for_prompt(int(self.model.config.context), max_new)
        rows = [self.prompt(text, asked)[-room:] for text in prompts]
        size, texts = rows_per_pass(int(self.model.config.context)), []
        for start in range(0, len(rows), size):
            run = TextGeneration(
                self.model, self.tokenizer, rows[start : start + size], sampling, stop=() if asked else stop
            )
            texts += [answer.text for answer in run.answers()]
            advance(len(rows[start : start + size]))
        return texts


def sit(
    examinee: Examinee,
    task: Task,
    shots: int | None = None,
    advance: Callable[[int], None] = lambda n: None,
) -> list[Answered]:
    """Every item of a task, in order.

    Args:
        shots: examples in front of each item, where it is not the task's own number.
        advance: told the number of items done.
    """
    examples, asked = task.shown(shots), task.head.form == "question" and examinee.chats
    prompts = [_with_examples(item, examples, task.head.between) for item in task.items]
    found: dict[int, Answered] = {}
    for judge, kinds in ((_choose, ("choice",)), (_write, ("generate", "code"))):
        chosen = [n for n, item in enumerate(task.items) if item.kind in kinds]
        if chosen:
            answered = judge(examinee, task, [(task.items[n], prompts[n]) for n in chosen], asked, advance)
            found.update(zip(chosen, answered, strict=True))
    return [found[n] for n in range(len(task.items))]


def _with_examples(item: Item, examples: Sequence[Item], between: str) -> str:
    return "".join(f"{e.prompt}{e.reference}{between}" for e in examples) + item.prompt


Asked = Sequence[tuple[Item, str]]
"""Items with their prompts."""


def _choose(
    examinee: Examinee, task: Task, items: Asked, asked: bool, advance: Callable[[int], None]
) -> list[Answered]:
    pairs = [(prompt, choice) for item, prompt in items for choice in item.choices]
    nats = iter(examinee.nats(pairs, asked, lambda n: None))
    answered = []
    for item, prompt in items:
        nats_C = np.array([next(nats) for _ in item.choices])
        p_C = np.exp(nats_C.min() - nats_C)
        taken, answer = int(nats_C.argmin()), item.answer or 0
        p = float(p_C[answer] / p_C.sum())
        answered.append(Answered(prompt, item.choices[taken], taken == answer, "", p, 0))
        advance(1)
    return answered


def _write(examinee: Examinee, task: Task, items: Asked, asked: bool, advance: Callable[[int], None]) -> list[Answered]:
    texts = examinee.write([prompt for _, prompt in items], asked, task.head.max_new, task.head.stop, advance)
    context = int(examinee.model.config.context)
    targets = [item.targets[0] if item.targets else "" for item, _ in items]
    targets = [target if target and len(examinee.answer(target, asked)) <= context else "" for target in targets]
    with_target = [(prompt, target) for (_, prompt), target in zip(items, targets, strict=True) if target]
    nats = iter(examinee.nats(with_target, asked, lambda n: None))
    answered = []
    with ThreadPoolExecutor(RUNNERS) as pool:
        verdicts = pool.map(_verdict, (item for item, _ in items), texts)
        for (_, prompt), target, text, (good, why) in zip(items, targets, texts, verdicts, strict=True):
            measure = next(nats) if target else None
            answered.append(Answered(prompt, text, good, why, measure, len(target.encode())))
    return answered


def _verdict(item: Item, text: str) -> tuple[bool, str]:
    if item.kind == "code":
        outcome = run_code(program_of(item.prompt, text, item.tests))
        return outcome.passed, outcome.why
    return right(text, item.check, item.targets), ""


def rows(task: Task, answered: Sequence[Answered]) -> Iterator[dict[str, Any]]:
    """Table rows of a task that was sat: metric, value, and a 95 % interval."""
    good = sum(a.right for a in answered)
    yield {"metric": "accuracy", **wilson(good, len(answered))}
    choices = [n for n, item in enumerate(task.items) if item.kind == "choice"]
    if choices:
        chance = float(np.mean([1 / len(task.items[n].choices) for n in choices]))
        if len(choices) == len(answered):
            yield {"metric": "chance", "value": chance, "low": chance, "high": chance, "n": len(choices)}
        p = np.array([answered[n].measure for n in choices])
        yield {"metric": "right_probability", **ratio(p, np.ones_like(p))}
    written = [a for n, a in enumerate(answered) if task.items[n].kind != "choice" and a.bytes]
    if written:
        nats, sizes = np.array([a.measure for a in written]), np.array([a.bytes for a in written], float)
        yield {"metric": "target_nats_per_byte", **ratio(nats, sizes)}
