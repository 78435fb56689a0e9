"""Reads the messages of a conversation: roles, texts, reasoning and loss flags.

A message is `{role, content}` or ShareGPT's `{from, value}`; content may be a list of parts of type text or thinking.
It becomes `{role, content}`, with `reasoning_content` if an answer has reasoning under any of its names, and with
`train` if a loss flag of an answer is given. All other fields pass `FieldUses.keep_rest`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from ingot.core.errors import shortened
from ingot.corpus.readers.fields import MEANINGS, NAMES, FieldUses, is_empty, meaning, quoted
from ingot.corpus.readers.files import BadRow

Messages = list[dict[str, Any]]

MESSAGE_ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
}
"""Role of a message in the data -> role in a document."""
LOSS_FLAGS = frozenset(MEANINGS["loss"].names)
"""Fields that are true for what is trained on. A longer name with such a word (`no_loss`) is not read."""
_FLAGS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}
"""Values of a loss flag; 1 and 0 are keys as well, being equal to true and false."""


def is_trained_on(message: Mapping[str, Any]) -> bool:
    """Whether the message contributes to the loss: an assistant's, unless it has `train` = false."""
    return message["role"] == "assistant" and message.get("train", True)


def exclude_from_loss(messages: Messages) -> Messages:
    """The messages with `train` = false for those of the assistant: a prompt for another answer."""
    return [{**m, "train": False} if m.get("role") == "assistant" else m for m in messages]


def only_last_answer(messages: Messages) -> Messages:
    """The messages with `train` = false for all answers but the last one that is trained on."""
    last = max((n for n, message in enumerate(messages) if is_trained_on(message)), default=len(messages))
    return [*exclude_from_loss(messages[:last]), *messages[last:]]


def without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message without `reasoning_content`, and of an answer's content only what follows `</think>`."""
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    if message["role"] == "assistant" and "</think>" in message["content"]:
        rest["content"] = message["content"].split("</think>")[-1].lstrip()
    return rest


def without_train(messages: Messages) -> Messages:
    """The messages without `train`, for a prompt, on which nothing is trained."""
    return [{name: value for name, value in m.items() if name != "train"} for m in messages]


def json_type(value: Any) -> str:
    """The name of the value's JSON type."""
    types = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return types.get(type(value), "null" if value is None else type(value).__name__)


def read_message(message: Any, number: int, field: str, uses: FieldUses) -> dict[str, Any]:
    """One message of a row.

    Args:
        message: the message in the data.
        number: its position from 1.
        field: the row's field that contains it.
        uses: records its fields.

    Raises:
        BadRow: it is malformed, or a field that carries meaning has no place in a message.
    """
    where = f"message {number} of {quoted(field)}"
    if not isinstance(message, dict):
        raise BadRow(f"{where} is a JSON {json_type(message)}, expected {{role, content}}")
    role_key, text_key = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
    name = message.get(role_key)
    role = MESSAGE_ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        found = "null" if name is None else repr(name)
        raise BadRow(f"{where} has {role_key} {found}, expected one of {', '.join(MESSAGE_ROLES)}")
    content, thoughts = _content(message.get(text_key), where, f"{field}[{number}].{text_key}", uses)
    if not isinstance(content, str):
        if calls := [n for n in message if meaning(n) == "tools" and not is_empty(message[n])]:
            raise BadRow(f"{where} calls a tool ('{calls[0]}'), expected text; write the call as text, or remove it")
        found = f"a JSON {json_type(content)}" if text_key in message else "nothing"
        raise BadRow(f'{where} has no string "{text_key}", expected {{{role_key}, {text_key}}}; found {found}')
    parsed: dict[str, Any] = {"role": role, "content": content}
    uses.texts.append(content)
    others = {name: value for name, value in message.items() if name not in (role_key, text_key)}
    if not others and not thoughts:
        return parsed
    flags = loss_flags(others, where, uses)
    used = dict.fromkeys(flags, "loss")
    if role == "assistant":
        if reasoning := reasoning_of(others, NAMES["reasoning"], where, uses, thoughts):
            parsed["reasoning_content"] = next(iter(reasoning.values()))
            used |= dict.fromkeys(reasoning, "reasoning")
        if flags:
            parsed["train"] = next(iter(flags.values()))
    elif thoughts:
        raise BadRow(f"{where} has a part of type 'thinking', expected only 'text' parts of a {role} message")
    elif wrong := [name for name, trained in flags.items() if trained and name != "weight"]:  # OpenAI's is 1 anywhere
        raise BadRow(f"{where} has {wrong[0]} = true, but only an assistant's message can be trained on; remove it")
    uses.keep_rest(others, used, "message", where=f"{field}[{number}]")
    return parsed


