"""Settings of a `corpus` stage, and the named sets of quality bounds.

A bound is a setting and a named set is a value of it, because what counts as quality differs by kind of text: prose
bounds throw away most source code (long "words", many signs), and a short-document bound throws away most chat.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from ingot.core.errors import UserError, nearest
from ingot.core.settings import EXECUTION, Settings
from ingot.corpus.readers.row_formats import NAMES, ROLES, Format, Role

STDLIB = "python:stdlib"
DOCS = "python:docs"


class QualityBounds(Settings):
    """What a document must satisfy to be kept; the defaults are those for prose. Bounds are inclusive."""

    min_words: int = Field(default=128, ge=0)
    """Fewest words; a character of a script written without spaces counts as a word."""
    max_words: int = Field(default=4096, ge=1)
    """Most words."""
    min_mean_word_length: float = Field(default=3.0, ge=0)
    """Smallest mean number of characters of a word; not asked of scripts without spaces."""
    max_mean_word_length: float = Field(default=10.0, ge=0)
    """Largest mean number of characters of a word; not asked of scripts without spaces."""
    max_special_share: float = Field(default=0.3, ge=0, le=1)
    """Largest share of characters that are neither letters, marks, digits nor white space."""
    min_unique_share: float = Field(default=0.2, ge=0, le=1)
    """Smallest share of distinct words (of distinct character pairs in scripts without spaces)."""


TEXT = QualityBounds()
CODE = QualityBounds(
    min_words=32,
    max_words=1_000_000,
    min_mean_word_length=2.0,
    max_mean_word_length=20.0,
    max_special_share=0.45,
    min_unique_share=0.05,
)
"""For source files: a module has no upper length, `self.assertEqual(a,b)` is one word, and identifiers repeat."""

QUALITY: dict[str, QualityBounds | None] = {"text": TEXT, "code": CODE, "none": None}


def _known_set(value: Any) -> Any:
    if isinstance(value, str) and value not in QUALITY:
        raise UserError(f"found '{value}', expected a named set or a table of bounds; {nearest(value, QUALITY)}")
    return value


def _quality_form(value: Any) -> str:
    """Which member of the union is meant, so that a wrong bound is reported once and not once per member."""
    return "Name" if isinstance(value, str) else "QualityBounds"


Quality = Annotated[
    Annotated[Literal["text", "code", "none"], Tag("Name")] | Annotated[QualityBounds, Tag("QualityBounds")],
    Discriminator(_quality_form),
    BeforeValidator(_known_set),
]


class Fields(Settings):
    """Names that the data use for what a row holds, where `shapes` does not know them."""

    messages: str | None = None
    """The conversation of `chat` or `prompts`; else `messages` or `conversations`."""
    prompt: str | None = None
    """What is asked; else `prompt`, `question`, or `instruction` (with `input`)."""
    completion: str | None = None
    """The answer of `chat`; else `completion`, `response`, `answer` or `output`."""
    system: str | None = None
    """A system text; else `system` or `system_prompt`."""
    chosen: str | None = None
    """The better answer of `pairs`; else `chosen`."""
    rejected: str | None = None
    """The worse answer of `pairs`; else `rejected`."""

    def given(self) -> dict[Role, str]:
        """What was set."""
        return {role: name for role in NAMES if (name := getattr(self, role)) is not None}


class Source(Settings):
    """Where documents come from. In a recipe, a plain string is `{ path = string }`."""

    path: str = Field(min_length=1)
    """A file, a directory, a glob, `python:stdlib`, `python:docs`, or `https://...` (with its sha256)."""
    repeat: int = Field(default=1, ge=1)
    """How often each training document of this source is written; held-out documents are always written once."""
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the one file that `path` names, in hex; required for `https://`, checked wherever it is given."""
    field: str | None = None
    """The field or column to read in this source, where it differs from the stage's `field`."""
    fields: Fields | None = None
    """Names in this source, where they differ from the stage's `fields`."""


