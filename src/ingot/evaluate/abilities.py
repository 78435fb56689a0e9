"""Run a task on a model: choices by likelihood, generated answers by a check, code by executing it.

Accuracy stays at chance for long and then rises suddenly, so each task also reports a smooth measure: the probability
of the correct choice, or the nats per byte of a correct answer (Schaeffer et al. 2023, arXiv:2304.15004).

Accuracies have Wilson intervals, the other metrics a bootstrap over items.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ingot.core.statistics import wilson
from ingot.evaluate.bootstrap import ratio
from ingot.evaluate.checks import is_correct
from ingot.evaluate.continuations import score
from ingot.evaluate.sandbox import Mode, program_of, run_code
from ingot.evaluate.tasks import Item, Task
from ingot.infer.streaming import TextGeneration, max_prompt_length, prompt_ids, sampling_for
from ingot.model.transformer import Transformer
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.tokenizer.chat import render, stop_ids
from ingot.tokenizer.template_sandbox import ConversationRefused
from ingot.train.settings import rows_per_pass

MAX_PROGRAMS = 2
"""Programs that run at the same time."""


@dataclass(frozen=True)
class ItemResult:
    """A model's answer to one item; the fields are columns of the stage's table of answers."""

    prompt: str
    """The item's prompt, after its examples."""
    answer: str
    """The selected choice, or the generated text."""
    right: bool
    why: str
    """The error of code that failed; empty otherwise."""
    measure: float | None
    """The probability of the correct choice, or the nats of the target; None if no target fits the context."""
    bytes: int
    """UTF-8 bytes of the target that `measure` refers to; 0 for choices."""
    expected: str
    """A correct answer; empty if the item has none."""


@dataclass(frozen=True)
class Subject:
    """The model under evaluation, with its tokenizer."""

    model: Transformer
    tokenizer: Tokenizer
    chats: bool
    """Whether it was trained on conversations; questions are then sent as a user message."""

    def prompt(self, text: str, chat: bool, system: str = "") -> Sequence[int]:
        """The ids of a prompt; with `chat`, of a user message and the beginning of the reply.

        A system message precedes it. Where a chat template has no place for one, the user message begins with it.
        """
        joined = f"{system}\n\n{text}" if system else text
        if not chat:
            return prompt_ids(self.tokenizer, joined)
        messages = [{"role": "user", "content": text}]
        if system:
            try:
                with_system = [{"role": "system", "content": system}, *messages]
                return render(with_system, self.tokenizer, generation_prompt=True)[0].tolist()
            except ConversationRefused:
                messages = [{"role": "user", "content": joined}]
        return render(messages, self.tokenizer, generation_prompt=True)[0].tolist()

    def answer(self, text: str, chat: bool, prompt: str = "") -> Sequence[int]:
        """The ids of an answer; with `chat`, followed by the end of the turn.

        Without `chat` it is encoded with its prompt, because some tokenizers put a blank before every text; alone if a
        token spans the border.
        """
        if not chat:
            before, both = self.tokenizer.encode_batch([prompt, prompt + text])
            joined = len(both) > len(before) and np.array_equal(both[: len(before)], before)
            return (both[len(before) :] if joined else self.tokenizer.encode(text)).tolist()
        return [*self.tokenizer.encode(text.strip()).tolist(), stop_ids(self.tokenizer)[0]]

    def nats(
        self,
        pairs: Sequence[tuple[str, str]],
        chat: bool,
        advance: Callable[[int], None],
        systems: Sequence[str] | None = None,
    ) -> list[float]:
        """-ln p of the answer of each (prompt, answer) pair; `systems` are the system messages of the prompts."""
        requests = [
            (self.prompt(prompt, chat, system), self.answer(answer, chat, prompt))
            for (prompt, answer), system in zip(pairs, systems or [""] * len(pairs), strict=True)
        ]
        return [-scored.logp for scored in score(self.model, requests, advance)]

    def generate(
        self,
        prompts: Sequence[str],
        chat: bool,
        max_new: int,
        stop: Sequence[str],
        advance: Callable[[int], None],
        systems: Sequence[str] | None = None,
    ) -> list[str]:
        """Greedy answers to prompts after their system messages; a prompt that is too long loses its beginning."""
        sampling = sampling_for(self.tokenizer, max_new=max_new, temperature=0.0)
        room = max_prompt_length(int(self.model.config.context), max_new)
        asked = zip(prompts, systems or [""] * len(prompts), strict=True)
        rows = [self.prompt(text, chat, system)[-room:] for text, system in asked]
        size, texts = rows_per_pass(int(self.model.config.context)), []
        for start in range(0, len(rows), size):
            run = TextGeneration(
                self.model, self.tokenizer, rows[start : start + size], sampling, stop=() if chat else stop
            )
            texts += [answer.text for answer in run.answers()]
            advance(len(rows[start : start + size]))
        return texts


