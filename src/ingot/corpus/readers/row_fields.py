"""Access to the fields of a row by their roles."""

from collections.abc import Collection, Mapping
from typing import Any

from ingot.corpus.readers.fields import NAMES, ROLES, FieldUses, Format, Role, described, is_empty, quoted, words_of
from ingot.corpus.readers.files import BadRow
from ingot.corpus.readers.json_files import RepeatedName, parse
from ingot.corpus.readers.messages import (
    LOSS_FLAGS,
    Messages,
    exclude_from_loss,
    json_type,
    loss_flags,
    read_message,
    reasoning_of,
)

_EXPECTED_FIELDS: dict[Format, str] = {
    "chat": "messages, conversations, or a prompt (question, instruction) with a completion (response, answer, output)",
    "pairs": "chosen and rejected, with a prompt (question, instruction) unless they are lists of messages",
    "prompts": "a prompt (question, instruction), or messages (conversations) that end with a user's",
}

_SCORES = frozenset({"score", "scores", "rating", "ratings", "reward", "rewards", "grade", "quality", "overall"})
"""Words in the name of a number that is higher for a better answer."""


class RowFields:
    """Access to the fields of a row by role; records which fields were used."""

    def __init__(self, row: Any, format: Format, fields: Mapping[Role, str], metadata: Collection[str]):
        if isinstance(row, list):  # a bare conversation
            row = {"messages": row}
        if not isinstance(row, dict):
            raise BadRow(f"found a JSON {json_type(row)}, expected an object, or a list of messages")
        self._row: dict[str, Any] = row
        self._format: Format = format
        self._fields, self._used = fields, dict[str, str]()
        self.uses = FieldUses(metadata)

    def _names(self, role: Role) -> list[str]:
        """The names of the role that the row may use."""
        if role in self._fields:
            return [self._fields[role]]
        return [n for n in NAMES[role] if n not in self._fields.values() and n not in self.uses.metadata]

    def find(self, role: Role) -> tuple[str, Any] | None:
        """(name, value) of the field with the role, or None. Empty values count only if there is no other."""
        names = [name for name in self._names(role) if self._row.get(name) is not None]
        if len(names) > 1:
            names = [name for name in names if not is_empty(self._row[name])] or names[:1]
        if len(names) > 1:
            raise BadRow(f"both {' and '.join(map(quoted, names))} may be the {role}; choose with fields.{role}")
        self._used |= dict.fromkeys(names, role)
        return (names[0], self._row[names[0]]) if names else None

    def messages(self, role: Role, speaker: str) -> Messages | None:
        """The messages in the field with the role, or None. A string is one message of the speaker."""
        field = self.find(role)
        if field is None:
            return None
        name, value = field
        value = _parse_list(value, name, or_text=role != "messages")
        if isinstance(value, str) and role != "messages":
            self.uses.texts.append(value)
            if role == "prompt":
                value = self._with_input(value)
            return [{"role": speaker, "content": value}]
        if isinstance(value, dict) and role in ("chosen", "rejected"):
            value = [value]
        if not isinstance(value, list) or not value:
            text = "a string or " if role != "messages" else ""
            raise BadRow(f"field '{name}' is a JSON {json_type(value)}, expected {text}a non-empty list of messages")
        messages = [read_message(message, number, name, self.uses) for number, message in enumerate(value, 1)]
        return [m for m in messages if m["role"] != "system" or m["content"].strip()] or messages

    def with_system(self, messages: Messages) -> Messages:
        """The messages, preceded by the row's system prompt if it has one."""
        field = self.find("system")
        if field is None or is_empty(field[1]):
            return messages
        name, value = field
        if not isinstance(value, str):
            raise BadRow(f"field '{name}' is a JSON {json_type(value)}, expected a string")
        if messages[0]["role"] == "system":
            raise BadRow(f"field '{name}' is a system prompt, but the messages begin with one; keep one of them")
        self.uses.texts.append(value)
        return [{"role": "system", "content": value}, *messages]

    def prompt(self) -> Messages | None:
        """The messages of the prompt, or None: system prompt, history, then the prompt itself."""
        messages = self.messages("prompt", "user")
        is_null = messages is None and any(name in self._row for name in self._names("prompt"))
        if is_null and (text := self._with_input("")):  # as for an empty instruction, the input is the question
            messages = [{"role": "user", "content": text}]
        if messages is None:
            return None
        start = 1 if messages[0]["role"] == "system" else 0
        return self.with_system([*messages[:start], *self._history(), *messages[start:]])

    def answer(self, role: Role) -> Messages | None:
        """The messages of a completion. Reasoning in a field of its own belongs to the last one."""
        messages = self.messages(role, "assistant")
        reasoning = reasoning_of(self._row, self._names("reasoning"), "the row", self.uses) if messages else {}
        if messages and reasoning:
            if "reasoning_content" in messages[-1]:
                raise BadRow(
                    f"field {quoted(next(iter(reasoning)))} is reasoning, but the {role} has its own; keep one"
                )
            messages[-1]["reasoning_content"] = next(iter(reasoning.values()))
            self._used |= dict.fromkeys(reasoning, "reasoning")
        return messages

    def flagged(self, messages: Messages) -> Messages:
        """The conversation with the row's loss flags: one flag for all answers, or a list of one flag per message."""
        lists = {n: v for n, v in self._row.items() if n in LOSS_FLAGS and isinstance(v, list)}
        flags = loss_flags({n: v for n, v in self._row.items() if n not in lists}, "the row", self.uses)
        if flags and not all(flags.values()):
            messages = exclude_from_loss(messages)
        for name, values in lists.items():
            if name in self.uses.metadata or is_empty(values):
                continue
            if len(values) != len(messages):
                raise BadRow(
                    f"field {quoted(name)} has {len(values)} values for {len(messages)} messages, expected one for each"
                )
            trained = [all(loss_flags({name: value}, "the row", self.uses).values()) for value in values]
            rows = zip(messages, trained, strict=True)
            messages = [message if flag else exclude_from_loss([message])[0] for message, flag in rows]
        self._used |= dict.fromkeys((*flags, *lists), "loss")
        return messages

    def has_custom_name(self, *roles: Role) -> bool:
        """Whether the setting `fields` names one of the roles."""
        return any(role in self._fields for role in roles)

    def keep_rest(self) -> None:
        """Keep the fields that were not read. Raises BadRow for one that carries meaning."""
        if self._format != "chat":
            self._used |= row_flags(self._row, self.uses, self._format)
        replaced = {name for role in self._fields for name in NAMES[role]}
        if self.has_custom_name("prompt", "completion"):
            replaced |= {*NAMES["messages"]}
        self.uses.keep_rest(self._row, self._used, self._format, replaced)

    def unknown(self) -> BadRow:
        """The error for a row without the fields of the format."""
        custom = "".join(f", fields.{role} = '{name}'" for role, name in self._fields.items())
        return BadRow(
            f"not a row of {self._format}: expected {_EXPECTED_FIELDS[self._format]}; found "
            f"{self.names()}{custom}; name others with fields = {{ {ROLES[self._format][0]} = ... }}"
        )

    def names(self) -> str:
        """The fields of the row for an error message."""
        return described(self._row)

    def check_order(self) -> None:
        """Raise BadRow if a margin, or scores of both answers, say that the rejected answer is the better one."""
        by_words = {words_of(name): value for name, value in self._row.items()}
        for name, value in self._row.items():
            score, words = _number(value), words_of(name)
            if score is None or name in self.uses.metadata:
                continue
            partner = tuple("rejected" if word == "chosen" else word for word in words)
            other = _number(by_words.get(partner)) if partner != words and not _SCORES.isdisjoint(words) else None
            if other is not None and score < other:
                raise BadRow(f"field {quoted(name)} is lower than that of the rejected answer; swap the two answers")
            if "margin" in words and score < 0:
                raise BadRow(
                    f"field {quoted(name)} is negative, so the rejected answer is better; swap the two answers"
                )

    def _with_input(self, instruction: str) -> str:
        """The instruction with the row's input below it, separated by an empty line; an empty one is left out."""
        field = self.find("input")
        if field is None:
            return instruction
        name, value = field
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, str) for part in parts):
            raise BadRow(f"field '{name}' is a JSON {json_type(value)}, expected a string or a list of strings")
        self.uses.texts += parts
        return "\n\n".join(text for text in (instruction, *parts) if text.strip())

    def _history(self) -> Messages:
        """The earlier turns: pairs of a question and its answer, or messages."""
        field = self.find("history")
        if field is None or is_empty(field[1]):
            return []
        name, turns = field
        turns = _parse_list(turns, name, or_text=False)
        if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
            return [read_message(turn, number, name, self.uses) for number, turn in enumerate(turns, 1)]
        if not isinstance(turns, list) or not all(isinstance(t, list) and [*map(type, t)] == [str, str] for t in turns):
            raise BadRow(f"field '{name}' is a JSON {json_type(turns)}, expected pairs of strings, or messages")
        speakers = ("user", "assistant")
        return [{"role": s, "content": c} for turn in turns for s, c in zip(speakers, turn, strict=True)]


