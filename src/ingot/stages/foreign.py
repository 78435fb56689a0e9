"""Models made elsewhere: a Hugging Face directory or another run's stage in, a Hugging Face directory out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.core.artifact import atomic_directory
from ingot.core.errors import UserError
from ingot.dist import checkpoint
from ingot.model import hf
from ingot.stages.imports import HF, directory_of
from ingot.stages.job import Job
from ingot.stages.load import describe, load_model
from ingot.stages.settings import ImportSettings
from ingot.stages.text import TOKENIZER
from ingot.text.chat import stop_ids
from ingot.text.hf_files import export_tokenizer
from ingot.text.tokenizer import load_tokenizer


def import_model(job: Job) -> dict[str, Any]:
    """A directory's weights as a checkpoint of step 0, beside the shape and the tokenizer."""
    settings = job.settings
    assert isinstance(settings, ImportSettings)
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path / TOKENIZER)
    directory = directory_of(settings.path)
    if settings.path.startswith(HF):
        model = hf.load(directory)
    else:
        model = load_model(directory, job.display.say, device="cpu", exact=True).model
    config, tensors = model.config, {n: p.detach() for n, p in model.named_parameters()}
    if tokenizer.vocab > config.vocab:
        job.display.say(f"embeddings grow from {config.vocab:,} to {tokenizer.vocab:,} ids, as the tokenizer has")
        tensors, config = hf.resize_embeddings(tensors, config, tokenizer.vocab)
    describe(job.out.path, config, tokenizer)
    path = checkpoint.step_path(job.out / "checkpoints", 0)
    facts = {"model": config.model_dump(), "tokenizer": tokenizer.fingerprint}
    checkpoint.save(path, {f"model.{n}": t for n, t in tensors.items()}, {"step": 0}, facts)
    return {"parameters": config.parameters, "vocab": config.vocab, "context": config.context, "steps": 0}


def export_hf(stage: Path, to: Path, dtype: hf.Dtype, best: bool, say: Callable[[str], None]) -> list[Path]:
    """Write a trained (or imported) stage as a directory that transformers reads.

    Args:
        stage: the stage's directory.
        to: the new directory; it appears whole or not at all.
        dtype: of the weights.
        best: the weights with the lowest held-out loss instead of the last ones.

    Raises:
        UserError: no such stage, `to` exists, or the layout has no words for this model or tokenizer.
    """
    if to.exists():
        raise UserError(f"{to}: exists already; name another directory or remove it")
    loaded = load_model(stage, say, device="cpu", best=best)
    with atomic_directory(to) as directory:
        tokenizer = loaded.tokenizer
        export_tokenizer(tokenizer, directory)
        tensors = {n: p.detach() for n, p in loaded.model.named_parameters()}
        stops = list(stop_ids(tokenizer))
        hf.write(directory, loaded.config, tensors, eos=stops or None, pad=tokenizer.pad, dtype=dtype)
    return sorted(to.iterdir())