def run_task(
    subject: Subject,
    task: Task,
    shots: int | None = None,
    advance: Callable[[int], None] = lambda n: None,
    sandbox: Mode = "bwrap",
) -> list[ItemResult]:
    """Results of all items of a task, in order.

    Args:
        shots: examples before each item; default: the task's own number.
        advance: called with the number of items done since the last call.
        sandbox: how code runs.
    """
    examples, chat = task.few_shot_examples(shots), task.head.form == "question" and subject.chats
    prompts = [_with_examples(item, examples, task.head.between) for item in task.items]
    results: dict[int, ItemResult] = {}
    generation = partial(_run_generation, sandbox=sandbox)
    for run, kinds in ((_run_choices, ("choice",)), (generation, ("generate", "code"))):
        numbers = [n for n, item in enumerate(task.items) if item.kind in kinds]
        if numbers:
            of_kind = run(subject, task, [(task.items[n], prompts[n]) for n in numbers], chat, advance)
            results.update(zip(numbers, of_kind, strict=True))
    return [results[n] for n in range(len(task.items))]


def _with_examples(item: Item, examples: Sequence[Item], between: str) -> str:
    return "".join(f"{e.prompt}{e.reference}{between}" for e in examples) + item.prompt


Prompted = Sequence[tuple[Item, str]]
"""Items with their prompts."""


def _run_choices(
    subject: Subject, task: Task, items: Prompted, chat: bool, advance: Callable[[int], None]
) -> list[ItemResult]:
    pairs = [(prompt, choice) for item, prompt in items for choice in item.choices]
    nats = iter(subject.nats(pairs, chat, lambda n: None, [item.system for item, _ in items for _ in item.choices]))
    results = []
    for item, prompt in items:
        nats_C = np.array([next(nats) for _ in item.choices])
        p_C = np.exp(nats_C.min() - nats_C)
        selected, answer = int(nats_C.argmin()), item.answer or 0
        p = float(p_C[answer] / p_C.sum())
        results.append(ItemResult(prompt, item.choices[selected], selected == answer, "", p, 0, item.reference))
        advance(1)
    return results


def _run_generation(
    subject: Subject, task: Task, items: Prompted, chat: bool, advance: Callable[[int], None], sandbox: Mode
) -> list[ItemResult]:
    systems = [item.system for item, _ in items]
    prompts = [prompt for _, prompt in items]
    texts = subject.generate(prompts, chat, task.head.max_new, task.head.stop, advance, systems)
    context = int(subject.model.config.context)
    targets = [item.targets[0] if item.targets else "" for item, _ in items]
    targets = [target if target and len(subject.answer(target, chat)) <= context else "" for target in targets]
    with_target = [(prompt, target) for (_, prompt), target in zip(items, targets, strict=True) if target]
    of_target = [system for system, target in zip(systems, targets, strict=True) if target]
    nats = iter(subject.nats(with_target, chat, lambda n: None, of_target))
    results = []
    with ThreadPoolExecutor(MAX_PROGRAMS) as pool:
        outcomes = pool.map(partial(_check, sandbox), (item for item, _ in items), texts)
        for (item, prompt), target, text, (correct, error) in zip(items, targets, texts, outcomes, strict=True):
            measure = next(nats) if target else None
            results.append(ItemResult(prompt, text, correct, error, measure, len(target.encode()), item.reference))
    return results


def _check(sandbox: Mode, item: Item, text: str) -> tuple[bool, str]:
    """Whether a generated answer is correct, and the error of its code."""
    if item.kind == "code":
        outcome = run_code(program_of(item.prompt, text), item.tests, sandbox)
        return outcome.passed, outcome.why
    return is_correct(text, item.check, item.targets), ""


def rows(task: Task, results: Sequence[ItemResult]) -> Iterator[dict[str, Any]]:
    """Table rows of a task's results: metric, value, and a 95 % interval."""
    yield {"metric": "accuracy", **wilson(sum(result.right for result in results), len(results))}
    choices = [n for n, item in enumerate(task.items) if item.kind == "choice"]
    if choices:
        chance = float(np.mean([1 / len(task.items[n].choices) for n in choices]))
        if len(choices) == len(results):
            yield {"metric": "chance", "value": chance, "low": chance, "high": chance, "n": len(choices)}
        p = np.array([results[n].measure for n in choices])
        yield {"metric": "right_probability", **ratio(p, np.ones_like(p))}
    with_target = [r for n, r in enumerate(results) if task.items[n].kind != "choice" and r.bytes]
    if with_target:
        nats, sizes = np.array([r.measure for r in with_target]), np.array([r.bytes for r in with_target], float)
        yield {"metric": "target_nats_per_byte", **ratio(nats, sizes)}
