"""What the fields of foreign rows and messages mean, and what becomes of a field that no role reads.

`MEANINGS` is the only list of field names. A field with a role of the format is read (`row_formats`, `messages`). Every
other field that is not empty is kept beside the document, in `extra`, or its row is rejected with the field's name:

    metadata        kept: it describes the row
    other meanings  kept where nothing in the document depends on it (`Meaning.kept`), otherwise rejected: a question
                    without its images or choices is another question
    unknown         kept if it has at most `MAX_UNKNOWN_CHARACTERS` of text; a longer text may belong to the question.
                    Documents of format `text` are complete without it, so there it is kept in any case

A field that the setting `metadata` names, and one that repeats text of the document, is kept. Null, "", [], {} and
blanks are empty. Numbers carry no text: only a loss flag, a label or an argument of the template means something then.
"""

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

from ingot.core.errors import shortened
from ingot.corpus.readers.files import BadRow

Format = Literal["text", "chat", "pairs", "prompts"]
Place = Literal["text", "chat", "pairs", "prompts", "message"]
"""Where a field is: in a row of a format, or in a message."""
Role = Literal["messages", "system", "prompt", "input", "history", "completion", "reasoning", "chosen", "rejected"]

MAX_UNKNOWN_CHARACTERS = 100
_ROWS: tuple[Place, ...] = ("text", "chat", "pairs", "prompts")


