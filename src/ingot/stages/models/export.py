"""Models made elsewhere: a Hugging Face directory or another run's stage in, a Hugging Face directory out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ingot.convert import hf_weights, peft
from ingot.convert.hf_config import Dtype
from ingot.core.artifact import CHECKPOINTS, atomic_directory, checkpoint_path
from ingot.core.errors import UserError
from ingot.distributed import checkpoint
from ingot.objectives.settings import scores_rows
from ingot.stages.job import TOKENIZER, Job, open_stage
from ingot.stages.models.imports import HF, directory_of
from ingot.stages.models.load import adapter_of, base_of, describe, load_adapted, load_model
from ingot.stages.models.settings import ImportSettings
from ingot.tokenizer.byte_bpe import load_tokenizer
from ingot.tokenizer.chat import stop_ids
from ingot.tokenizer.hf_files import export_tokenizer


def import_model(job: Job) -> dict[str, Any]:
    """A directory's weights as a checkpoint of step 0, beside the shape and the tokenizer."""
    settings = job.settings
    assert isinstance(settings, ImportSettings)
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path / TOKENIZER)
    directory = directory_of(settings.path)
    if settings.path.startswith(HF):
        model = hf_weights.load(directory)
    else:
        model = load_model(directory, job.display.say, device="cpu", exact=True).model
    if settings.adapter:
        peft.merge(Path(settings.adapter), model)
        job.display.say(f"merged with the adapter in {settings.adapter}")
    config, tensors = model.config, {n: p.detach() for n, p in model.named_parameters()}
    if broken := next((name for name, weight in tensors.items() if not torch.isfinite(weight).all()), None):
        raise UserError(
            f"{settings.path}: the weights that are {broken} here hold NaN or infinite numbers, expected finite ones; "
            "the file is damaged or the model has diverged, so take another"
        )
    if tokenizer.vocab > config.vocab:
        job.display.say(f"embeddings grow from {config.vocab:,} to {tokenizer.vocab:,} ids, as the tokenizer has")
        tensors, config = hf_weights.resize_embeddings(tensors, config, tokenizer.vocab)
    describe(job.out.path, config, tokenizer)
    path = checkpoint_path(job.out / CHECKPOINTS, 0)
    facts = {"model": config.model_dump(), "tokenizer": tokenizer.fingerprint}
    checkpoint.save(path, {f"model.{n}": t for n, t in tensors.items()}, {"step": 0}, facts)
    return {"parameters": config.parameters, "vocab": config.vocab, "context": config.context, "steps": 0}


def export_hf(stage: Path, to: Path, dtype: Dtype, best: bool, say: Callable[[str], None]) -> list[Path]:
    """Write a trained (or imported) stage as a directory that transformers reads.

    Args:
        stage: the stage's directory.
        to: the new directory; it appears whole or not at all.
        dtype: of the weights.
        best: the weights with the lowest held-out loss instead of the last ones.

    Raises:
        UserError: no such stage, `to` exists, or the layout has no words for this model or tokenizer.
    """
    _refuse_existing(to)
    loaded = load_model(stage, say, device="cpu", best=best)
    if scores_rows(open_stage(stage)["settings"]):
        say("the layout has no place for the head that gives rewards: the model is written without it")
    with atomic_directory(to) as directory:
        tokenizer = loaded.tokenizer
        export_tokenizer(tokenizer, directory)
        tensors = {n: p.detach() for n, p in loaded.model.named_parameters()}
        stops = list(stop_ids(tokenizer))
        hf_weights.write(directory, loaded.config, tensors, eos=stops or None, pad=tokenizer.pad, dtype=dtype)
    return sorted(to.iterdir())


def export_peft(stage: Path, to: Path, dtype: Dtype, best: bool, say: Callable[[str], None]) -> list[Path]:
    """Write the adapter of a train stage, without the model under it, as a directory that PEFT reads.

    Args:
        stage: the stage's directory.
        to: the new directory; it appears whole or not at all.
        dtype: of the adapter.
        best: the adapter with the lowest held-out loss instead of the last one.

    Raises:
        UserError: no such stage, no adapter, or `to` exists.
    """
    _refuse_existing(to)
    if (settings := adapter_of(stage)) is None:
        raise UserError(f'{stage}: has no adapter, expected a stage with one; write the whole model with "--to hf"')
    base = base_of(stage)
    loaded = load_adapted(stage, say, device="cpu", best=best)
    told = open_stage(base)
    as_it_was = told["kind"] == "import" and not (told["settings"]["adapter"] or told["settings"]["tokenizer"])
    path = told["settings"]["path"] if as_it_was else ""
    if path.startswith(HF):
        path = str(directory_of(path).resolve())
    else:
        say(f"the model under it is {told['name']}; `ingot export {base} DIR --to hf` writes it")
    with atomic_directory(to) as directory:
        peft.write(directory, loaded.model, settings, path or None, dtype)
    return sorted(to.iterdir())


def _refuse_existing(to: Path) -> None:
    if to.exists():
        raise UserError(f"{to}: exists already; name another directory or remove it")
