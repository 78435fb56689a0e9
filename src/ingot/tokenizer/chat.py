"""Renders conversations to ids and their loss mask.

Ingot's own format (`template = "turns"`) is `<|role|>content<|end|>` for each message. Each segment is encoded
separately. The mask is 1 on an assistant's content and the `<|end|>` after it (so that the model learns to stop), and 0
on headers, other roles and the generation prompt. Content is always encoded as text: a user who types `<|end|>` does
not end the turn.

With a Jinja template (`chat_template.py`), rendering yields the spans of the answers in the text, and an id is a target
if it covers a character of a span. Searching for the answers in the ids of the rendered text would fail, because merges
across the borders move them.

A conversation that the format cannot render raises `ConversationRefused`: a stage leaves it out and goes on.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ingot.core.errors import UserError, nearest, shortened
from ingot.corpus.readers.messages import is_trained_on
from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.chat_template import Template, compile_template, lost_reasoning, opens_thought
from ingot.tokenizer.settings import TURNS
from ingot.tokenizer.template_sandbox import ConversationRefused, Rejected, TemplateLimit

ROLES = ("system", "user", "assistant", "tool")
END = "<|end|>"
FIELDS = ("role", "content", "reasoning_content", "train")

Message = Mapping[str, Any]
"""`role` and `content`; of an assistant also `reasoning_content`, and `train = false` to exclude it from the loss."""


def render(
    messages: Sequence[Message], tokenizer: Tokenizer, generation_prompt: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Render one conversation.

    Args:
        messages: the conversation.
        tokenizer: a tokenizer with special tokens.
        generation_prompt: end with the header of an assistant's answer; the mask is then 0 everywhere.

    Returns:
        ids [n] (uint32) and mask [n] (uint8; 1 for targets of training).

    Raises:
        UserError: a malformed message, no message to train on, or a tokenizer without special tokens.
        ConversationRefused: the chat format cannot render the conversation.
    """
    ids, mask, _ = render_batch([messages], tokenizer, generation_prompt=generation_prompt)[0]
    return ids, mask


