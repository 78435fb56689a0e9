"""What completions are worth: a reward model's scores, or those of a function of the user's own.

A function gets two lists of equal length, prompts and completions, and returns as many scores:

    def right(prompts, completions):
        return [float(c.strip() == p["answer"]) for p, c in zip(prompts, completions)]

A prompt is a table with `prompt`, its text without special tokens, and the further fields of the row it came from. A
completion is a text without its stop token. None says that a completion cannot be scored: it is then left out. An
exception or a number that is not finite stops the run, since a reward of 0 in its place would be learned from.

Shapes: B completions.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ingot.core.errors import UserError, shortened
from ingot.core.functions import is_function, load_function
from ingot.infer.streaming import completion_text
from ingot.objectives.rollout import Rollout
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train.objective import Context

Function = Callable[[list[dict[str, Any]], list[str]], Sequence[float | None]]


class Scorer:
    """Scores rollouts.

    Args:
        name: `"file.py:function"`, loaded when it is first asked; else it is the companion in that role.
        role: `reward` or `gold`, the setting that it is of.
    """

    def __init__(self, name: str | None, role: str):
        self.name, self.role = name if name and is_function(name) else None, role
        self._function: Function | None = None

    def there(self, ctx: Context) -> bool:
        """Whether anybody can be asked."""
        return self.name is not None or self.role in ctx.companions

    def __call__(self, played: Rollout, ctx: Context) -> Tensor:
        """Scores [B] fp32, NaN where a completion could not be scored.

        Raises:
            UserError: the function failed, or gave something else than numbers.
        """
        if self.name is None:
            return _model_scores(played, ctx, ctx.companions[self.role])
        if self._function is None:
            self._function = load_function(self.name, f"objective.{self.role}")
        assert ctx.tokenizer is not None, "a reward function reads texts"
        prompts = prompt_tables(played, ctx.tokenizer)
        completions = [completion_text(ctx.tokenizer, one) for one in played.completions]
        scores = ask(self.name, self._function, prompts, completions, f"objective.{self.role}")
        return torch.tensor(scores, dtype=torch.float32)


def _model_scores(played: Rollout, ctx: Context, model: nn.Module) -> Tensor:
    execution, scores = ctx.execution, []
    for rows in played.batch.micro(execution.rows(played.batch.context)):
        here = rows.to(execution.device)
        with execution.forward():
            scores.append(model.scores(here.ids_BT, here.columns["lengths_B"]).float())  # pyright: ignore
    return torch.cat(scores).cpu()


def prompt_tables(played: Rollout, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """For each completion the table of its prompt."""
    batch = played.prompts
    extra_B = batch.columns.get("extra_B", [None] * len(batch))
    tables = []
    for ids, length, extra in zip(batch.ids_BT, batch.columns["lengths_B"], extra_B, strict=True):
        table = prompt_table(ids[:length], extra, tokenizer)
        tables += [dict(table) for _ in range(played.samples)]
    return tables


def prompt_table(ids: np.ndarray, extra: str | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a function is told of a prompt: its text, and the further fields of its row (`extra`, as JSON)."""
    special = frozenset(tokenizer.specials.values())
    text = tokenizer.decode([i for i in ids.tolist() if i not in special])
    return {**(json.loads(extra) if extra else {}), "prompt": text}


def ask(
    name: str,
    function: Function,
    prompts: list[dict[str, Any]],
    completions: list[str],
    where: str = "objective.reward",
) -> list[float]:
    """What a function says of completions, NaN for None; `where` is the setting that named it.

    Raises:
        UserError: it raised, or returned something else than one finite number or None for each; the prompt is named.
    """
    try:
        scores = list(function(prompts, completions))
    except (Exception, SystemExit) as error:
        guilty = next((i for i in range(len(prompts)) if _fails(function, prompts[i], completions[i])), 0)
        raise UserError(
            f"{where}: '{name}' raised {type(error).__name__}: {error} {_at(prompts, completions, guilty)}; "
            "mend it, or let it return None for what it cannot score"
        ) from error
    if len(scores) != len(prompts):
        raise UserError(
            f"{where}: '{name}' returned {len(scores)} scores for {len(prompts)} completions, expected one "
            "for each; mend its return value"
        )
    for i, score in enumerate(scores):
        if score is not None and not _is_number(score):
            raise UserError(
                f"{where}: '{name}' returned {score!r} {_at(prompts, completions, i)}, expected a finite "
                "number, or None for what it cannot score; mend it"
            )
    return [math.nan if score is None else float(score) for score in scores]


def _is_number(score: Any) -> bool:
    """Whether it is finite in the precision that scores have."""
    try:
        return abs(float(score)) <= torch.finfo(torch.float32).max
    except (TypeError, ValueError, OverflowError):
        return False


def _fails(function: Function, prompt: dict[str, Any], completion: str) -> bool:
    try:
        function([prompt], [completion])
    except (Exception, SystemExit):
        return True
    return False


def _at(prompts: list[dict[str, Any]], completions: list[str], i: int) -> str:
    prompt, completion = (repr(shortened(text)) for text in (prompts[i]["prompt"], completions[i]))
    return f"at prompt {prompt} with completion {completion}"
