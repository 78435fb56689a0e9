"""Converts rows of common data sets to documents of the stage's format.

Each row is recognised by its field names. A field has a role (`fields.MEANINGS`), and the setting `fields` gives a role
to another name. A row with two non-empty fields of one role is rejected as ambiguous. A field without a role in the
format is kept in `extra`, or the row is rejected with its name.

    messages      a list of messages (`messages.read_message`); or the row itself is one
    prompt        with an input (`input`, `context`, ...) below it; before it the turns of a `history`
    completion    the answer, with its `reasoning`
    system        before either
    chosen, rejected

Documents are JSON: a list of messages (`chat`, `prompts`), or `{prompt, chosen, rejected}` with three lists (`pairs`).

Transcripts are not split at "Human:" and "Assistant:", because a message can contain these words. Instruction and input
are joined without a template, because its wording is the user's choice; what is empty is left out.
"""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ingot.corpus.readers.fields import NAMES, FieldUses, Format, Role, described
from ingot.corpus.readers.files import BadRow
from ingot.corpus.readers.messages import Messages, exclude_from_loss, is_trained_on, json_type, without_train
from ingot.corpus.readers.row_fields import RowFields, row_flags


class Document(NamedTuple):
    """A document of the stage's format."""

    text: str
    extra: str | None = None
    """The row's other fields as a JSON object."""
    uses: Mapping[str, str] = {}
    """Field -> what became of it (`FieldUses.by_name`)."""


def dump_document(document: Any) -> str:
    """The canonical JSON of a document that is not plain text, for the `text` column."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def row_parser(
    format: Format, field: str | None, fields: Mapping[Role, str], metadata: Collection[str] = ()
) -> Callable[[Any], Document]:
    """A function that converts a row to a document.

    Args:
        format: the stage's format.
        field: the text field, for format `text`.
        fields: role -> field name, which replaces the known names of the role.
        metadata: names of fields of rows and messages that are kept beside the document and not read.

    Returns:
        A function that raises BadRow for a row that does not fit the format.
    """
    if format == "text":
        assert field is not None
        return lambda row: _text(row, field, metadata)
    parse_row = _PARSERS[format]
    return lambda row: parse_row(RowFields(row, format, fields, metadata))


def identifying_fields(format: Format, field: str | None, fields: Mapping[Role, str]) -> frozenset[str]:
    """Field names of which every row of the format has at least one."""
    if format == "text":
        assert field is not None
        return frozenset({field})
    roles: tuple[Role, ...] = ("chosen",) if format == "pairs" else ("messages", "prompt")
    return frozenset(name for role in roles for name in (fields.get(role), *NAMES[role]) if name)


def missing_field(field: str, names: list[str]) -> str:
    """The reason to reject a row or table that has the fields `names` but not the text field."""
    other = ', or format = "chat" for conversations' if {*NAMES["messages"]} & {*names} else ""
    found = described(dict.fromkeys(names, ""))
    return f"no field '{field}', found {found}; set `field` to the one that holds the document{other}"


def text_fields(row: dict[str, Any], field: str, text: str, metadata: Collection[str]) -> FieldUses:
    """The uses of the fields of a row of format `text`, whose document is `text`.

    Raises:
        BadRow: a field that carries meaning is lost.
    """
    uses = FieldUses(metadata)
    uses.texts.append(text)
    uses.keep_rest(row, {field: "document"} | row_flags(row, uses, "text"), "text")
    return uses


def _text(row: Any, field: str, metadata: Collection[str]) -> Document:
    if not isinstance(row, dict):
        raise BadRow(f"found a JSON {json_type(row)}, expected an object with a field for the document")
    if field not in row:
        raise BadRow(missing_field(field, list(row)))
    value = row[field]
    if not isinstance(value, str):
        raise BadRow(f"field '{field}' is a JSON {json_type(value)}, expected a string")
    uses = text_fields(row, field, value, metadata)
    return Document(value, uses.extra(), uses.by_name)


def _document(row: RowFields, document: Any) -> Document:
    row.keep_rest()
    return Document(dump_document(document), row.uses.extra(), row.uses.by_name)


def _chat(row: RowFields) -> Document:
    """A conversation. Of a prompt and its completion only the completion contributes to the loss."""
    if not row.has_custom_name("prompt", "completion"):
        messages = row.messages("messages", "user")
        if messages is not None:
            return _document(row, row.with_system(row.flagged(messages)))
    prompt, completion = row.prompt(), row.answer("completion")
    if prompt is None or completion is None:
        raise row.unknown()
    _check_completion(completion, "completion")
    return _document(row, row.flagged([*exclude_from_loss(prompt), *completion]))


def _pair(row: RowFields) -> Document:
    row.check_order()
    chosen, rejected = row.messages("chosen", "assistant"), row.messages("rejected", "assistant")
    if chosen is None or rejected is None:
        raise row.unknown()
    prompt, answers = row.prompt(), (_without_true(chosen), _without_true(rejected))
    has_prompt = [messages[0]["role"] != "assistant" for messages in answers]
    if any(has_prompt) and not all(has_prompt):
        raise BadRow("one of chosen and rejected begins with the prompt, the other with the answer")
    if all(has_prompt):
        shared, answers = _split_prompt(*answers)
        shared = row.with_system(without_train(shared))
        if prompt is not None and any(message not in shared for message in without_train(prompt)):
            raise BadRow("the prompt of chosen and rejected differs from the prompt of the row; remove one of the two")
        prompt = shared
    if prompt is None:
        raise BadRow(
            f"chosen and rejected without a prompt (found {row.names()}), expected one, or lists of messages that "
            "begin with it (transcripts with 'Human:' and 'Assistant:' are not split)"
        )
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        _check_completion(answer, name)
    return _document(row, {"prompt": without_train(prompt), "chosen": answers[0], "rejected": answers[1]})


def _split_prompt(chosen: Messages, rejected: Messages) -> tuple[Messages, tuple[Messages, Messages]]:
    """The common first messages of two conversations, and the rest of each (at least one message)."""
    max_length = min(len(chosen), len(rejected)) - 1
    length = next((n for n in range(max_length) if chosen[n] != rejected[n]), max_length)
    if length == 0:
        raise BadRow("chosen and rejected are conversations without a common first message, expected a common prompt")
    return chosen[:length], (chosen[length:], rejected[length:])


def _prompts(row: RowFields) -> Document:
    messages = row.prompt()
    if messages is None:
        messages = row.messages("messages", "user")
        if messages is None:
            raise row.unknown()
        messages = row.with_system(messages)
    if messages[-1]["role"] not in ("user", "tool"):
        raise BadRow(f"the last message is the {messages[-1]['role']}'s, expected a user's for the model to answer")
    return _document(row, without_train(messages))


_PARSERS: dict[str, Callable[[RowFields], Document]] = {"chat": _chat, "pairs": _pair, "prompts": _prompts}


def _without_true(messages: Messages) -> Messages:
    """The messages without `train` = true, which is the default."""
    return [{name: value for name, value in m.items() if name != "train" or not value} for m in messages]


def _check_completion(messages: Messages, name: str) -> None:
    for end, message in (("begins", messages[0]), ("ends", messages[-1])):
        if message["role"] != "assistant":
            raise BadRow(f"the {name} {end} with a {message['role']} message, expected an assistant's")
    if name != "completion" and not is_trained_on(messages[-1]):  # of a chat it is dropped as `no_answer`
        raise BadRow(f"the {name} ends with a message that is not trained on, expected one to compare")
