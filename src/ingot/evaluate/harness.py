"""An adapter that lets EleutherAI's lm-eval evaluate ingot models: its `LM` interface has three methods.

    import ingot, lm_eval
    lm_eval.simple_evaluate(model=ingot.load("runs/stdlib/base").lm_eval(), tasks=["arc_easy"])

Prompts and continuations are tokenized as in lm-eval's adapter for transformers (encode both together, then remove the
prompt's tokens), so results are comparable. lm-eval passes chat prompts on as text. `apply_chat_template` therefore
returns the messages as JSON between control characters, and `_prompt` renders them to ids; text that spells a special
token is not parsed as one.
"""

import importlib
import json
import re
from collections.abc import Sequence
from typing import Any

from ingot.core.errors import UserError
from ingot.evaluate.continuations import score
from ingot.infer.sampling import Sampling
from ingot.infer.streaming import TextGeneration, max_prompt_length, prompt_ids, sampling_for
from ingot.model.transformer import Transformer
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.tokenizer.chat import render
from ingot.train.settings import rows_per_pass

_CHAT = re.compile("\x01chat(.*?)\x02", re.DOTALL)
MAX_NEW = 256
"""Longest answer in tokens, if a task does not set one."""


def adapter(model: Transformer, tokenizer: Tokenizer) -> Any:
    """An instance of lm-eval's `LM` for a model.

    Raises:
        UserError: lm-eval is not installed.
    """
    try:
        base = importlib.import_module("lm_eval.api.model").LM
    except ImportError:
        raise UserError("lm-eval is not installed, expected the extra lm-eval; pip install 'ingot[lm-eval]'") from None
    return type("IngotLM", (LMMethods, base), {})(model, tokenizer)


class LMMethods:
    """The methods of lm-eval's `LM`. Requests carry their arguments in `args`."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer):
        super().__init__()
        self._model, self._tokenizer = model, tokenizer

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(context, continuation) -> ln p of the continuation, and whether greedy decoding would generate it."""
        pairs = [self._pair(*request.args) for request in requests]
        return [(s.logp, s.greedy) for s in score(self._model, pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """(text,) -> ln p of the complete text: each token is predicted once, the first from the token before a text.

        The predicted windows are disjoint. A window of full length is conditioned on the one token before it, the last
        window on as many tokens as the context allows.
        """
        context = int(self._model.config.context)
        windows: list[tuple[Sequence[int], Sequence[int]]] = []
        counts = []
        for request in requests:
            ids = self._tokenizer.encode(request.args[0]).tolist()
            before = prompt_ids(self._tokenizer, "")[-1:]
            starts = range(0, len(ids), context)
            windows += [((before + ids[:start]), ids[start : start + context]) for start in starts]
            counts.append(len(starts))
        scored = iter(score(self._model, windows))
        return [sum(next(scored).logp for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """(context, settings) -> generated text up to one of `until`; greedy unless `do_sample`."""
        texts: dict[int, str] = {}
        by_settings: dict[str, list[int]] = {}
        for n, request in enumerate(requests):
            by_settings.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(n)
        size = rows_per_pass(int(self._model.config.context))
        for settings, numbers in by_settings.items():
            sampling, until = self._sampling(json.loads(settings))
            room = max_prompt_length(int(self._model.config.context), sampling.max_new)
            for start in range(0, len(numbers), size):
                batch = numbers[start : start + size]
                prompts = [self._prompt(requests[n].args[0])[-room:] for n in batch]
                run = TextGeneration(
                    self._model.eval(), self._tokenizer, prompts, sampling, stop=until, keys=[(n, 0) for n in batch]
                )
                texts.update(zip(batch, (answer.text for answer in run.answers()), strict=True))
        return [texts[n] for n in range(len(requests))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as text that `_prompt` renders; without `add_generation_prompt` the model continues the last one."""
        *before, last = chat_history
        messages, prefix = (chat_history, "") if add_generation_prompt else (before, last["content"])
        return f"\x01chat{json.dumps(messages)}\x02{prefix}"

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.fingerprint

    def _sampling(self, settings: dict[str, Any]) -> tuple[Sampling, list[str]]:
        """Sampling options and stop strings of a request."""
        until = settings.get("until") or []
        sampling = sampling_for(
            self._tokenizer,
            max_new=int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or MAX_NEW),
            temperature=float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0,
            top_k=int(settings.get("top_k") or 0),
            top_p=float(settings.get("top_p", 1.0)),
            min_p=float(settings.get("min_p") or 0.0),
            repetition_penalty=float(settings.get("repetition_penalty", 1.0)),
        )
        return sampling, [text for text in ([until] if isinstance(until, str) else until) if text]

    def _prompt(self, text: str) -> list[int]:
        chat = _CHAT.match(text)
        if not chat:
            return prompt_ids(self._tokenizer, text)
        ids, _ = render(json.loads(chat[1]), self._tokenizer, generation_prompt=True)
        return [*ids.tolist(), *self._tokenizer.encode(text[chat.end() :]).tolist()]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a prompt and of its continuation; trailing spaces of the prompt move to the continuation."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        prompt, answer = self._prompt(context), []
        if context and not _CHAT.match(context):
            answer = self._prompt(context + continuation)[len(prompt) :]
        # The answer is empty if one token spans the end of the prompt and the complete continuation.
        return prompt, answer or self._tokenizer.encode(continuation).tolist()
