"""Settings of a `corpus` stage, and the named sets of quality bounds.

Quality bounds are settings because they depend on the kind of text: bounds for prose drop most source code (long
"words", many special characters), and a minimum length drops most chats.
"""

import codecs
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from ingot.core.errors import UserError, nearest
from ingot.core.settings import EXECUTION, Settings
from ingot.corpus.readers.content import Kind
from ingot.corpus.readers.fields import ROLES, Format, Role
from ingot.corpus.readers.web import Html

STDLIB = "python:stdlib"
DOCS = "python:docs"


class QualityBounds(Settings):
    """Inclusive bounds on the documents to keep. The defaults suit prose."""

    RENAMED: ClassVar = {"max_special_share": "max_special_fraction", "min_unique_share": "min_unique_fraction"}

    min_words: int = Field(default=128, ge=0)
    """Minimum number of words; in scripts without spaces each character counts as a word."""
    max_words: int = Field(default=4096, ge=1)
    """Maximum number of words."""
    min_mean_word_length: float = Field(default=3.0, ge=0)
    """Minimum mean number of characters per word; ignored in scripts without spaces."""
    max_mean_word_length: float = Field(default=10.0, ge=0)
    """Maximum mean number of characters per word; ignored in scripts without spaces."""
    max_special_fraction: float = Field(default=0.3, ge=0, le=1)
    """Maximum fraction of characters that are neither letters, marks, digits nor white space."""
    min_unique_fraction: float = Field(default=0.2, ge=0, le=1)
    """Minimum fraction of distinct words (of distinct character pairs in scripts without spaces)."""


TEXT = QualityBounds()
CODE = QualityBounds(
    min_words=32,
    max_words=1_000_000,
    min_mean_word_length=2.0,
    max_mean_word_length=20.0,
    max_special_fraction=0.45,
    min_unique_fraction=0.05,
)
"""For source files: modules can be long, `self.assertEqual(a,b)` counts as one word, and identifiers repeat."""

QUALITY: dict[str, QualityBounds | None] = {"text": TEXT, "code": CODE, "none": None}


def _known_set(value: Any) -> Any:
    if isinstance(value, str) and value not in QUALITY:
        raise UserError(f"found '{value}', expected a named set or a table of bounds; {nearest(value, QUALITY)}")
    return value


def _quality_form(value: Any) -> str:
    """Select the member of the union by type, so that an invalid bound is reported once and not once per member."""
    return "Name" if isinstance(value, str) else "QualityBounds"


Quality = Annotated[
    Annotated[Literal["text", "code", "none"], Tag("Name")] | Annotated[QualityBounds, Tag("QualityBounds")],
    Discriminator(_quality_form),
    BeforeValidator(_known_set),
]


class Fields(Settings):
    """Field names of the data, where they differ from the known ones of `row_formats`."""

    messages: str | None = None
    """The conversation of `chat` or `prompts`. Default: `messages` or `conversations`."""
    prompt: str | None = None
    """The prompt. Default: `prompt`, `question` or `instruction`."""
    input: str | None = None
    """What stands below the prompt. Default: `input`, `context`, `passage`, `document` and others."""
    history: str | None = None
    """Earlier turns before the prompt. Default: `history` and others."""
    completion: str | None = None
    """The answer of `chat`. Default: `completion`, `response`, `answer` or `output`."""
    reasoning: str | None = None
    """The reasoning of a completion. Default: `reasoning_content`, `reasoning`, `thinking` and others."""
    system: str | None = None
    """The system prompt. Default: `system`, `system_prompt` or `system_message`."""
    chosen: str | None = None
    """The better answer of `pairs`. Default: `chosen`."""
    rejected: str | None = None
    """The worse answer of `pairs`. Default: `rejected`."""

    def given(self) -> dict[Role, str]:
        """The names that are set, by role."""
        return {role: name for role in get_args(Role) if (name := getattr(self, role)) is not None}


def _known_encoding(name: str) -> str:
    """The codec's own name. Raises UserError for one that is unknown, or does not decode text."""
    try:
        return codecs.lookup(name).name if isinstance(codecs.decode(b"", name), str) else ""
    except (LookupError, ValueError):
        raise UserError(
            f"found '{name}', expected an encoding that Python knows, such as 'cp1252', 'koi8-r', 'shift_jis' or "
            "'gb18030'"
        ) from None


class Source(Settings):
    """A source of documents. In a recipe, a plain string means `{ path = string }`."""

    path: str = Field(min_length=1)
    """A file, a directory, a glob, `python:stdlib`, `python:docs`, or `https://...` (with its sha256)."""
    repeat: int = Field(default=1, ge=1)
    """How often each training document of this source is written; held-out documents are always written once."""
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the single file at `path`, in hex. Required for `https://`; checked if given."""
    field: str | None = None
    """Field or column of this source with the text, if it differs from the stage's `field`."""
    fields: Fields | None = None
    """Field names of this source that differ from the stage's `fields`."""
    kind: Kind | None = None
    """How its files are read: `text`, `jsonl`, `json`, `csv`, `tsv`, `parquet`, `html` or `warc`."""
    encoding: Annotated[str, AfterValidator(_known_encoding)] | None = None
    """The encoding of its files, such as `cp1252`. Default: UTF-8, or what a byte order mark says."""
    follow_links: bool = False
    """Also read what links inside a directory (or below a glob) lead to outside of it."""


