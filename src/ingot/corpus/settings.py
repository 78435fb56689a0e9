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


Runner = Literal["local", "daft", "ray"]


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
    """A file, a directory, a glob, `python:stdlib`, `python:docs`, or `https://`, `hf://datasets/` or `s3://`."""
    repeat: int = Field(default=1, ge=1)
    """How often each training document of this source is written; held-out documents are always written once."""
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the single file at `path`, in hex. Required for `https://`; checked if given."""
    checksums: Annotated[str | None, EXECUTION] = None
    """For `hf://` and `s3://`: a file of SHA-256 sums as `sha256sum` writes them, which the first run writes."""
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

    @model_validator(mode="after")
    def _checksums_fit_path(self) -> "Source":
        if self.checksums and (self.sha256 or not self.path.startswith(("hf://", "s3://"))):
            raise UserError(
                f"checksums: found '{self.checksums}' for '{self.path}', expected it for hf:// or s3:// without a "
                "sha256; remove one"
            )
        return self


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
    keep: Literal["first", "longest", "best"] = "first"
    """Which document of a cluster is kept; of equal ones the first."""
    by: str | None = None
    """`keep = "best"`: the number that decides: a measure of a rule of this corpus, such as
    "quality.unique_word_fraction"; "language_score"; or "metadata.NAME", a field of the row."""
    prefer: Literal["high", "low"] = "high"
    """`keep = "best"`: whether a high or a low value is better."""

    @model_validator(mode="after")
    def _best_by_a_measure(self) -> "MinHashSettings":
        if self.keep == "best" and self.by is None:
            raise UserError('found keep = "best" without by, expected the measure that decides; name one with `by`')
        if self.keep != "best" and (self.by is not None or self.prefer != "high"):
            raise UserError(f'found by or prefer beside keep = "{self.keep}", expected keep = "best"; remove them')
        return self


class LineSettings(Settings):
    """Lines that many documents share (`corpus/repeated.py`)."""

    documents: int = Field(default=10, ge=1)
    """A line that occurs in more documents is removed from all of them."""
    min_characters: int = Field(default=20, ge=1)
    """A shorter line stays: a closing bracket is no boilerplate."""


class OverlapSettings(Settings):
    """Copies by runs of words (`corpus/repeated.py`)."""

    words: int = Field(default=13, ge=2)
    """Words of a run."""
    fraction: float = Field(default=0.5, gt=0, le=1)
    """A document is dropped if this fraction of its runs occurred in documents that are kept before it."""


class DedupSettings(Settings):
    """Deduplication."""

    exact: bool = True
    """Drop each document whose text equals an earlier one up to white space."""
    minhash: MinHashSettings | None = None
    """Drop documents that share most of their text with another one; `{}` for the defaults. Default: they are kept."""
    overlap: OverlapSettings | None = None
    """Drop documents whose runs of 13 words occurred before; `{}` for the defaults. Default: they are kept."""
    lines: LineSettings | None = None
    """Remove lines that many documents share, after duplicates are gone; `text` only. Default: they stay."""


class CheckSettings(Settings):
    """Checks of the finished corpus, which it does not depend on."""

    plant: int = Field(default=0, ge=0)
    """Damaged documents of each kind that are planted in a copy of the corpus, to measure what the recipe removes of
    them (`corpus/planted.py`); `text` only. 0: none."""


class WordList(Settings):
    """A list of words that a document may have few of (`corpus/word_lists.py`)."""

    path: str | None = None
    """File with a word or phrase on each line; default: the list of ours of that name."""
    max_per_thousand: float = Field(default=10.0, ge=0)
    """Most hits per 1,000 words."""
    min_hits: int = Field(default=2, ge=1)
    """Fewer hits never drop a document."""
    languages: list[str] = Field(default_factory=list)
    """Languages that the list is for; default: "en" for lists of ours, else all. Of a corpus without the setting
    `languages` all documents are searched."""

    @model_validator(mode="before")
    @classmethod
    def _ours_is_for_english(cls, table: Any) -> Any:
        if isinstance(table, dict) and table.get("path") is None:
            return {"languages": ["en"], **table}
        return table


class HoldoutSettings(Settings):
    """The documents held out for validation. No tokenizer or model is trained on them."""

    RENAMED: ClassVar = {"share": "fraction"}

    fraction: float = Field(default=0.05, ge=0, lt=1)
    """Expected fraction of documents or groups, or exact fraction of characters (`characters`, `tail`)."""
    by: Literal["document", "characters", "group", "tail"] = "document"
    """By hash of the text (`document`; `characters`: as many as hold the fraction) or file name; or the `tail`."""


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
    """Pages of the web: their `main` content, as resiliparse or (slower) `trafilatura` finds it, or all of their text
    (`plain`). Needs the extra `corpus`."""
    repair_unicode: bool = False
    """Repair lines that were decoded wrongly (`cafÃ©`), where that can be undone; not in code. Needs the extra
    `corpus`."""
    boilerplate: Literal["keep", "drop"] = "keep"
    """Drop lines that are cookie notices, menus, buttons or footers (`corpus/repair.py`); not in code."""
    pii: bool
    """Mask e-mail addresses, phone numbers, social security numbers and IP addresses. Default: on for `text` only."""
    pii_audit: int = Field(default=0, ge=0)
    """Masked places of each kind that are stored with 40 characters around them, as read: personal data. Format `text`
    only."""
    quality: Quality
    """A named set of bounds (`text`, `code`, `none`) or a table of bounds. Default: `text`; other formats: `none`."""
    without: list[str] = Field(default_factory=list)
    """Documents to leave out with all copies of their text: PATH#OFFSET as `ingot trace` shows them, or PATH for all of
    a file. `ingot without` writes it."""
    dedup: DedupSettings = DedupSettings()
    """Deduplication."""
    holdout: HoldoutSettings = HoldoutSettings()
    """The documents held out for validation, chosen after deduplication."""
    languages: list[str] = Field(default_factory=list)
    """Codes of the languages to keep, such as "en". Default: languages are not told apart. Needs the extra `corpus`."""
    decontaminate: list[str] | None = None
    """Files of evaluations (rows or text); documents that contain one of their items are dropped. Default: the task
    files that the recipe evaluates, for `text` only."""
    overlap_with: Annotated[list[str] | None, EXECUTION] = None
    """Other formats than `text`: files of evaluations whose items the report of instructions counts; no document is
    dropped. Default: the task files that the recipe evaluates."""
    check: CheckSettings = CheckSettings()
    """Checks of the finished corpus, such as { plant = 200 }."""
    words: dict[str, WordList] = Field(default_factory=dict)
    """Lists of words, such as { toxicity = {}, rivals = { path = "rivals.txt" } }; ours are `toxicity`, `spam` and
    `adult`. A document with many of a list's words is dropped."""
    filters: list[str] = Field(default_factory=list)
    """More filters, in order: names of `ingot.corpus.filters.FILTERS`, or `file.py:function`."""
    runner: Annotated[Runner, EXECUTION] = "local"
    """Who reads, cleans and filters: processes of this machine, `daft`, or `ray` (a cluster). Same result."""
    workers: Annotated[Annotated[int, Field(ge=1)] | None, EXECUTION] = None
    """Processes that read, clean and filter; None: all usable cores. The result does not depend on it."""

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
        if self.format != "text" and self.check.plant:
            raise UserError(
                f"check.plant: found {self.check.plant} for format {self.format}, expected format text; set 0"
            )
        if self.pii_audit and (self.format != "text" or not self.pii):
            raise UserError(f"pii_audit: found {self.pii_audit}, expected format text and pii = true beside it; set 0")
        if self.format == "text" and self.overlap_with:
            raise UserError(
                "overlap_with: not used by format text; name the files in decontaminate, which drops documents"
            )
        if self.format != "text" and self.dedup.lines:
            raise UserError(f"dedup.lines: found it for format {self.format}, expected format text; leave it out")
        if self.format != "chat" and self.train_on != "all answers":
            raise UserError(f"train_on: not used by format {self.format}; remove it")
        if self.format == "text" and self.reasoning != "keep":
            raise UserError("reasoning: not used by format text; remove it")
        if self.format in ("pairs", "prompts") and any(s.field for s in (self, *self.sources)):
            raise UserError(f"field: not used by format {self.format}; name the fields of a row with `fields`")
        for name, words in self.words.items():
            if self.languages and words.languages and not set(words.languages) & set(self.languages):
                raise UserError(
                    f"words.{name}: found languages = {words.languages}, expected some of {self.languages}, which the "
                    "corpus keeps; name a list for these, or remove it"
                )
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
