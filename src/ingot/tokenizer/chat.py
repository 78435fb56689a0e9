"""Conversations to ids and the mask of what is learned, in one pass, so that the two can never disagree.

Our own format (`template = "turns"`) is `<|role|>content<|end|>` for each message. A conversation is rendered segment
by segment, each encoded on its own: the mask is 1 on an assistant's content and on the `<|end|>` after it (else the
model never learns to stop), and 0 on headers, on everybody else's words and on what a prompt for generation adds.
Content is always encoded as text, so a user who types `<|end|>` ends nothing.

A tokenizer that came with a Jinja template is rendered by that (`templates.py`): the text knows which of its characters
are learned, and an id is learned if it spells one of them.

Rejected: finding the answers again in the ids of a rendered string (merges across the seams move the borders).
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ingot.core.errors import UserError, nearest, shortened
from ingot.corpus.readers.row_formats import is_learned
from ingot.tokenizer.base import Tokenizer
from ingot.tokenizer.chat_template import Template, compiled
from ingot.tokenizer.settings import TURNS

ROLES = ("system", "user", "assistant", "tool")
END = "<|end|>"
FIELDS = ("role", "content", "train")

Message = Mapping[str, Any]
"""`role`, `content`, and optionally `train = false` on an assistant's message that is not to be learned."""