def render_batch(
    conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer, threads: int = 1, generation_prompt: bool = False
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """`render` each conversation. Returns (ids, mask, number of UTF-8 bytes of the targets' text) of each."""
    require_chat(tokenizer)
    for messages in conversations:
        check_conversation(messages, needs_target=not generation_prompt)
    if tokenizer.template == TURNS:
        return _render_turns(conversations, tokenizer, threads, generation_prompt)
    return _render_template(conversations, tokenizer, generation_prompt)


def length_to_last_target(mask: np.ndarray) -> int:
    """Number of ids up to and including the last target.

    Some templates write more after the end of an answer. A sampled completion ends before that, so a row that a reward
    model scores at its last id must end there too.
    """
    return int(np.flatnonzero(mask)[-1]) + 1


def _render_turns(
    conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer, threads: int, generation_prompt: bool
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    contents = tokenizer.encode_batch([m["content"] for messages in conversations for m in messages], threads)
    encoded = iter(contents)
    special, end = tokenizer.specials, tokenizer.specials[END]
    rendered = []
    for messages in conversations:
        for number, message in enumerate(messages, 1):
            if not generation_prompt and is_trained_on(message) and message.get("reasoning_content"):
                raise lost_reasoning(number)
        ids: list[np.ndarray] = []
        mask: list[np.ndarray] = []
        target_bytes = 0
        for message in messages:
            content = next(encoded)
            trained = not generation_prompt and is_trained_on(message)
            target_bytes += trained * len(message["content"].encode())
            ids += [_as_array(special[f"<|{message['role']}|>"]), content, _as_array(end)]
            mask += [np.zeros(1, np.uint8), np.full(len(content) + 1, trained, np.uint8)]
        if generation_prompt:
            ids.append(_as_array(special["<|assistant|>"]))
            mask.append(np.zeros(1, np.uint8))
        rendered.append((np.concatenate(ids), np.concatenate(mask), target_bytes))
    return rendered


def _render_template(
    conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer, generation_prompt: bool
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    template = _template(tokenizer)
    trained = [[not generation_prompt and is_trained_on(one) for one in m] for m in conversations]
    texts = [template.render(m, t, generation_prompt) for m, t in zip(conversations, trained, strict=True)]
    encoded = tokenizer.encode_with_specials([text.text for text in texts])
    rendered = []
    for (ids, spans), text, flags in zip(encoded, texts, trained, strict=True):
        mask = np.zeros(len(ids), np.uint8)
        for start, stop in text.target_spans:
            mask |= (spans[:, 0] < stop) & (spans[:, 1] > start)
        if not mask.any() and any(flags):
            raise ConversationRefused(
                "chat template: the rendered text contains no answer to train on; use another template"
            )
        rendered.append((ids, mask, tokenizer.text_bytes(ids[mask == 1])))
    return rendered


def _template(tokenizer: Tokenizer) -> Template:
    ends = {tokenizer.eot, *tokenizer.stops, tokenizer.specials.get(END)}
    names = frozenset(name for name, id in tokenizer.specials.items() if id in ends)
    return compile_template(
        tokenizer.template,
        tokenizer.special_tokens_map,
        tokenizer.placeholders,
        names,
        tokenizer.template_variables,
    )


def parse_conversation(text: str) -> list[dict[str, Any]]:
    """The messages of a chat document: a JSON list of messages, or an object with `messages`.

    Raises:
        UserError: not JSON, or a malformed message.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"conversation: not JSON ({error}); expected a list of messages") from None
    messages: Any = data.get("messages") if isinstance(data, dict) else data
    check_conversation(messages, needs_target=False)
    return messages


def check_conversation(messages: Any, needs_target: bool = True) -> None:
    """Raise UserError for a malformed conversation, or with `needs_target` for one without a message to train on."""
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(f"conversation: found {_shown(messages)}, expected a list of at least one message")
    for number, message in enumerate(messages, 1):
        where = f"conversation, message {number}"
        if not isinstance(message, Mapping):
            raise UserError(f"{where}: found {_shown(message)}, expected a table with role and content")
        unknown = sorted(set(message) - set(FIELDS))
        if unknown:
            raise UserError(f"{where}: unknown field '{unknown[0]}'; {nearest(unknown[0], FIELDS)}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UserError(f"{where}: role {_shown(role)}; {nearest(str(role), ROLES)}")
        if not isinstance(content, str):
            raise UserError(f"{where}: content is {_shown(content)}, expected a string")
        reasoning = message.get("reasoning_content")
        if reasoning is not None and not isinstance(reasoning, str):
            raise UserError(f"{where}: reasoning_content is {_shown(reasoning)}, expected a string")
        train = message.get("train", role == "assistant")
        if not isinstance(train, bool):
            raise UserError(f"{where}: train is {_shown(train)}, expected true or false")
        if train and role != "assistant":
            raise UserError(f"{where}: train = true on a {role} message, expected an assistant message; remove it")
    if needs_target and not any(is_trained_on(m) for m in messages):
        raise UserError("conversation: no assistant message to train on; add an answer or remove the document")


def masked_runs(ids: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """(text, whether it is a target) of each run of equal mask values; special tokens appear by name."""
    assert len(ids) == len(mask)
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    return [
        (tokenizer.decode_bytes(ids[start:stop]).decode(errors="replace"), bool(mask[start]))
        for start, stop in itertools.pairwise(borders)
        if stop > start
    ]


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a generated answer: the chat format's end of turn, `eot`, and the tokenizer's `stops`."""
    turn = [tokenizer.specials[END]] if tokenizer.template == TURNS else _turn_end(tokenizer)
    return tuple(dict.fromkeys([*turn, *([] if tokenizer.eot is None else [tokenizer.eot]), *tokenizer.stops]))


_PROBE = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "the end"}]  # in any vocabulary


def check_turn_end(tokenizer: Tokenizer) -> None:
    """Raise UserError if an answer does not end in a special token, because a model would not learn to stop.

    A template that rejects the test conversation passes, but not one that does too much work for it.
    """
    try:
        ids, mask = render(_PROBE, tokenizer)
    except TemplateLimit:
        raise
    except ConversationRefused:
        return
    if (last := ids[mask == 1][-1]) not in stop_ids(tokenizer):
        raise UserError(
            f"chat template: an answer ends in {tokenizer.decode([last])!r}, expected a special token such as {END}, "
            "without which a model does not learn to stop; write one after each answer in the template, or set "
            'another template ("turns" or "FILE.jinja") in the tokenizer stage'
        )


def check_template(tokenizer: Tokenizer) -> None:
    """Raise UserError if the template does not end answers, or if the ids of a prompt change when an answer follows.

    A token that covers the end of the prompt and the start of the answer would make the ids of generation differ from
    those of training. A template that rejects the test conversation passes: it may need a system message.
    """
    try:
        complete, _ = render(_PROBE, tokenizer)
    except Rejected:
        return
    check_turn_end(tokenizer)
    prompt, _ = render(_PROBE[:1], tokenizer, generation_prompt=True)
    if not np.array_equal(complete[: len(prompt)], prompt) and not thought_in_prompt(tokenizer):
        end = tokenizer.decode_bytes(prompt[-1:]).decode(errors="replace")
        raise UserError(
            f"chat template: the prompt ends in {end!r}, which becomes another token when the answer follows; move "
            "the blank to the answer, or end the prompt in a line end or a special token"
        )


def thought_in_prompt(tokenizer: Tokenizer) -> str:
    """What a generation prompt ends in and answers without reasoning do not begin with, such as `<think>`, or ""."""
    try:
        complete, mask = render(_PROBE, tokenizer)
        prompt, _ = render(_PROBE[:1], tokenizer, generation_prompt=True)
    except ConversationRefused:
        return ""
    start = int(np.argmax(mask))
    rest = tokenizer.decode_bytes(prompt[start:]).decode(errors="replace")
    return rest if np.array_equal(complete[:start], prompt[:start]) and opens_thought(rest) else ""


def _turn_end(tokenizer: Tokenizer) -> list[int]:
    """The last special token of a rendered test answer, or none."""
    if not tokenizer.template:
        return []
    try:
        ids, mask = render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], tokenizer)
    except ConversationRefused:  # a template that rejects this conversation still has `eot` and `stops`
        return []
    special = set(tokenizer.specials.values())
    return [id for id in ids[mask == 1].tolist() if id in special][-1:]


def require_chat(tokenizer: Tokenizer) -> None:
    """Raise UserError for a tokenizer without a chat format."""
    if tokenizer.template:
        return
    if tokenizer.specials:
        raise UserError(
            "format chat: the tokenizer's files have no chat template; set one in the tokenizer stage "
            '(template = "turns" or "FILE.jinja"), or put chat_template.jinja beside them'
        )
    raise UserError(
        f'format chat: a {tokenizer.kind} tokenizer has no special tokens to mark turns with; use type = "byte-bpe"'
    )


def _as_array(token: int) -> np.ndarray:
    return np.array([token], dtype=np.uint32)


def _shown(value: Any) -> str:
    return "nothing" if value is None else shortened(repr(value))
