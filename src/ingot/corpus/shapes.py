"""From a row, as JSON or a table has it, to the document of the stage's format; or why it is none."""

from typing import Any

from ingot.corpus.documents import dump_messages
from ingot.corpus.files import BadRow

ROLES = frozenset({"system", "user", "assistant", "tool"})


def text(row: Any, field: str) -> str:
    """The document of format `text`. Raises BadRow."""
    value = _field(row, field)
    if not isinstance(value, str):
        raise BadRow(f"field '{field}' is a JSON {json_type(value)}, expected a string")
    return value


def chat(row: Any, field: str) -> str:
    """The document of format `chat`. Raises BadRow."""
    value = _field(row, field)
    if not isinstance(value, list) or not value:
        raise BadRow(f"field '{field}' is a JSON {json_type(value)}, expected a list of messages, at least one")
    return dump_messages([_message(m, n, field) for n, m in enumerate(value, 1)])


def missing(field: str, names: list[str]) -> str:
    """The reason for a row or a table without the field."""
    found = ", ".join(f"'{name}'" for name in names) or "none"
    return f"no field '{field}', found {found}; set `field` to the one that holds the document"


def json_type(value: Any) -> str:
    """What JSON calls it."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


def _field(row: Any, field: str) -> Any:
    if not isinstance(row, dict):
        raise BadRow(f"found a JSON {json_type(row)}, expected an object with a field for the document")
    if field not in row:
        raise BadRow(missing(field, list(row)))
    return row[field]


def _message(message: Any, number: int, field: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        raise BadRow(
            f'message {number} of \'{field}\' has no string "content", expected {{"role": ..., "content": ...}}'
        )
    role = message.get("role")
    if role not in ROLES:
        raise BadRow(f"message {number} of '{field}' has role {role!r}, expected one of {', '.join(sorted(ROLES))}")
    kept = {"role": role, "content": message["content"]}
    if message.get("train") is not None:
        if not isinstance(message["train"], bool):
            raise BadRow(f"message {number} of '{field}' has train = {message['train']!r}, expected true or false")
        kept["train"] = message["train"]
    return kept
