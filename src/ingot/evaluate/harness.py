"""Our models under EleutherAI's lm-eval: the three calls that its tasks are made of.

    import ingot, lm_eval
    lm_eval.simple_evaluate(model=ingot.load("runs/stdlib/base").lm_eval(), tasks=["arc_easy"])

Prompts and continuations are cut into tokens as lm-eval's own adapter for transformers cuts them (encode both together,
take away the prompt), so that numbers compare. Chat prompts travel through lm-eval as text and are rendered here, so a
special token that a task's text spells stays text.
"""

import importlib
import json
import re
from collections.abc import Sequence
from typing import Any

from ingot.core.errors import UserError
from ingot.evaluate.continuations import score
from ingot.infer.streaming import TextGeneration, prompt_ids, room_for_prompt, sampling_for
from ingot.model.transformer import Transformer
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.tokenizer.chat import render
from ingot.train.settings import rows_per_pass

_CHAT = re.compile("\x01chat(.*?)\x02", re.DOTALL)
MAX_NEW = 256
"""Longest answer where a task says nothing."""


def adapter(model: Transformer, tokenizer: Tokenizer) -> Any:
    """An instance of lm-eval's `LM`.

    Raises:
        UserError: lm-eval is not installed.
    """
    try:
        base = importlib.import_module("lm_eval.api.model").LM
    except ImportError:
        raise UserError("lm-eval is not installed, expected the extra lm-eval; pip install 'ingot[lm-eval]'") from None
    return type("IngotLM", (Calls, base), {})(model, tokenizer)


class Calls:
    """What lm-eval asks of a model. Requests carry their arguments in `args`."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer):
        super().__init__()
        self._model, self._tokenizer = model, tokenizer

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(context, continuation) -> ln p of the continuation, and whether greedy decoding would write it."""
        pairs = [self._pair(*request.args) for request in requests]
        return [(s.logp, s.greedy) for s in score(self._model, pairs)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """(text,) -> ln p of all of it: each token is predicted once, the first one from what begins a text.

        Windows are disjoint; one after the first begins with the token before it, and the last reaches back as far as
        the context allows.
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
        """(context, settings) -> text up to one of `until`, greedy unless `do_sample`."""
        texts: dict[int, str] = {}
        alike: dict[str, list[int]] = {}
        for n, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(n)
        size = rows_per_pass(int(self._model.config.context))
        for told, numbers in alike.items():
            sampling, until = self._settings(json.loads(told))
            room = room_for_prompt(int(self._model.config.context), sampling.max_new)
            for start in range(0, len(numbers), size):
                here = numbers[start : start + size]
                prompts = [self._prompt(requests[n].args[0])[-room:] for n in here]
                run = TextGeneration(
                    self._model.eval(), self._tokenizer, prompts, sampling, stop=until, keys=[(n, 0) for n in here]
                )
                texts.update(zip(here, (answer.text for answer in run.answers()), strict=True))
        return [texts[n] for n in range(len(requests))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as text that `_prompt` renders; without `add_generation_prompt` the last one is gone on with."""
        *before, last = chat_history
        messages, begun = (chat_history, "") if add_generation_prompt else (before, last["content"])
        return f"\x01chat{json.dumps(messages)}\x02{begun}"

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.fingerprint

    def _settings(self, told: dict[str, Any]) -> tuple[Any, list[str]]:
        until = told.get("until") or []
        sampling = sampling_for(
            self._tokenizer,
            max_new=int(told.get("max_gen_toks") or told.get("max_new_tokens") or MAX_NEW),
            temperature=float(told.get("temperature", 1.0)) if told.get("do_sample") else 0.0,
            top_k=int(told.get("top_k") or 0),
            top_p=float(told.get("top_p", 1.0)),
            min_p=float(told.get("min_p") or 0.0),
            repetition_penalty=float(told.get("repetition_penalty", 1.0)),
        )
        return sampling, [text for text in ([until] if isinstance(until, str) else until) if text]

    def _prompt(self, text: str) -> list[int]:
        chat = _CHAT.match(text)
        if not chat:
            return prompt_ids(self._tokenizer, text)
        ids, _ = render(json.loads(chat[1]), self._tokenizer, generation_prompt=True)
        return [*ids.tolist(), *self._tokenizer.encode(text[chat.end() :]).tolist()]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        blanks = len(context) - len(context.rstrip())
        if blanks:
            context, continuation = context[:-blanks], context[-blanks:] + continuation
        prompt, answer = self._prompt(context), []
        if context and not _CHAT.match(context):
            answer = self._prompt(context + continuation)[len(prompt) :]
        return prompt, answer or self._tokenizer.encode(continuation).tolist()  # a token may reach over the border
