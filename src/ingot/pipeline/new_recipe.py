"""`ingot init --text/--chat/--pairs/--model`: a recipe for the user's own files, sized for them and for this machine.

The files are read with the readers of a corpus stage, so the format and the fields that are written fit them. The size
of the model and the length of training follow from the amount of text and from the time that a first run may take.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from ingot.core.errors import UserError, print_message
from ingot.core.events import duration, size
from ingot.core.recipe import RunSettings, name_problem
from ingot.corpus.readers.row_formats import Format
from ingot.corpus.settings import CorpusSettings, Source
from ingot.corpus.survey import Survey, survey, text_field
from ingot.model.adapter_config import AdapterSettings, low_rank_parameters
from ingot.model.config import ModelSettings
from ingot.pipeline.timed import HELD_OUT_BYTES, WEIGHT_DECAY, Timed, timed, timed_comments, timed_vocab, weight_decay
from ingot.plan.flops import training_flops_per_token
from ingot.plan.machine import Device, measured_flops
from ingot.stages.models.imports import HF, directory_of, is_directory, model_files, read_model_config
from ingot.stages.training.forecast import UTILISATION
from ingot.tokenizer.files import has_template
from ingot.tokenizer.settings import MIN_VOCAB

SIZES = ((1e6, 1024, 2), (30e6, 4096, 3), (300e6, 8192, 4), (3e9, 16384, 6), (math.inf, 32768, 8))
"""(bytes of text up to which the row counts, vocabulary, depth): a larger model than this learns a text by heart."""
GPU_DEPTH = 2
"""Factor of the depth on a GPU, for texts of more than `SIZES[0]`."""
SMALLEST, TRAINED_WORDS = MIN_VOCAB["byte-bpe"][0], 0.8
"""A text gives at least a token for each distinct word, beside the smallest vocabulary; some are only held out."""
BF16_SPEED = 3.0
"""Speed of training in bf16, on a CPU with instructions for it, to `UTILISATION` of its fp32 products' rate. On two
cores it was 5.2 with 2.9M parameters and 1.7 with 0.7M."""
MINUTES = {"CPU": 10.0, "GPU": 60.0}
"""Longest training of a first run."""
BYTES_PER_TOKEN = 3.0
"""Assumed before there is a tokenizer; vocabularies of 1,024 and 16,384 give about 2.3 and 4."""
MAX_EPOCHS = 8
"""Passes over a text; later ones teach little (Muennighoff et al. 2023, arXiv:2305.16264)."""
MOST_EPOCHS, MIN_UPDATES = 40, 300
"""Passes over a text so small that `MAX_EPOCHS` are fewer updates than these."""
MIN_BATCH, UPDATES = 4, 1000
"""Rows of an update, and updates aimed at: a short training needs many small ones."""


@dataclass(frozen=True)
class Corpus:
    """A corpus stage of the new recipe."""

    format: Format
    source: str
    field: str | None
    """Field of a row with the text, if it is not `text`."""
    content: Survey

    @property
    def stage(self) -> str:
        return {"text": "text", "chat": "talk", "pairs": "pairs"}[self.format]

    @property
    def training(self) -> str:
        """The stage that is trained on it."""
        return {"text": "base", "chat": "chat", "pairs": "dpo"}[self.format]

    @property
    def tokens(self) -> float:
        return self.content.bytes / BYTES_PER_TOKEN


def new_recipe(
    path: Path,
    text: str | None,
    chat: str | None,
    pairs: str | None,
    model: str | None,
    device: Device,
    seconds: float | None = None,
) -> str:
    """The recipe's text.

    Args:
        path: the file that it is for; its name becomes the run's.
        text, chat, pairs: a file, a folder or a glob of plain text, conversations, pairs.
        model: `hf:DIR`, or the directory of a finished train stage, to start from; default: random weights.
        device: the device to size it for.
        seconds: of the complete run on this machine, which is measured; only for `text` alone.

    Raises:
        UserError: a name, a file or a combination that cannot be used.
    """
    _check(path, text, chat, pairs, model)
    sources: tuple[tuple[Format, str | None], ...] = (("text", text), ("chat", chat), ("pairs", pairs))
    corpora = [_corpus(format, source) for format, source in sources if source]
    chosen = _timed(corpora[0], device, seconds) if seconds else None
    return "\n".join(_Writer(path, corpora, model, device, chosen).lines()) + "\n"


def _timed(corpus: Corpus, device: Device, seconds: float) -> Timed:
    """What a time is spent on."""
    settings = CorpusSettings.model_validate({"sources": [corpus.source], "field": corpus.field or "text"})
    most, _ = _sizes(corpus, device)
    speed = _speed(device)
    vocab = timed_vocab(speed * seconds, most) if speed else most
    return timed(settings, corpus.content.bytes, vocab, _context(corpus, _max_context(device)), seconds, print_message)


def _check(path: Path, text: str | None, chat: str | None, pairs: str | None, model: str | None) -> None:
    if path.suffix != ".toml":
        raise UserError(f"{path}: found a name without .toml, expected the recipe to write, such as mine.toml")
    if path.exists():
        raise UserError(f"{path}: exists already; choose another name or move it away")
    pattern = next(m.pattern for m in RunSettings.model_fields["name"].metadata if hasattr(m, "pattern"))
    if not re.fullmatch(pattern, path.stem) or name_problem(path.stem):
        raise UserError(
            f"{path}: found the name {path.stem!r}, expected letters, digits, '_', '-' and '.', because it names the "
            "run; choose another"
        )
    if not (text or chat or pairs):
        raise UserError("--model: found nothing to train it on, expected --text, --chat or --pairs too; add one")
    if pairs and not (model or chat):
        raise UserError("--pairs: found no model to compare answers with, expected --model hf:DIR or --chat FILE too")
    if model:
        if not is_directory(model):
            raise UserError(
                f"--model: found '{model}', expected hf:DIR, or runs/NAME/STAGE of a train stage that is done"
            )
        try:
            model_files(model)
        except UserError as error:
            raise UserError(f"--model: {str(error).removeprefix('path: ')}") from None


def _corpus(format: Format, source: str) -> Corpus:
    """A corpus with a look into its files, and the field of its text where that is not `text`."""
    settings, field = CorpusSettings.model_validate({"sources": [source], "format": format}), None
    try:
        try:
            content = survey(settings)
        except UserError:
            field = text_field(Source(path=source)) if format == "text" else None
            if field is None:
                raise
            content = survey(settings.model_copy(update={"field": field}))
    except UserError as error:
        raise UserError(f"--{format}: {str(error).removeprefix('sources: ')}") from None
    return Corpus(format, source, field, content)


def _speed(device: Device) -> float | None:
    """FLOP/s of training, roughly; None for a GPU without a data sheet."""
    peak = device.peak if device.is_gpu else measured_flops() * (BF16_SPEED if device.half == "bf16" else 1)
    return peak * UTILISATION if peak else None


def _sizes(corpus: Corpus, device: Device) -> tuple[int, int]:
    """Vocabulary and depth of a new model."""
    _, vocab, depth = next(size for size in SIZES if corpus.content.bytes <= size[0])
    if device.is_gpu and corpus.content.bytes > SIZES[0][0]:
        depth *= GPU_DEPTH
    return min(vocab, SMALLEST + round(TRAINED_WORDS * corpus.content.words)), depth


def _max_context(device: Device) -> int:
    return 512 if device.is_gpu else 256


def _context(corpus: Corpus, most: int) -> int:
    """Tokens of a row: a power of two that nine in ten conversations fit into; for text the largest."""
    wanted = most
    if corpus.format != "text" and corpus.content.lengths:
        lengths = sorted(corpus.content.lengths)
        wanted = lengths[int(0.9 * len(lengths))] / BYTES_PER_TOKEN
    few = corpus.tokens / 32
    return min(most, max(32, 2 ** math.ceil(math.log2(max(32.0, min(wanted, few))))))


class _Writer:
    """Writes the stages one after another; `model` is the newest stage with a model."""

    def __init__(
        self, path: Path, corpora: list[Corpus], start: str | None, device: Device, chosen: Timed | None = None
    ):
        self.path, self.corpora, self.start, self.device, self.timed = path, corpora, start, device, chosen
        self.talks = any(corpus.format != "text" for corpus in corpora)
        self.speed = _speed(device)
        self.minutes = MINUTES["GPU" if device.is_gpu else "CPU"] / max(1, len(corpora))
        self.seconds, self.adapter = 0.0, "rank = 16"
        self.models: list[str] = []

    def lines(self) -> Iterator[str]:
        stages = [*self._corpora(), *self._start(), *self._trainings(), *self._card()]
        yield f"# {self._title()}"
        yield f"#   ingot run {self.path}            # {self._duration()}"
        last = f"runs/{self.path.stem}/{self.models[-1]}"
        yield f"#   ingot chat {last}" if self.talks else f'#   ingot generate {last} "..."'
        yield from ("", "[run]", f"name = {_toml(self.path.stem)}", "seed = 1")
        yield from stages

    def _title(self) -> str:
        sources = ", ".join(corpus.source for corpus in self.corpora)
        start = f"{self.start} learns from" if self.start else "A model of your own, from random weights, learns from"
        return f"{start} {sources}."

    def _duration(self) -> str:
        if self.timed:
            return f"about {duration(self.timed.run_seconds)} on this machine, as measured"
        if not self.seconds:
            return f"`ingot plan {self.path}` shows how long it takes"
        minutes = math.ceil(self.seconds / 60)
        where = "this machine's CPU" if not self.device.is_gpu else f"a {self.device.name}"
        return f"about {minutes} minute{'s' if minutes > 1 else ''} of training on {where}"

    def _corpora(self) -> Iterator[str]:
        for corpus in self.corpora:
            content = corpus.content
            yield from ("", f"[stage.{corpus.stage}]")
            about = "" if content.complete else "about "
            files = ", ".join(f"{n:,} {s} ({size(b)})" for s, (n, b) in list(content.files.items())[:6])
            yield f"# {files}: {about}{content.documents:,} {_NOUNS[corpus.format]}, {size(content.bytes)} of text"
            if content.unread:
                yield f"# not read: {_one_line(content.unread)}"
            if content.rejected:
                yield f"# not usable, for example: {_one_line(content.rejected)}"
            yield 'kind    = "corpus"'
            yield f"sources = [{_toml(corpus.source)}]"
            if corpus.format == "text":
                if corpus.field:
                    yield f"field   = {_toml(corpus.field)}"
                yield 'quality = "none"               # "text" drops very short, very long and unusual documents'
            else:
                yield f'format  = "{corpus.format}"'
            yield self._holdout(content)

    def _holdout(self, content: Survey) -> str:
        if self.timed:
            fraction = round(self.timed.holdout, 1 - math.floor(math.log10(self.timed.holdout)))
            return (
                f'holdout = {{ fraction = {fraction:g}, by = "characters" }}   # at most {size(HELD_OUT_BYTES)}, so '
                "that evaluations leave time for training"
            )
        fraction = 0.1 if content.bytes < 30e6 else 0.01 if content.bytes < 1e9 else 0.001
        return f'holdout = {{ fraction = {fraction:g}, by = "characters" }}   # of the text; drawn, never trained on'

    def _start(self) -> Iterator[str]:
        """The tokenizer of a new model, or the import of an old one."""
        if self.start:
            untaught = self.talks and self.start.startswith(HF) and not has_template(directory_of(self.start))
            if untaught:
                yield from ("", "# The model has no chat format and gets one, with new tokens.", "[stage.words]")
                yield from ('kind     = "tokenizer"', 'type     = "file"')
                yield from (f"path     = {_toml(self.start.removeprefix(HF))}", 'template = "turns"')
            yield from ("", "[stage.start]", 'kind = "import"', f"path = {_toml(self.start)}")
            if untaught:
                yield 'tokenizer = "words"'
                self.adapter += ', modules_to_save = ["embedding", "head"]'
            self.config = read_model_config(self.start)
            self.models.append("start")
            return
        first = self.corpora[0]
        vocab, depth = _sizes(first, self.device)
        if self.timed:
            vocab, depth = self.timed.vocab, self.timed.choice.candidate.depth
        self.settings = ModelSettings(depth=depth, context=_context(first, _max_context(self.device)))
        self.config = self.settings.resolve(vocab)
        yield from ("", "[stage.bpe]", 'kind  = "tokenizer"', f'from  = "{first.stage}"')
        why = "a larger text can use a larger one"
        if self.timed:
            why = "so that embeddings are a small part of a model for this time"
        yield f"vocab = {vocab}                      # {why}"

    def _trainings(self) -> Iterator[str]:
        for corpus in self.corpora:
            yield from (
                "",
                f"[stage.{corpus.training}]",
                'kind      = "train"',
                f"data      = {{ {corpus.stage} = 1.0 }}",
            )
            context = self.config.context
            new = not self.models
            if new:
                if self.timed:
                    yield from timed_comments(self.timed)
                model = f"depth = {self.settings.depth}, context = {self.settings.context}"
                yield 'tokenizer = "bpe"'
                size = f"{self.config.parameters / 1e6:.1f}M parameters"
                yield f"model     = {{ {model} }}   # {size}; every width follows from the depth"
            else:
                yield f'init      = "{self.models[-1]}"'
            if self.start:
                context = _context(corpus, min(self.config.context, 1024))
                yield f"context   = {context}                # longest row, in tokens"
                yield f'adapter   = {{ kind = "lora", {self.adapter} }}   # leave out to train all weights'
            if corpus.format == "pairs":
                yield 'objective = { kind = "dpo", beta = 0.1 }'
            if self.timed:
                batch, rows = self.timed.batch, self.timed.choice.tokens / context
                passes, length = self.timed.passes, _amount(self.timed.choice.tokens)
            else:
                passes, length = self._length(corpus, context, new)
                rows = passes * corpus.tokens / context
                if corpus.format == "pairs":
                    rows = passes * corpus.content.documents
                batch = max(MIN_BATCH, min(64, 2 ** round(math.log2(max(1.0, rows / UPDATES)))))
            yield f"batch     = {batch}"
            yield f'duration  = "{length}"'
            if new and (decay := weight_decay(passes)) > WEIGHT_DECAY:
                yield f"# Weight decay: above the usual {WEIGHT_DECAY}, because a repeated text is learned by heart."
                yield f"optim     = {{ weight_decay = {decay:.2g} }}"
            every = max(10, round(rows / batch / 10, -1))
            yield f"evaluate  = {{ every = {every:.0f}, tokens = 16384 }}"
            self.models.append(corpus.training)

    def _length(self, corpus: Corpus, context: int, new: bool) -> tuple[float, str]:
        """Epochs and duration: as many passes as teach something, within the time that a first run may take."""
        tokens = corpus.tokens * (2 if corpus.format == "pairs" else 1)
        epochs = float(MAX_EPOCHS if new else 1 if corpus.format == "pairs" else 3)
        if new:
            epochs = max(epochs, min(MOST_EPOCHS, MIN_UPDATES * MIN_BATCH * context / tokens))
        config = self.config.model_copy(update={"context": context})
        adapter = low_rank_parameters(AdapterSettings(), config) if self.start else None
        flops = training_flops_per_token(config, adapter) * (2 if corpus.format == "pairs" else 1)
        if self.speed:
            affordable = self.speed * self.minutes * 60 / (flops * tokens)
            if affordable < epochs and (new or affordable > 1):
                epochs = affordable
            self.seconds += epochs * tokens * flops / self.speed
        whole = max(1, round(epochs))
        if epochs >= 0.75:
            return whole, f"{whole} epoch{'s' if whole > 1 else ''}"
        return epochs, _amount(epochs * tokens)

    def _card(self) -> Iterator[str]:
        corpora = [c for c in self.corpora if c.format != "pairs"]
        if not corpora:
            return
        shown = {"text": "bits per byte beside gzip and xz; samples", "chat": "loss of the responses; answers"}
        measures = "; ".join(shown[c.format] for c in corpora)
        yield from ("", "[stage.card]", f'kind      = "evaluate"           # {measures}')
        yield f"models    = {_toml(self.models)}"
        yield f"data      = {_toml([c.stage for c in corpora])}"
        yield 'precision = "auto"               # as in training'
        if self.start:
            yield f"context   = {_context(corpora[0], min(self.config.context, 1024))}"
        for corpus in corpora:
            name = "prompts  " if corpus.format == "text" else "questions"
            if examples := list(dict.fromkeys(filter(None, map(_EXAMPLES[corpus.format], corpus.content.first))))[:2]:
                if corpus.format == "chat":
                    yield "# of the file, so mostly trained on; add some that are not in it"
                yield f"{name} = {_toml(examples)}"


def _amount(tokens: float) -> str:
    """Tokens as a duration, with two digits or more: "4.1M tokens", "812K tokens"."""
    unit, scale = ("M", 1e6) if tokens >= 1e6 else ("K", 1e3)
    amount = max(1.0, tokens / scale)
    return f"{amount:.1f}{unit} tokens" if amount < 10 and unit == "M" else f"{amount:.0f}{unit} tokens"


def _first_words(text: str) -> str:
    """The first words of a document, as a prompt."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return " ".join(line.split()[:4])[:40]


def _first_question(document: str) -> str:
    """The first message of a conversation, if it is a short one of the user."""
    message = next((m for m in json.loads(document) if m["role"] == "user"), None)
    content = message["content"] if message else ""
    return content if isinstance(content, str) and len(content) <= 200 else ""


_NOUNS = {"text": "documents", "chat": "conversations", "pairs": "pairs"}
_EXAMPLES = {"text": _first_words, "chat": _first_question}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _toml(value: Any) -> str:
    """A string or a list of strings as TOML, in one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")
