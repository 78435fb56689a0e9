"""Streaming of generated text: complete characters only, and no part of a stop string.

A byte-level token may end inside a character, and a stop string may span several tokens. So text is emitted once it is
certain: bytes are held until their character is complete, and characters until they cannot begin a stop string. The
emitted pieces concatenate to exactly the final text.

Stop strings are matched in the text, because the same text has many tokenizations.
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
    """`Sampling` that stops at the tokenizer's end-of-text and end-of-turn ids and draws only ids of its vocabulary."""
    return Sampling(**settings, stop=frozenset(stop_ids(tokenizer)), vocab=tokenizer.vocab)


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The prompt for continuing a text; id 0 if the text is empty and the tokenizer has no start token."""
    return [*tokenizer.start_ids, *tokenizer.encode(text).tolist()] or [0]


def max_prompt_length(context: int, max_new: int) -> int:
    """The longest prompt that leaves room for `max_new` tokens, or for half of the context if that is less."""
    return context - min(max_new, context // 2)


def completion_text(tokenizer: Tokenizer, completion: Completion) -> str:
    """The text of a completion without its stop id; ids beyond the vocabulary become U+FFFD."""
    ids = completion.ids[: len(completion.ids) - (completion.stop_reason == "stop")]
    if (ids < tokenizer.vocab).all():
        return tokenizer.decode(ids)
    pieces = [tokenizer.token_bytes(i) if i < tokenizer.vocab else "\ufffd".encode() for i in ids.tolist()]
    return b"".join(pieces).decode(errors="replace")


class TextStream:
    """Incremental decoding of bytes to text, up to a stop string.

    The text ends before the stop string that is completed first; if two are completed by the same character, before the
    longer one. The result does not depend on how the bytes are split over calls.
    """

    def __init__(self, stop: Sequence[str] = ()):
        self.stopped = False
        """Whether a stop string has ended the text; later bytes are ignored."""
        self._stop = stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""

    def feed(self, data: bytes) -> str:
        """Add bytes. Returns the text that is certain now."""
        return self._emit(self._decoder.decode(data))

    def finish(self) -> str:
        """Returns the remaining text at the end of the bytes; an incomplete character becomes U+FFFD."""
        return self._emit(self._decoder.decode(b"", final=True), last=True)

    def _emit(self, text: str, last: bool = False) -> str:
        if self.stopped:
            return ""
        self._pending += text
        matches = [(start + len(stop), start) for stop in self._stop if (start := self._pending.find(stop)) >= 0]
        if matches:
            self.stopped = True
            end = min(matches)[1]
        else:
            end = len(self._pending) - (0 if last else max(map(self._partial_match, self._stop), default=0))
        text, self._pending = self._pending[:end], self._pending[end:]
        return text

    def _partial_match(self, stop: str) -> int:
        """Length of the longest suffix of the pending text that is a proper prefix of the stop string."""
        longest = min(len(stop) - 1, len(self._pending))
        return next((n for n in range(longest, 0, -1) if self._pending.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Answer:
    """A continuation as text."""

    text: str
    """The text without stop id and stop string."""
    completion: Completion
    """Ids (including those of the stop), log-probabilities and stop reason."""

    def __str__(self) -> str:
        return self.text


class TextGeneration:
    """Generation of text: iterate over `pieces` for streaming, or call `answers` for the complete texts.

    Args:
        prompts: ids, as for `generate`.
        stop: one or several strings that end a text; they are removed from it.
        samples, seed, step, keys: as for `generate`.

    Raises:
        UserError: a stop string is empty; also as `generate`.
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
            raise UserError("stop: found an empty string, expected a text; leave it out")
        self._generation = Generation(model, prompts, sampling, samples=samples, seed=seed, step=step, keys=keys)
        self._tokenizer, self._stop_ids = tokenizer, sampling.stop
        self._streams = [TextStream(stop) for _ in range(len(prompts) * samples)]
        self._before = [self._word_end(prompt) for prompt in prompts for _ in range(samples)]
        self._texts: list[list[str]] = [[] for _ in self._streams]
        self.pieces = self._run()
        """Iterator of (index, piece of text); index i * samples + j is sample j of prompt i."""

    def _run(self) -> Iterator[tuple[int, str]]:
        while self._generation.active:
            rows, ids = self._generation.step()
            for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
                if piece := self._feed(row, token):
                    self._texts[row].append(piece)
                    yield row, piece

    def _feed(self, row: int, token: int) -> str:
        stream = self._streams[row]
        data = self._before[row] + self._tokenizer.token_bytes(token)
        self._before[row] = b""
        piece = "" if token in self._stop_ids else stream.feed(data)
        if self._generation.reason_R[row]:
            piece += stream.finish()
        if stream.stopped:
            self._generation.end(row, "stop_string")
        return piece

    def _word_end(self, prompt: np.ndarray | Sequence[int]) -> bytes:
        """The blank between a prompt and its continuation that is part of the prompt's last id, if there is one."""
        ends_word = self._tokenizer.trailing_space and self._tokenizer.token_bytes(int(prompt[-1])).endswith(b" ")
        return b" " if ends_word else b""

    def answers(self) -> list[Answer]:
        """All texts, prompts x samples; finishes the generation first."""
        for _ in self.pieces:
            pass
        return [Answer("".join(pieces), self._generation.completion(row)) for row, pieces in enumerate(self._texts)]
