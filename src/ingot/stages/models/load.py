"""A trained stage on disk to a model in memory, and back: the directory stands on its own."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ingot.core.artifact import CHECKPOINTS, STATE, StageDir, atomic_write, checkpoint_path, manifest_problem, read_json
from ingot.core.errors import UserError
from ingot.distributed import checkpoint
from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings
from ingot.model.config import ModelConfig
from ingot.model.transformer import Transformer, empty
from ingot.objectives.settings import OBJECTIVES
from ingot.stages.job import MODEL, TOKENIZER, inputs_of, open_stage, read_config, read_result
from ingot.stages.models.backend import backend_for
from ingot.stages.training.settings import TrainSettings
from ingot.tokenizer.byte_bpe import Tokenizer, load_tokenizer
from ingot.train.execution import resolve_device
from ingot.train.objective import Objective


@dataclass(frozen=True)
class Loaded:
    """A model with the tokenizer it was trained on."""

    model: Transformer
    tokenizer: Tokenizer
    config: ModelConfig
    checkpoint: Path
    """Where the weights are from."""


def describe(out: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Write what is needed besides the weights: the shape and the tokenizer."""
    atomic_write(out / MODEL, config.model_dump_json(indent=1) + "\n")
    tokenizer.save(out / TOKENIZER)


def load_model(
    stage: Path,
    say: Callable[[str], None],
    device: str = "auto",
    best: bool = False,
    exact: bool = False,
    context: int | None = None,
    backend: str = "auto",
) -> Loaded:
    """The newest good weights of a train stage (or its best ones); an adapter comes merged.

    Args:
        stage: the stage's directory.
        say: told about damaged checkpoints that are passed over.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        best: the weights with the lowest held-out loss.
        exact: the final weights or none, for stages whose key promises what they were made from.
        context: the longest sequence, where it is to be another than it was.
        backend: who computes it ("torch", "cpu", "auto" for the fastest here).

    Raises:
        UserError: not a train stage, nothing saved yet, or all of it damaged; the model under an adapter is gone.
    """
    loaded = load_adapted(stage, say, device, best, exact, context)
    model = loaded.model
    lora.merge(model)
    where = str(model.embedding.weight.device)
    model.backend = backend_for(model, where, model.embedding.weight.dtype, name=backend, notify=say)
    return loaded


def load_adapted(
    stage: Path,
    say: Callable[[str], None],
    device: str = "auto",
    best: bool = False,
    exact: bool = False,
    context: int | None = None,
) -> Loaded:
    """As `load_model`, with the stage's adapter beside the frozen matrices, if it has one."""
    config = read_config(stage)
    config = config.model_copy(update={"context": context or config.context})
    root = stage / CHECKPOINTS
    path = root / checkpoint.BEST if best else checkpoint.newest_good(root, say)
    if path is None or not path.exists():
        raise UserError(f"{stage}: no checkpoint yet; `ingot run` trains it")
    if best and (trouble := manifest_problem(path)):
        raise UserError(f"damaged checkpoint: {trouble}; load the last one instead of the best")
    if not StageDir(stage).is_done():
        say(f"{stage}: not finished; these are its weights after step {read_json(path / STATE)['step']:,}")
    if exact and path != checkpoint_path(root, read_result(stage)["steps"]):
        raise UserError(f"{stage}: its final checkpoint is damaged; delete {stage.resolve()} and run the recipe again")
    if (adapter := adapter_of(stage)) is None:
        model = empty(config, resolve_device(device), torch.float32)
    else:
        model = load_model(base_of(stage), say, device, exact=True, context=config.context).model
        lora.add_adapters(model, adapter, seed=0)
    load_weights(model, path)
    return Loaded(model, load_tokenizer(stage / TOKENIZER), config, path)


def measured_context(asked: int | None, config: ModelConfig) -> int:
    """Tokens of a row on which a model is measured: as asked, else its own context.

    Raises:
        UserError: the model's learned positions do not reach that far.
    """
    if asked and asked > config.context and config.positions == "learned":
        raise UserError(
            f"context: found {asked:,}, expected at most {config.context:,}: the model's positions are a learned table "
            "of that length; shorten it"
        )
    return asked or config.context


def load_frozen(
    stage: Path, say: Callable[[str], None], device: str, dtype: torch.dtype, backend: str = "auto"
) -> nn.Module:
    """A finished stage as a companion of another: in evaluation mode, without gradients, as its objective hands it on.

    Args:
        backend: that of the model beside it, so that equal weights give equal numbers.

    Raises:
        UserError: as `load_model`.
    """
    loaded = load_model(stage, say, device, exact=True, backend=backend)
    frozen: nn.Module = loaded.model
    record = open_stage(stage)
    if record["kind"] == "train":
        objective = objective_of(TrainSettings.model_validate(record["settings"]))
        extra = nn.ModuleDict(objective.modules(loaded.model)).to(device)
        if tensors := {f"model.extra.{n}": p.detach() for n, p in extra.named_parameters()}:
            checkpoint.load(loaded.checkpoint, tensors)
        frozen = objective.companion(loaded.model, extra, read_result(stage))
    return frozen.to(dtype).eval().requires_grad_(False)


def is_bare(stage: Path) -> bool:
    """Whether a finished stage is, as a companion, its model and nothing around it."""
    record = open_stage(stage)
    if record["kind"] != "train":
        return True
    return type(objective_of(TrainSettings.model_validate(record["settings"]))).companion is Objective.companion


def objective_of(settings: TrainSettings) -> Objective:
    """The objective of a train stage."""
    module, name = OBJECTIVES[settings.objective.kind].builder.split(":")
    return getattr(importlib.import_module(module), name)(settings.objective)


def adapter_of(stage: Path) -> AdapterSettings | None:
    """The adapter that a stage trains, or none."""
    told = open_stage(stage)
    table = told["settings"].get("adapter") if told["kind"] == "train" else None
    return AdapterSettings.model_validate(table) if table else None


def base_of(stage: Path) -> Path:
    """The stage that an adapter was trained upon.

    Raises:
        UserError: its directory is gone.
    """
    base = inputs_of(stage)["init"]
    if not base.path.exists():
        raise UserError(
            f"{stage}: is an adapter of '{base.name}', and {base.path} is gone; run the recipe again to make it anew"
        )
    return base.path


def load_weights(model: Transformer, path: Path) -> None:
    """Fill what is trained of a model from a checkpoint directory, without touching its optimizer tensors."""
    tensors = {f"model.{n}": p.detach() for n, p in model.named_parameters() if p.requires_grad}
    checkpoint.load(path, tensors)