def _as_source(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


class MinHashSettings(Settings):
    """Near-duplicates, by runs of five words (`corpus/near_duplicates.py`)."""

    threshold: float = Field(default=0.65, gt=0, le=1)
    """Smallest similarity (common runs of words / all runs of both) of near-duplicates, as estimated."""
    bands: int = Field(default=25, ge=1)
    """Bands of a signature; documents that agree in one are compared. More find pairs of less similarity."""
    rows: int = Field(default=5, ge=1)
    """Hash functions of a band; more let fewer pairs agree in one."""
    keep: Literal["first", "longest"] = "first"
    """Which document of a cluster is kept."""


class DedupSettings(Settings):
    """Deduplication."""

    exact: bool = True
    """Drop each document whose text equals an earlier one up to white space."""
    minhash: MinHashSettings | None = None
    """Drop documents that share most of their text with another one; `{}` for the defaults. Default: they are kept."""


class HoldoutSettings(Settings):
    """The documents held out for validation. No tokenizer or model is trained on them."""

    RENAMED: ClassVar = {"share": "fraction"}

    fraction: float = Field(default=0.05, ge=0, lt=1)
    """Expected fraction of documents (`document`) or groups (`group`), or exact fraction of characters (`tail`)."""
    by: Literal["document", "tail", "group"] = "document"
    """`document`: by hash of the text; `group`: by hash of the file's name; `tail`: the last characters."""


class CorpusSettings(Settings):
    """A `corpus` stage: reads sources and writes clean, deduplicated documents."""

    sources: Annotated[
        list[Annotated[Source, BeforeValidator(_as_source)]], BeforeValidator(_as_list), Field(min_length=1)
    ]
    """Sources in reading order. Of duplicate documents the first one read is kept."""
    format: Format = "text"
    """`text`: a string; `chat`: a conversation; `pairs`: a prompt and two answers; `prompts`: a prompt to answer."""
    field: str | None = None
    """`text`: the field or column with the document, by default `text`. `chat`: short for fields.messages."""
    fields: Fields = Fields()
    """Names of the fields of a row, for formats other than `text`."""
    metadata: list[str] = Field(default_factory=list)
    """Fields of rows and messages that are kept beside the document and not read, whatever their names mean."""
    max_document_mb: float = Field(default=16, gt=0)
    """Maximum size of a row, in MB; a longer one is quarantined, and a longer text file is cut at ends of lines."""
    train_on: Literal["all answers", "last answer"] = "all answers"
    """`chat`: the assistant's messages to train on, without those that the data exclude (`train`: false)."""
    reasoning: Literal["keep", "drop"] = "keep"
    """Formats with messages: keep the reasoning of answers, or drop it, and what stands before `</think>` in them."""
    trim_lines: bool = False
    """Also remove blanks at the end of each line. Off by default because Markdown and strings in code may need them."""
    html: Html = "main"
    """Pages of the web: their `main` content, or all of their text (`plain`). Needs the extra `corpus`."""
    pii: bool
    """Mask e-mail addresses, phone numbers, social security numbers and IP addresses. Default: on for `text` only."""
    quality: Quality
    """A named set of bounds (`text`, `code`, `none`) or a table of bounds. Default: `text`; other formats: `none`."""
    dedup: DedupSettings = DedupSettings()
    """Deduplication."""
    holdout: HoldoutSettings = HoldoutSettings()
    """The documents held out for validation, chosen after deduplication."""
    languages: list[str] = Field(default_factory=list)
    """Codes of the languages to keep, such as "en". Default: languages are not told apart. Needs the extra `corpus`."""
    decontaminate: list[str] = Field(default_factory=list)
    """Files of evaluations (rows or text); documents that contain one of their items are dropped."""
    filters: list[str] = Field(default_factory=list)
    """More filters, in order: names of `ingot.corpus.filters.FILTERS`, or `file.py:function`."""
    workers: Annotated[int, EXECUTION] = Field(default=2, ge=1)
    """Threads that clean and filter batches; the result does not depend on it."""

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
            raise UserError(f'quality: found bounds for format {self.format}, expected format text; set "none"')
        if self.format != "chat" and self.train_on != "all answers":
            raise UserError(f"train_on: not used by format {self.format}; remove it")
        if self.format == "text" and self.reasoning != "keep":
            raise UserError("reasoning: not used by format text; remove it")
        if self.format in ("pairs", "prompts") and any(s.field for s in (self, *self.sources)):
            raise UserError(f"field: not used by format {self.format}; name the fields of a row with `fields`")
        repeats: dict[str, int] = {}
        for source in self.sources:
            if repeats.setdefault(source.path, source.repeat) != source.repeat:
                raise UserError(
                    f"sources: '{source.path}' is named twice with repeat = {repeats[source.path]} and "
                    f"{source.repeat}, expected the same number; set one `repeat` per path"
                )
        roles = ROLES[self.format]
        for fields in (self.fields, *(s.fields for s in self.sources if s.fields)):
            for role in fields.given():
                if role not in roles:
                    known = f"known: {', '.join(roles)}" if roles else "use `field`"
                    raise UserError(f"fields.{role}: not used by format {self.format}; {known}")
        return self

    @property
    def max_bytes(self) -> int:
        """`max_document_mb` in bytes."""
        return max(1, round(self.max_document_mb * 1e6))

    def names(self, source: Source) -> tuple[str | None, dict[Role, str]]:
        """The text field and the names by role for one source: its own settings override the stage's."""
        field, fields = source.field or self.field, self.fields.given()
        if self.format == "chat" and field:
            fields["messages"] = field
        return field, fields | (source.fields or Fields()).given()

    @property
    def bounds(self) -> QualityBounds | None:
        """The quality bounds; None for quality = "none"."""
        return QUALITY[self.quality] if isinstance(self.quality, str) else self.quality
