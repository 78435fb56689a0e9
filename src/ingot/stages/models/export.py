"""Builder of the kind `import`, and export to the Hugging Face and PEFT layouts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ingot.convert import hf_weights, peft
from ingot.convert.directories import listed
from ingot.convert.hf_config import Dtype
from ingot.core.artifact import CHECKPOINTS, atomic_directory, checkpoint_path
from ingot.core.errors import UserError
from ingot.distributed import checkpoint
from ingot.objectives.settings import scores_rows
from ingot.stages.job import TOKENIZER, Job, read_record
from ingot.stages.models.imports import HF, directory_of, leaves_out_reward_head, unused_files
from ingot.stages.models.lineage import CONVERSATIONS, trained_on_conversations
from ingot.stages.models.load import adapter_settings, base_stage, load_model, load_with_adapter, save_description
from ingot.stages.models.settings import ImportSettings
from ingot.tokenizer.byte_bpe import load_tokenizer
from ingot.tokenizer.chat import stop_ids
from ingot.tokenizer.hf_files import export_tokenizer


def import_model(job: Job) -> dict[str, Any]:
    """Read a model's directory and write a checkpoint of step 0, the configuration and the tokenizer."""
    settings = job.settings
    assert isinstance(settings, ImportSettings)
    tokenizer = load_tokenizer(job.inputs["tokenizer"].path / TOKENIZER)
    directory = directory_of(settings.path)
    if settings.path.startswith(HF):
        model = hf_weights.load(directory)
    else:
        model = load_model(directory, job.display.notify, device="cpu", exact=True).model
    if settings.adapter:
        vocab, model = model.config.vocab, peft.merge(Path(settings.adapter), model)
        base = peft.base_of(Path(settings.adapter))
        trained = f", which was trained on {base}" if base else ""
        job.display.notify(f"merged with the adapter in {settings.adapter}{trained}")
        if model.config.vocab != vocab:
            job.display.notify(f"embeddings of {vocab:,} ids became {model.config.vocab:,}, those of the adapter")
    if leaves_out_reward_head(settings):
        job.display.notify(f"the reward head of {settings.path} is left out; its language model is imported alone")
    if unused := unused_files(settings):
        job.display.notify(f"not used: {listed(unused)}")
    config, tensors = model.config, {n: p.detach() for n, p in model.named_parameters()}
    if broken := next((name for name, weight in tensors.items() if not torch.isfinite(weight).all()), None):
        raise UserError(
            f"{settings.path}: found NaN or infinite numbers in {broken}, expected finite weights; the file is damaged "
            "or the model has diverged, so use another"
        )
    if tokenizer.vocab > config.vocab:
        job.display.notify(f"embeddings grow from {config.vocab:,} to {tokenizer.vocab:,} ids, those of the tokenizer")
        tensors, config = hf_weights.resize_embeddings(tensors, config, tokenizer.vocab)
    save_description(job.out.path, config, tokenizer)
    path = checkpoint_path(job.out / CHECKPOINTS, 0)
    metadata = {"model": config.model_dump(), "tokenizer": tokenizer.fingerprint}
    checkpoint.save(path, {f"model.{n}": t for n, t in tensors.items()}, {"step": 0}, metadata)
    conversations = None if settings.path.startswith(HF) else trained_on_conversations(directory)
    known = {} if conversations is None else {CONVERSATIONS: conversations}
    return {"parameters": config.parameters, "vocab": config.vocab, "context": config.context, "steps": 0, **known}


def export_hf(
    stage: Path, to: Path, dtype: Dtype, best: bool, notify: Callable[[str], None], step: int | None = None
) -> list[Path]:
    """Write the model of a train or import stage as a directory that transformers can load.

    Args:
        stage: the stage's directory.
        to: the new directory, written atomically.
        dtype: number format of the weights.
        best: export the best checkpoint (lowest held-out loss) instead of the last one.
        notify: receives messages.
        step: export the checkpoint of this step instead of the last one.

    Returns:
        The files of the directory.

    Raises:
        UserError: no such stage, a damaged checkpoint, `to` exists, or the layout cannot represent model or tokenizer.
    """
    _check_new(to)
    loaded = load_model(stage, notify, device="cpu", best=best, step=step)
    if scores_rows(read_record(stage)["settings"]):
        notify("the reward head is left out, because the Hugging Face layout of a language model has none")
    with atomic_directory(to) as directory:
        tokenizer = loaded.tokenizer
        export_tokenizer(tokenizer, directory)
        tensors = {n: p.detach() for n, p in loaded.model.named_parameters()}
        stops = list(stop_ids(tokenizer))
        hf_weights.write(directory, loaded.config, tensors, eos=stops or None, pad=tokenizer.pad, dtype=dtype)
    return sorted(to.iterdir())


def export_peft(
    stage: Path, to: Path, dtype: Dtype, best: bool, notify: Callable[[str], None], step: int | None = None
) -> list[Path]:
    """Write the adapter of a train stage, without its base model, as a directory that PEFT can load.

    Args:
        stage: the stage's directory.
        to: the new directory, written atomically.
        dtype: number format of the adapter.
        best: export the best checkpoint (lowest held-out loss) instead of the last one.
        notify: receives messages.
        step: export the checkpoint of this step instead of the last one.

    Returns:
        The files of the directory.

    Raises:
        UserError: no such stage, the stage has no adapter, or `to` exists.
    """
    _check_new(to)
    if (settings := adapter_settings(stage)) is None:
        raise UserError(f'{stage}: found no adapter, expected a stage with one; export the model with "--to hf"')
    base = base_stage(stage)
    loaded = load_with_adapter(stage, notify, device="cpu", best=best, step=step)
    record = read_record(base)
    unchanged = record["kind"] == "import" and not (record["settings"]["adapter"] or record["settings"]["tokenizer"])
    path = record["settings"]["path"] if unchanged else ""
    hf = str(directory_of(path).resolve()) if path.startswith(HF) else None  # PEFT cannot load the directory of a run
    if hf is None:
        notify(f"the base model of the adapter is {record['name']}; `ingot export {base} DIR --to hf` writes it")
    with atomic_directory(to) as directory:
        peft.write(directory, loaded.model, settings, hf, dtype)
    return sorted(to.iterdir())


def _check_new(to: Path) -> None:
    if to.exists():
        raise UserError(f"{to}: exists already; name another directory or remove it")