def _as_source(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


class DedupSettings(Settings):
    """How duplicates are removed."""

    exact: bool = True
    """Drop every document whose text equals an earlier one's, differences in white space aside."""


class HoldoutSettings(Settings):
    """Which documents are kept for validation and never seen by a tokenizer or a model in training."""

    share: float = Field(default=0.05, ge=0, lt=1)
    """Expected share of documents (`document`), of groups (`group`), or exact share of characters (`tail`)."""
    by: Literal["document", "tail", "group"] = "document"
    """`document`: by hash of the text; `group`: whole files or modules, by hash of the name; `tail`: the last text."""


class CorpusSettings(Settings):
    """A `corpus` stage: sources in, clean documents with identities out."""

    sources: Annotated[
        list[Annotated[Source, BeforeValidator(_as_source)]], BeforeValidator(_as_list), Field(min_length=1)
    ]
    """What is read, in this order; the first of two equal documents is the one that stays."""
    format: Format = "text"
    """`text`: a string; `chat`: a conversation; `pairs`: a prompt and two answers; `prompts`: a prompt to answer."""
    field: str | None = None
    """`text`: the field or column that holds the document, `text` unless given. `chat`: short for fields.messages."""
    fields: Fields = Fields()
    """Names of the fields of a row, for formats other than `text`."""
    trim_lines: bool = False
    """Also remove blanks at the ends of lines; off, because Markdown and text in code can mean them."""
    pii: bool
    """Replace e-mail addresses, phone numbers, social security numbers and IP addresses; on for text."""
    quality: Quality
    """A named set of bounds (`text`, `code`, `none`) or a table of them; `none` unless the format is `text`."""
    dedup: DedupSettings = DedupSettings()
    """How duplicates are removed."""
    holdout: HoldoutSettings = HoldoutSettings()
    """Which documents are kept for validation; decided after deduplication."""
    filters: list[str] = Field(default_factory=list)
    """More filters, in order: names of `ingot.corpus.filters.FILTERS`, or `file.py:function`."""
    workers: Annotated[int, EXECUTION] = Field(default=2, ge=1)
    """Threads that clean and judge batches; the result does not depend on it."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_format(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        text = table.get("format", "text") == "text"
        defaults = {"pii": text, "quality": "text" if text else "none"} | ({"field": "text"} if text else {})
        return {**defaults, **table}

    @model_validator(mode="after")
    def _fits_format(self) -> "CorpusSettings":
        if self.format != "text" and self.quality != "none":
            raise UserError(f'quality: found bounds for {self.format}, but they judge running text; set "none"')
        if self.format in ("pairs", "prompts") and any(s.field for s in (self, *self.sources)):
            raise UserError(f"field: means nothing to format {self.format}; name what a row holds with `fields`")
        repeats: dict[str, int] = {}
        for source in self.sources:
            if repeats.setdefault(source.path, source.repeat) != source.repeat:
                raise UserError(
                    f"sources: '{source.path}' is named twice with repeat = {repeats[source.path]} and "
                    f"{source.repeat}, expected the same: rows are repeated by the file they came from"
                )
        roles = ROLES[self.format]
        for fields in (self.fields, *(s.fields for s in self.sources if s.fields)):
            for role in fields.given():
                if role not in roles:
                    known = f"known: {', '.join(roles)}" if roles else "use `field`"
                    raise UserError(f"fields.{role}: means nothing to format {self.format}; {known}")
        return self

    def names(self, source: Source) -> tuple[str | None, dict[Role, str]]:
        """The field of a text, and the names of roles, as they hold for one source."""
        field, fields = source.field or self.field, self.fields.given()
        if self.format == "chat" and field:
            fields["messages"] = field
        return field, fields | (source.fields or Fields()).given()

    @property
    def bounds(self) -> QualityBounds | None:
        """The quality bounds in force; None when nothing is judged."""
        return QUALITY[self.quality] if isinstance(self.quality, str) else self.quality
