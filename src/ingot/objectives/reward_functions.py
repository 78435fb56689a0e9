"""Scores of completions, from a reward model or a user's function.

A function gets two lists of equal length, prompts and completions, and returns one score for each completion:

    def right(prompts, completions):
        return [float(c.strip() == p["answer"]) for p, c in zip(prompts, completions)]

A prompt is a table with `prompt`, its text without special tokens, and the other fields of its row. A completion is a
text without its stop token. A score of None leaves a completion out. An exception or a number that is not finite stops
the run, since a reward of 0 in its place would be trained on.

Shapes: B completions.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ingot.core.errors import UserError, shortened
from ingot.core.functions import is_function, load_function
from ingot.data.batches import Batch
from ingot.infer.streaming import completion_text
from ingot.objectives.rollout import Rollout
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.train.objective import Context

Function = Callable[[list[dict[str, Any]], list[str]], Sequence[float | None]]


class Scorer:
    """Scores rollouts.

    Args:
        name: `"file.py:function"`, loaded at its first use; for any other name the companion of `role` scores.
        role: `reward` or `gold`, the setting that names the scorer.
    """

    def __init__(self, name: str | None, role: str):
        self.name, self.role = name if name and is_function(name) else None, role
        self._function: Function | None = None

    def available(self, ctx: Context) -> bool:
        """Whether there is a function or a companion that scores."""
        return self.name is not None or self.role in ctx.companions

    def __call__(self, rollout: Rollout, ctx: Context) -> Tensor:
        """Scores, [B] fp32 on the CPU; NaN for a completion that could not be scored.

        Raises:
            UserError: the function failed or did not return numbers.
        """
        if self.name is None:
            return _model_scores(rollout, ctx, ctx.companions[self.role])
        if self._function is None:
            self._function = load_function(self.name, f"objective.{self.role}")
        assert ctx.tokenizer is not None, "a reward function reads texts"
        prompts = prompt_tables(rollout, ctx.tokenizer)
        completions = [completion_text(ctx.tokenizer, completion) for completion in rollout.completions]
        call = partial(call_reward_function, self.name, self._function, prompts, completions, f"objective.{self.role}")
        scores = ctx.once(call)
        return torch.tensor(scores, dtype=torch.float32)


def _model_scores(rollout: Rollout, ctx: Context, model: nn.Module) -> Tensor:
    execution = ctx.execution

    def score(micro_batches: Sequence[Batch]) -> list[Tensor]:
        rows = (micro.to(execution.device) for micro in micro_batches)
        return [model.scores(r.ids_BT, r.columns["lengths_B"]).float().cpu() for r in rows]  # pyright: ignore

    with execution.forward():
        micro_batches = list(rollout.batch.micro_batches(execution.rows(rollout.batch.context)))
        return torch.cat(ctx.map(score, micro_batches))


def prompt_tables(rollout: Rollout, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The table of the prompt of each completion; every completion gets a copy of its own."""
    batch = rollout.prompts
    extra_B = batch.columns.get("extra_B", [None] * len(batch))
    tables = []
    for ids, length, extra in zip(batch.ids_BT, batch.columns["lengths_B"], extra_B, strict=True):
        table = prompt_table(ids[:length], extra, tokenizer)
        tables += [dict(table) for _ in range(rollout.samples)]
    return tables


def prompt_table(ids: np.ndarray, extra: str | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """The table of a prompt: its text, and the other fields of its row.

    Args:
        extra: the other fields, as JSON.
    """
    special = frozenset(tokenizer.specials.values())
    text = tokenizer.decode([i for i in ids.tolist() if i not in special])
    return {**(json.loads(extra) if extra else {}), "prompt": text}


def call_reward_function(
    name: str,
    function: Function,
    prompts: list[dict[str, Any]],
    completions: list[str],
    where: str = "objective.reward",
) -> list[float]:
    """Call a user's function and validate its scores; None becomes NaN.

    Args:
        where: the setting that names the function, for error messages.

    Raises:
        UserError: the function raised, or did not return a finite number or None for each completion.
    """
    try:
        returned = function(prompts, completions)
        scores = list(returned) if isinstance(returned, Iterable) else None
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        failed = next((i for i in range(len(prompts)) if _fails(function, prompts[i], completions[i])), 0)
        raise UserError(
            f"{where}: '{name}' raised {type(error).__name__}: {error} {_at(prompts, completions, failed)}; "
            "fix it, or return None for a completion that cannot be scored"
        ) from error
    if scores is None:
        raise UserError(
            f"{where}: '{name}' returned {returned!r} for {len(prompts)} completions, expected a list with a score for "
            "each; it is called once for all of them, with a list of prompts and a list of completions"
        )
    if len(scores) != len(prompts):
        raise UserError(
            f"{where}: '{name}' returned {len(scores)} scores for {len(prompts)} completions, expected one "
            "for each; fix its return value"
        )
    for i, score in enumerate(scores):
        if score is not None and not _is_number(score):
            raise UserError(
                f"{where}: '{name}' returned {score!r} {_at(prompts, completions, i)}, expected a finite "
                "number, or None for a completion that cannot be scored; fix it"
            )
    return [math.nan if score is None else float(score) for score in scores]


def _is_number(score: Any) -> bool:
    """Whether a score is a finite fp32 number."""
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
    """Prompt and completion number `i`, for an error message."""
    prompt, completion = (repr(shortened(text)) for text in (prompts[i]["prompt"], completions[i]))
    return f"at prompt {prompt} with completion {completion}"