class Meaning(NamedTuple):
    """Fields that mean the same."""

    what: str
    listed: str
    """Lower-case names, separated by blanks. Those of a role are read exactly as written here."""
    kept: tuple[Place, ...] = ("text",)
    """Where a field that is not read is kept."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.listed.split())


MEANINGS: dict[str, Meaning] = {
    "messages": Meaning("a conversation", "messages conversations", ("text", "prompts")),
    "system": Meaning("a system prompt", "system system_prompt system_message"),
    "prompt": Meaning("a prompt", "prompt question instruction"),
    "input": Meaning(
        "the input of a prompt",
        "input context passage document article paragraph background evidence query contexts passages documents "
        "paragraphs knowledge story",
    ),
    "history": Meaning("earlier turns", "history chat_history conversation_history dialogue_history"),
    "completion": Meaning("an answer", "completion response answer output", ("text", "pairs", "prompts")),
    "reasoning": Meaning(
        "reasoning",
        "reasoning_content reasoning thinking think thought thoughts cot chain_of_thought rationale scratchpad "
        "inner_monologue",
        ("text", "prompts"),
    ),
    "chosen": Meaning("a better answer", "chosen", ("text", "prompts")),
    "rejected": Meaning("a worse answer", "rejected", ("text", "chat", "prompts")),
    "loss": Meaning(
        "a loss flag",
        "train loss weight trainable trained training learn learnable supervised train_on loss_mask loss_weight "
        "loss_scale",
        (),
    ),
    "mask": Meaning("a mask", "mask masking label_mask train_detail training_detail", ()),
    "exclusion": Meaning("a flag that excludes it", "masked ignore ignored skip skipped exclude excluded", ()),
    "tools": Meaning(
        "tools or their calls",
        "tools functions tool_calls function_call tool_call_id tool_choice tool_results plugins",
    ),
    "media": Meaning(
        "images, audio or video", "image audio video picture photo pixel_values speech media attachments", ()
    ),
    "choices": Meaning(
        "the choices of a question",
        "choices options candidates alternatives distractors endings opa opb opc opd a b c d e",
    ),
    "part": Meaning(
        "a part of the prompt",
        "text content value body prefix suffix hint example demonstration schema table fact premise hypothesis "
        "sentence constraint requirement persona doc chunk snippet excerpt starter_code grounding",
    ),
    "template": Meaning("an argument of the chat template", "chat_template_kwargs template_kwargs enable_thinking"),
    "label": Meaning("a label", "label preference preferred winner better", ("text", "prompts")),
    "speaker": Meaning("a speaker or addressee", "name speaker recipient channel", _ROWS),
    "reference": Meaning(
        "what an answer is checked with",
        "ground_truth reference reference_answer solution target tests test_cases test_list reward_model "
        "verification_info canonical_solution expected_output entry_point rubric",
        _ROWS,
    ),
    "metadata": Meaning(
        "metadata",
        "attention_mask id ids uuid idx index row url uri link source src origin license licence lang language "
        "locale date time timestamp created updated added at year version type kind category categories topic "
        "subject tag domain task dataset split subset config model generator provider author title header signature "
        "extra_info language_code lang_code country_code finish_reason stop_reason count length len tokens size hash "
        "md5 sha checksum file filename path repo repository commit dump score rating quality "
        "difficulty level grade confidence probability perplexity toxicity meta metadata attributes status",
        (*_ROWS, "message"),
    ),
}
"""Meaning -> names, in the order in which they are looked up."""
NAMES: dict[Role, tuple[str, ...]] = {role: MEANINGS[role].names for role in get_args(Role)}
"""Role -> known field names."""
ROLES: dict[Format, tuple[Role, ...]] = {
    "text": (),
    "chat": ("messages", "system", "prompt", "input", "history", "completion", "reasoning"),
    "pairs": ("prompt", "input", "history", "system", "chosen", "rejected"),
    "prompts": ("prompt", "messages", "input", "history", "system"),
}
"""Format -> roles that its rows can have."""

_INDEX = {name: meaning for meaning, entry in reversed(MEANINGS.items()) for name in entry.names}
_LOCATIONS = frozenset({"url", "uri", "link", "file", "filename", "path"})
"""Metadata of a text, but a reference to the content of an image."""
_NUMBERS_MEAN = frozenset({"loss", "mask", "exclusion", "label", "template"})


@functools.lru_cache(maxsize=4096)
def meaning(name: str) -> str | None:
    """The key of `MEANINGS` for a field's name, or None: by the complete name, then by its last word.

    `toolCalls` is `tool_calls`, `option_a` and `choice2` are choices, `supporting_context` is an input, `prompt_id` is
    metadata. Images, reasoning and tools count anywhere in the name, except before metadata such as `image_id`.
    """
    words = [*words_of(name)]
    if found := _lookup("_".join(words)):
        return found
    while len(words) > 1 and (words[-1].isdigit() or len(words[-1]) == 1):
        words.pop()
    if not words:
        return None
    found = _lookup("_".join(words)) or _lookup(words[-1])
    within = {_lookup(word) for word in words}
    if "media" in within and (found != "metadata" or words[-1] in _LOCATIONS):
        return "media"
    strong = next((strong for strong in ("reasoning", "tools") if strong in within), None)
    return strong if strong and found in (None, "part") else found


@functools.lru_cache(maxsize=4096)
def words_of(name: str) -> tuple[str, ...]:
    """`toolCalls_2` as `tool`, `calls`, `2`."""
    return (*re.findall(r"[a-z]+|\d+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()),)


def _lookup(name: str) -> str | None:
    """The meaning of a name in the singular or plural."""
    return _INDEX.get(name) or _INDEX.get(name + "s") or _INDEX.get(name.removesuffix("s"))


def is_empty(value: Any) -> bool:
    """Whether the value holds nothing; tables write an empty list as a string."""
    if isinstance(value, dict | list | tuple):
        return all(is_empty(leaf) for leaf in _leaves(value))
    return value is None or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null"))


def has_text(value: Any) -> bool:
    """Whether the value holds a text that is no number."""
    return any(isinstance(leaf, str) and not is_empty(leaf) and not _is_number(leaf) for leaf in _leaves(value))


def described(names: Mapping[str, Any]) -> str:
    """The field names of a row for an error message; a null is named, because it looks like a missing field."""
    shown = (f"{quoted(name)} with the value null" if value is None else quoted(name) for name, value in names.items())
    return ", ".join(shown) or "none"


def quoted(name: str) -> str:
    """A field's name in an error message."""
    return f"'{shortened(str(name))}'"