def reasoning_of(
    table: Mapping[str, Any], names: Collection[str], where: str, uses: FieldUses, thoughts: str = ""
) -> dict[str, str]:
    """The reasoning of an answer by field name; several names may hold the same text.

    Args:
        table: a message, or a row with a prompt and a completion.
        names: fields that hold reasoning.
        where: the table's name in error messages.
        uses: names of metadata.
        thoughts: reasoning in the parts of the content.

    Raises:
        BadRow: it is no string, or two fields differ.
    """
    found = {name: table[name] for name in names if name not in uses.metadata and not is_empty(table.get(name))}
    if thoughts:
        found["content"] = thoughts
    for name, value in found.items():
        if not isinstance(value, str):
            raise BadRow(f"{where} has {quoted(name)} of type {json_type(value)}, expected a string of reasoning")
    if len({*found.values()}) > 1:
        raise BadRow(f"{where} has different reasoning in {' and '.join(map(quoted, found))}; keep one of them")
    uses.texts += found.values()
    return found


def loss_flags(table: Mapping[str, Any], where: str, uses: FieldUses) -> dict[str, bool]:
    """The loss flags of a message by field name, all equal: whether it is trained on.

    Raises:
        BadRow: a value is none of true, false, 1 and 0, or two flags differ.
    """
    flags: dict[str, bool] = {}
    for name, value in table.items():
        if name not in LOSS_FLAGS or name in uses.metadata or is_empty(value):
            continue
        key = value.strip().lower() if isinstance(value, str) else value
        if not isinstance(key, str | int | float) or key not in _FLAGS:
            raise BadRow(
                f"{where} has {name} = {shortened(repr(value))}, expected true, false, 0 or 1; list the field in "
                "`metadata` if it does not say what is trained on"
            )
        flags[name] = _FLAGS[key]
    if len({*flags.values()}) > 1:
        raise BadRow(f"{where} has the loss flags {' and '.join(map(quoted, flags))}, which differ; keep one of them")
    return flags


def _content(content: Any, where: str, path: str, uses: FieldUses) -> tuple[Any, str]:
    """The text of a message and the reasoning in it. A content may be a list of parts, as in multimodal data sets."""
    if not isinstance(content, list):
        return content, ""
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    for number, part in enumerate(content, 1):
        kind = part.get("type") if isinstance(part, dict) else json_type(part)
        key = {"reasoning": "thinking"}.get(str(kind), str(kind))
        text = None
        if isinstance(part, dict) and key in texts:
            text = part.get(kind) if isinstance(part.get(kind), str) else part.get("text")
        if not isinstance(text, str):
            raise BadRow(f"{where} has a part of type {kind!r}, expected only 'text' parts")
        others = {name: value for name, value in part.items() if name not in ("type", "text", kind)}
        uses.keep_rest(others, {}, "message", where=f"{path}[{number}]")
        if key == "thinking" and texts["text"]:
            raise BadRow(f"{where} has a thinking part after the text, expected it before the answer")
        texts[key].append(text)
    return "".join(texts["text"]), "\n\n".join(texts["thinking"])
