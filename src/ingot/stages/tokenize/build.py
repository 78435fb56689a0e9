"""Builders of the kinds `tokenizer`, `tokens` and `token-files`."""

from collections.abc import Iterator
from typing import Any

from ingot.core.artifact import atomic_json
from ingot.stages.job import TOKENIZER, Job
from ingot.stages.tokenize.settings import TokenFilesSettings
from ingot.store.encode import SPLITS, build_tokens
from ingot.store.token_import import import_tokens
from ingot.tokenizer.byte_bpe import load_tokenizer
from ingot.tokenizer.settings import TokenizerSettings, TokensSettings
from ingot.tokenizer.train import train, training_texts


def tokenizer(job: Job) -> dict[str, Any]:
    """Train a tokenizer on the training split of some corpora, or read one from files."""
    assert isinstance(job.settings, TokenizerSettings)
    sources = list(job.roles("corpus").values())

    def texts() -> Iterator[tuple[str, str]]:
        sizes = [source.result().get("train_bytes") for source in sources]  # of a generated corpus it is not known
        total = sum(size for size in sizes if size is not None) if None not in sizes else None
        with job.display.bar("reading text", total=total, unit="bytes") as bar:
            for source in sources:
                for name, text in training_texts(source.path, source.format):
                    yield name, text
                    bar.advance(len(text.encode()))

    trained, report = train(job.settings, texts(), job.display, job.log)
    trained.save(job.out / TOKENIZER)
    atomic_json(job.out / "report.json", report)
    return {"vocab": trained.vocab, **{k: v for k, v in report.items() if isinstance(v, int | float)}}


def tokens(job: Job) -> dict[str, Any]:
    """Encode both splits of a corpus into token stores."""
    assert isinstance(job.settings, TokensSettings)
    source = job.inputs["corpus"]
    encoder = load_tokenizer(job.inputs["tokenizer"].path / TOKENIZER)
    form = source.format
    workers, sizes = job.settings.workers, source.result()  # of a generated corpus they are not known
    totals = {split: sizes[f"{split}_bytes"] for split in SPLITS if f"{split}_bytes" in sizes}
    result = build_tokens(source.path, encoder, form, job.out.path, workers, job.display, job.log, totals)
    job.display.notify(
        f"{result['train_tokens']:,} tokens to train on, {result['val_tokens']:,} held out for validation"
    )
    return result


def token_files(job: Job) -> dict[str, Any]:
    """Read the token files of another tool into token stores."""
    settings = job.settings
    assert isinstance(settings, TokenFilesSettings)
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path / TOKENIZER)
    result = import_tokens(settings.files(), settings.format, tokenizer, job.out.path, job.display, job.log)
    job.display.notify(
        f"{result['train_tokens']:,} tokens to train on, {result['val_tokens']:,} held out for validation"
    )
    return result