class FieldUses:
    """What becomes of the fields of one row.

    Args:
        metadata: names that the setting `metadata` lists.
    """

    def __init__(self, metadata: Collection[str] = ()):
        self.metadata = metadata
        self.by_name: dict[str, str] = {}
        """Field -> its role, `metadata`, or `kept` for a field whose use is not known."""
        self.texts: list[str] = []
        """Texts of the row that are in the document."""
        self._extra: dict[str, Any] = {}

    def keep_rest(
        self,
        table: Mapping[str, Any],
        used: Mapping[str, str],
        place: Place,
        replaced: Collection[str] = (),
        where: str = "",
    ) -> None:
        """Keep every field of a row or message that is not read in `extra`.

        Args:
            table: the row or message.
            used: the fields that are read, each with its role.
            place: where the fields are.
            replaced: names whose role the setting `fields` gives to another field.
            where: the position of a message in its row, such as `messages[2]`.

        Raises:
            BadRow: a field that carries meaning is neither read nor metadata.
        """
        prefix = f"{where}." if where else ""
        path = re.sub(r"\[\d+\]", "[]", prefix)
        lost: dict[str, str] = {}
        self.by_name |= {path + name: role for name, role in used.items()}
        for name, value in table.items():
            if name in used:
                continue
            empty = is_empty(value)
            if not empty:
                known = name in self.metadata or name in replaced
                try:
                    self.by_name[path + name] = "metadata" if known else self._use_of(name, value, place, where)
                except BadRow as error:
                    lost[name] = str(error)
            if not empty or (value is not None and not where):  # a message in a table has a null for each missing field
                self._extra[prefix + name] = value
        if lost:
            (_, reason), *others = lost.items()
            raise BadRow(reason + (f"; likewise {', '.join(quoted(name) for name, _ in others)}" if others else ""))

    def _use_of(self, name: str, value: Any, place: Place, where: str) -> str:
        means = meaning(name)
        if means is None and isinstance(value, bool) and "loss" in map(_lookup, words_of(name)):  # `train_on_turn`
            means = "loss"
        if means == "metadata":
            return "metadata"
        is_included = means == "exclusion" and str(value).lower() in ("false", "0")
        if is_included or (means and place in MEANINGS[means].kept):
            return "kept"
        texts = [leaf for leaf in _leaves(value) if isinstance(leaf, str | bytes)]
        length = sum(len(text) for text in texts if means == "tools" or not _is_number(text))  # an id may be a number
        if length == 0 and means not in _NUMBERS_MEAN:
            return "kept"
        if means is None and (place == "text" or length <= MAX_UNKNOWN_CHARACTERS):
            return "kept"
        if self._repeats(value) or (means in (None, "part") and self._renders(value)):
            return "metadata"
        field = f"field {quoted(name)}" + (f" of {where}" if where else "")
        if means is None:
            raise BadRow(
                f"{field} has more than {MAX_UNKNOWN_CHARACTERS} characters of text and no known role; name its role "
                "(fields = { input = ... }), or list it in `metadata` to leave it out of the text"
            )
        raise BadRow(
            f"{field} is {MEANINGS[means].what}, which would be lost here; write it into the text, or list it in "
            "`metadata` to leave it out"
        )

    def _repeats(self, value: Any) -> bool:
        """Whether the value is a text of the document, or consists of such texts and roles."""
        texts = {text.strip() for text in self.texts} - {""}
        roles = () if isinstance(value, str) else ("system", "user", "assistant", "tool", "human", "gpt")
        leaves = [leaf for leaf in _leaves(value) if not is_empty(leaf)]
        return all(isinstance(leaf, str) and (leaf.strip() in texts or leaf in roles) for leaf in leaves)

    def _renders(self, value: Any) -> bool:
        """Whether the value is the document written as one text, each of its texts on a line or between tags."""
        texts = {text.strip() for text in self.texts} - {""}
        if not isinstance(value, str) or not texts:
            return False
        return all(re.search(rf"(?:\A|[\n>\]:])\s*{re.escape(text)}\s*(?:\Z|[\n<\[])", value) for text in texts)

    def extra(self) -> str | None:
        """The kept fields as JSON, sorted by name; None if there are none."""
        try:
            return _ENCODER.encode(self._extra) if self._extra else None
        except RecursionError:
            raise BadRow("found a field that is nested too deeply") from None


def _leaves(value: Any) -> Iterator[Any]:
    """All values in nested lists and objects; iterative, because JSON may be nested deeper than Python's stack."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
        else:
            yield value


def _is_number(text: str | bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return isinstance(text, str)


def _plain(value: Any) -> str:
    """A value that JSON has no type for; of bytes (an image, say) only their number."""
    return f"{len(value):,} bytes" if isinstance(value, bytes) else str(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, default=_plain)