def render(
    messages: Sequence[Message], tokenizer: Tokenizer, generation_prompt: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """One conversation.

    Args:
        messages: in order, any roles.
        tokenizer: one with special tokens.
        generation_prompt: end with the header of an assistant's answer; nothing is learned then, the mask is all 0.

    Returns:
        ids [n] (uint32) and mask [n] (uint8; 1 where the id is a target of training).

    Raises:
        UserError: a malformed message, nothing to learn, or a tokenizer without special tokens.
    """
    ids, mask, _ = render_batch([messages], tokenizer, generation_prompt=generation_prompt)[0]
    return ids, mask


def render_batch(
    conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer, threads: int = 1, generation_prompt: bool = False
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """`render` of many conversations, with the UTF-8 bytes of the text that the targets of each spell."""
    require_chat(tokenizer)
    for messages in conversations:
        check(messages, needs_target=not generation_prompt)
    if tokenizer.template == TURNS:
        return _render_turns(conversations, tokenizer, threads, generation_prompt)
    return _render_template(conversations, tokenizer, generation_prompt)


def to_the_end(mask: np.ndarray) -> int:
    """How many ids there are up to the last one that is learned.

    What a template writes behind an answer's end is not sampled either: a row that is scored where it ends has to end
    where a completion does.
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
        ids: list[np.ndarray] = []
        mask: list[np.ndarray] = []
        target_bytes = 0
        for message in messages:
            content = next(encoded)
            trained = not generation_prompt and is_learned(message)
            target_bytes += trained * len(message["content"].encode())
            ids += [_one(special[f"<|{message['role']}|>"]), content, _one(end)]
            mask += [np.zeros(1, np.uint8), np.full(len(content) + 1, trained, np.uint8)]
        if generation_prompt:
            ids.append(_one(special["<|assistant|>"]))
            mask.append(np.zeros(1, np.uint8))
        rendered.append((np.concatenate(ids), np.concatenate(mask), target_bytes))
    return rendered


def _render_template(
    conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer, generation_prompt: bool
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    template = _template(tokenizer)
    trained = [[not generation_prompt and is_learned(one) for one in m] for m in conversations]
    marked = [template.render(m, t, generation_prompt) for m, t in zip(conversations, trained, strict=True)]
    rendered = []
    for (ids, spans), text, learned in zip(
        tokenizer.encode_marked([m.text for m in marked]), marked, trained, strict=True
    ):
        mask = np.zeros(len(ids), np.uint8)
        for start, stop in text.learned:
            mask |= (spans[:, 0] < stop) & (spans[:, 1] > start)
        if not mask.any() and any(learned):
            raise UserError("chat template: it writes nothing that an answer could be learned from; take another one")
        rendered.append((ids, mask, tokenizer.spelled_bytes(ids[mask == 1])))
    return rendered


def _template(tokenizer: Tokenizer) -> Template:
    ends = {tokenizer.eot, *tokenizer.stops, tokenizer.specials.get(END)}
    names = frozenset(name for name, id in tokenizer.specials.items() if id in ends)
    return compiled(tokenizer.template, tokenizer.names, tokenizer.marks, names)


def parse_conversation(text: str) -> list[dict[str, Any]]:
    """The messages of a chat document: a JSON list of messages, or an object with `messages`.

    Raises:
        UserError: not JSON, or a malformed message.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"conversation: not JSON ({error}); expected a list of messages") from None
    messages: Any = data.get("messages") if isinstance(data, dict) else data
    check(messages, needs_target=False)
    return messages


def check(messages: Any, needs_target: bool = True) -> None:
    """Raise a UserError, naming the message by its number from 1, unless this is a conversation to train on."""
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(f"conversation: found {_shown(messages)}, expected a list of at least one message")
    for number, message in enumerate(messages, 1):
        where = f"conversation, message {number}"
        if not isinstance(message, Mapping):
            raise UserError(f"{where}: found {_shown(message)}, expected a table with role and content")
        unknown = sorted(set(message) - set(FIELDS))
        if unknown:
            raise UserError(f"{where}: unknown field '{unknown[0]}' would be lost; {nearest(unknown[0], FIELDS)}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UserError(f"{where}: role {_shown(role)}; {nearest(str(role), ROLES)}")
        if not isinstance(content, str):
            raise UserError(f"{where}: content is {_shown(content)}, expected a string")
        train = message.get("train", role == "assistant")
        if not isinstance(train, bool):
            raise UserError(f"{where}: train is {_shown(train)}, expected true or false")
        if train and role != "assistant":
            raise UserError(f"{where}: train = true on a {role} message; only assistant messages are learned")
    if needs_target and not any(is_learned(m) for m in messages):
        raise UserError(
            "conversation: nothing to learn, as no assistant message is trained on; add an answer or drop the document"
        )


def show(ids: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Runs of text with whether they are learned, for a coloured view; special tokens appear by name."""
    assert len(ids) == len(mask)
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    return [
        (tokenizer.decode_bytes(ids[start:stop]).decode(errors="replace"), bool(mask[start]))
        for start, stop in itertools.pairwise(borders)
        if stop > start
    ]


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a generated answer: what ends a turn in the chat format, end of text, and what the model names."""
    turn = [tokenizer.specials[END]] if tokenizer.template == TURNS else _turn_end(tokenizer)
    return tuple(dict.fromkeys([*turn, *([] if tokenizer.eot is None else [tokenizer.eot]), *tokenizer.stops]))


_PROBE = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "the end"}]  # " the": in any vocabulary


def check_end(tokenizer: Tokenizer) -> None:
    """Raise a UserError where an answer ends in no special token, so that no model would learn to stop.

    A template that refuses the conversation which is tried is not judged.
    """
    try:
        ids, mask = render(_PROBE, tokenizer)
    except UserError:
        return
    if (last := ids[mask == 1][-1]) not in stop_ids(tokenizer):
        raise UserError(
            f"chat template: an answer ends in {tokenizer.decode([last])!r}, so a model would never learn to stop, "
            f"expected a special token of the tokenizer, such as {END}; let the template write one after each answer, "
            'or set another one (template = "turns" or "FILE.jinja") in the tokenizer stage'
        )


def check_template(tokenizer: Tokenizer) -> None:
    """Raise a UserError unless a template that somebody wrote marks answers, ends them, and parts them from the prompt.

    Where the end of the prompt and the start of the answer share a token, a model is asked with other ids than those it
    was trained on.
    """
    asked = _PROBE[:1]
    whole, _ = render(_PROBE, tokenizer)
    check_end(tokenizer)
    prompt, _ = render(asked, tokenizer, generation_prompt=True)
    if not np.array_equal(whole[: len(prompt)], prompt):
        end = tokenizer.decode_bytes(prompt[-1:]).decode(errors="replace")
        raise UserError(
            f"chat template: the prompt ends in {end!r}, which is another token when the answer follows; let the "
            "answer begin with its blank, or end the prompt in a line end or a special token"
        )


def _turn_end(tokenizer: Tokenizer) -> list[int]:
    """The special token that a template writes after an answer, found by letting it write one."""
    if not tokenizer.template:
        return []
    try:
        ids, mask = render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], tokenizer)
    except UserError:  # a template that wants other conversations still has `eot` and what the model names
        return []
    special = set(tokenizer.specials.values())
    return [id for id in ids[mask == 1].tolist() if id in special][-1:]


def require_chat(tokenizer: Tokenizer) -> None:
    """Raise a UserError for a tokenizer that has no chat format."""
    if tokenizer.template:
        return
    if tokenizer.specials:
        raise UserError(
            "format chat: the tokenizer's files have no chat template; give one in the tokenizer stage "
            '(template = "turns" or "FILE.jinja"), or put chat_template.jinja beside them'
        )
    raise UserError(
        f'format chat: a {tokenizer.kind} tokenizer has no special tokens to mark turns with; use type = "byte-bpe"'
    )


def _one(token: int) -> np.ndarray:
    return np.array([token], dtype=np.uint32)


def _shown(value: Any) -> str:
    return "nothing" if value is None else shortened(repr(value))