def row_flags(row: Mapping[str, Any], uses: FieldUses, format: Format) -> dict[str, str]:
    """The loss flags of a row, with their role, in a format that cannot leave a row untrained.

    Raises:
        BadRow: a flag is false.
    """
    flags = loss_flags(row, "the row", uses)
    if off := [name for name, trained in flags.items() if not trained]:
        raise BadRow(
            f"field {quoted(off[0])} says that the row is not trained on, which format {format} cannot express; remove "
            "the row, or list the field in `metadata`"
        )
    return dict.fromkeys(flags, "loss")


def _parse_list(value: Any, name: str, or_text: bool) -> Any:
    """The list in a JSON string, as tables store one; any other value is returned unchanged.

    Args:
        value: the value of a field.
        name: the field.
        or_text: return the string unchanged too, unless it is a list of messages.

    Raises:
        BadRow: a string that begins like a list is not valid JSON, without `or_text`; one of its objects has a name
            twice.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    parsed = parse(value.encode(), 1)
    if not or_text or isinstance(parsed, RepeatedName):
        if isinstance(parsed, BadRow):
            raise BadRow(f"field '{name}': {parsed}")
        return parsed
    objects = isinstance(parsed, list) and bool(parsed) and all(isinstance(one, dict) for one in parsed)
    messages = objects and all({"role", "content"} <= {*m} or {"from", "value"} <= {*m} for m in parsed)
    return parsed if messages else value


def _number(value: Any) -> float | None:
    """A number, also of a table in which numbers are strings; None for anything else."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
