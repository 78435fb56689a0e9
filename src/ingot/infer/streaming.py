"""Tokens to text as they come: whole characters only, and never a part of a stop string.

A byte-level token may end in the middle of a character, and a stop string may begin in one token and end three later.
So text is given out only once it is certain: bytes wait for the rest of their character, characters that a stop string
may begin with wait until it cannot be one any more. What was given out piece by piece is exactly the final text.

Rejected: decoding all ids again for each token (quadratic, and earlier characters may change), and looking for stop
strings among ids (the same letters have many spellings as tokens).
"""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.core.errors import UserError
from ingot.infer.decoder import Decoder
from ingot.infer.generate import Completion, Generation
from ingot.infer.sampling import Sampling
from ingot.model.transformer import Transformer
from ingot.tokenizer.byte_bpe import Tokenizer
from ingot.tokenizer.chat import stop_ids


def sampling_for(tokenizer: Tokenizer, **settings: Any) -> Sampling:
    """`Sampling` that ends where the tokenizer's texts and answers end, and draws only ids that it can spell."""
    return Sampling(**settings, stop=frozenset(stop_ids(tokenizer)), vocab=tokenizer.vocab)


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """What a model is given to go on from a text; id 0 where there is neither a text nor a token to begin one."""
    return [*tokenizer.start, *tokenizer.encode(text).tolist()] or [0]


def room_for_prompt(context: int, max_new: int) -> int:
    """Ids of a prompt that leave an answer its length, or half of the context where it is longer than that."""
    return context - min(max_new, context // 2)


def completion_text(tokenizer: Tokenizer, completion: Completion) -> str:
    """The text of a completion without the stop id that ended it; ids beyond the vocabulary are U+FFFD."""
    ids = completion.ids[: len(completion.ids) - (completion.stop_reason == "stop")]
    if (ids < tokenizer.vocab).all():
        return tokenizer.decode(ids)
    known = [tokenizer.token_bytes(i) if i < tokenizer.vocab else "\ufffd".encode() for i in ids.tolist()]
    return b"".join(known).decode(errors="replace")


class TextStream:
    """Bytes in, text out as soon as it is certain, up to a stop string.

    The text ends before the stop string that is complete first; where two are complete at the same character, before
    the longer one. That does not depend on how the bytes were cut.
    """

    def __init__(self, stop: Sequence[str] = ()):
        self.stopped = False
        """Whether a stop string has ended the text; what is fed later is ignored."""
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = ""

    def feed(self, data: bytes) -> str:
        """The text that became certain with these bytes."""
        return self._take(self._decoder.decode(data))

    def finish(self) -> str:
        """The rest, when no more bytes come; half a character becomes U+FFFD."""
        return self._take(self._decoder.decode(b"", final=True), last=True)

    def _take(self, text: str, last: bool = False) -> str:
        if self.stopped:
            return ""
        self._waiting += text
        found = [(at + len(stop), at) for stop in self._stop if (at := self._waiting.find(stop)) >= 0]
        if found:
            self.stopped = True
            certain = min(found)[1]
        else:
            certain = len(self._waiting) - (0 if last else max(map(self._begun, self._stop), default=0))
        text, self._waiting = self._waiting[:certain], self._waiting[certain:]
        return text

    def _begun(self, stop: str) -> int:
        """How many characters at the end of the waiting text may be the beginning of this stop string."""
        longest = min(len(stop) - 1, len(self._waiting))
        return next((n for n in range(longest, 0, -1) if self._waiting.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Answer:
    """One continuation as text."""

    text: str
    """Without the stop id or the stop string that ended it."""
    completion: Completion
    """Its ids (also those of the stop), their log-probabilities, and what ended it."""

    def __str__(self) -> str:
        return self.text


class TextGeneration:
    """Prompts being continued as text: read `pieces` as it comes, or all of it as `answers`.

    Args:
        prompts: ids, as for `generate`.
        stop: a string, or several, that end a text and are cut off.
        samples, seed, step, keys: as for `generate`.

    Raises:
        UserError: an empty stop string, and what `generate` raises.
    """

    def __init__(
        self,
        model: Transformer | Decoder,
        tokenizer: Tokenizer,
        prompts: Sequence[np.ndarray | Sequence[int]],
        sampling: Sampling,
        *,
        stop: str | Sequence[str] = (),
        samples: int = 1,
        seed: int = 0,
        step: int = 0,
        keys: Sequence[tuple[int, int]] | None = None,
    ):
        stop = [stop] if isinstance(stop, str) else stop
        if "" in stop:
            raise UserError("stop: found an empty string, expected text that ends a continuation; leave it out")
        self._generation = Generation(model, prompts, sampling, samples=samples, seed=seed, step=step, keys=keys)
        self._tokenizer, self._stop_ids = tokenizer, sampling.stop
        self._streams = [TextStream(stop) for _ in range(len(prompts) * samples)]
        self._texts: list[list[str]] = [[] for _ in self._streams]
        self.pieces = self._run()
        """(place, text) as it becomes certain; place i * samples + j is sample j of prompt i."""

    def _run(self) -> Iterator[tuple[int, str]]:
        while self._generation.going:
            rows, ids = self._generation.step()
            for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
                if piece := self._feed(row, token):
                    self._texts[row].append(piece)
                    yield row, piece

    def _feed(self, row: int, token: int) -> str:
        stream = self._streams[row]
        piece = "" if token in self._stop_ids else stream.feed(self._tokenizer.token_bytes(token))
        if self._generation.reason_R[row]:
            piece += stream.finish()
        if stream.stopped:
            self._generation.end(row, "stop_string")
        return piece

    def answers(self) -> list[Answer]:
        """Every text, prompts x samples; reads what is left of `pieces` first."""
        for _ in self.pieces:
            pass
        return [Answer("".join(parts), self._generation.completion(row)) for row, parts in enumerate(self._texts)]
