"""Loads the model of a train or import stage from the stage's directory."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from ingot.core.artifact import (
    CHECKPOINTS,
    RESULT,
    STATE,
    StageDir,
    atomic_write,
    checkpoint_path,
    checkpoint_problem,
    checkpoint_steps,
    damaged,
    read_json,
)
from ingot.core.errors import UserError
from ingot.distributed import checkpoint
from ingot.distributed.mesh import Mesh
from ingot.model import lora
from ingot.model.adapter_config import AdapterSettings
from ingot.model.config import ModelConfig
from ingot.model.transformer import Transformer
from ingot.objectives.base_settings import MethodSettings
from ingot.objectives.settings import OBJECTIVES, ObjectiveSettings
from ingot.stages.job import MODEL, TOKENIZER, inputs_of, read_config, read_record, read_result
from ingot.stages.models.backend import backend_for
from ingot.stages.models.parts import empty_on, shard_model
from ingot.tokenizer.byte_bpe import Tokenizer, load_tokenizer
from ingot.train.execution import resolve_device
from ingot.train.objective import Objective


@dataclass(frozen=True)
class LoadedModel:
    """A model with the tokenizer it was trained on."""

    model: Transformer
    tokenizer: Tokenizer
    config: ModelConfig
    checkpoint: Path
    """Directory of the checkpoint with its weights."""


def save_description(out: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Write the model's configuration and tokenizer, which `load_model` needs besides a checkpoint."""
    atomic_write(out / MODEL, config.model_dump_json(indent=1) + "\n")
    tokenizer.save(out / TOKENIZER)


def load_model(
    stage: Path,
    notify: Callable[[str], None],
    device: str = "auto",
    best: bool = False,
    exact: bool = False,
    context: int | None = None,
    backend: str = "auto",
    step: int | None = None,
    mesh: Mesh = Mesh(),  # noqa: B008 - immutable
) -> LoadedModel:
    """Load the last checkpoint of a train stage, its best one, or that of a step. An adapter is merged into the model.

    Args:
        stage: the stage's directory.
        notify: receives messages, for example that the stage has not finished.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        best: load the checkpoint with the lowest held-out loss.
        exact: require a finished stage, for stages whose key depends on it.
        context: context length; default: the model's own.
        backend: name of a backend (`backends/select.py`); "auto" for the fastest on this machine.
        step: load the checkpoint of this step, where it still exists, instead of the last one.
        mesh: the ranks that share the model, which all load it together; each reads its parts only.

    Raises:
        UserError: not a train stage, no such checkpoint, a damaged one, or the base model of an adapter was deleted.
    """
    loaded = load_with_adapter(stage, notify, device, best, exact, context, step, mesh)
    model = loaded.model
    lora.merge(model)
    if mesh.shard > 1:
        shard_model(model, mesh)  # only now, as an adapter is merged into whole weights
        return loaded
    where = str(model.embedding.weight.device)
    model.backend = backend_for(model, where, model.embedding.weight.dtype, name=backend, notify=notify)
    return loaded


def load_with_adapter(
    stage: Path,
    notify: Callable[[str], None],
    device: str = "auto",
    best: bool = False,
    exact: bool = False,
    context: int | None = None,
    step: int | None = None,
    mesh: Mesh = Mesh(),  # noqa: B008 - immutable
) -> LoadedModel:
    """Like `load_model`, but without merging the adapter, with the PyTorch backend; a model with one is not sharded."""
    config = read_config(stage)
    config = config.model_copy(update={"context": context or config.context})
    if best and step is not None:
        raise UserError("found both --best and --step, expected one of them")
    path = _best(stage) if best else _of_step(stage, step, exact)
    if not StageDir(stage).is_done():
        notify(f"{stage}: not done; these are its weights after step {read_json(path / STATE)['step']:,}")
    if (adapter := adapter_settings(stage)) is None:
        model = empty_on(mesh, config, resolve_device(device), torch.float32)
    else:
        model = load_model(base_stage(stage), notify, device, exact=True, context=config.context).model
        lora.add_adapters(model, adapter, seed=0)
    load_weights(model, path)
    return LoadedModel(model, load_tokenizer(stage / TOKENIZER), config, path)


def _best(stage: Path) -> Path:
    path = stage / CHECKPOINTS / checkpoint.BEST
    if not path.exists():
        raise UserError(f"{stage}: no best checkpoint; load the last one, without --best")
    if problem := checkpoint_problem(path):
        raise UserError(f"{stage}: its best checkpoint is damaged ({problem}); load the last one, without --best")
    return path


def _of_step(stage: Path, step: int | None, exact: bool) -> Path:
    """The checkpoint of a step; None for the last one, of a finished stage that of its last step.

    An older one never stands in for a damaged one, since it is another model.
    """
    root = stage / CHECKPOINTS
    steps = checkpoint_steps(root)
    if not steps:
        raise UserError(f"{stage}: no checkpoint yet; `ingot run` trains it")
    last = read_result(stage).get("steps") if exact or StageDir(stage).is_done() else steps[0]
    if type(last) is not int:
        raise damaged(stage / RESULT, "number of steps")
    wanted = last if step is None else step
    path = checkpoint_path(root, wanted)
    problem = checkpoint_problem(path) if path.exists() else f"{path}: missing"
    if problem is None:
        return path
    others = [] if exact else [s for s in steps if s != wanted and not checkpoint_problem(checkpoint_path(root, s))]
    older = f", or name another intact one with --step: {', '.join(map(str, others))}" if others else ""
    if step is not None and not path.exists():
        raise UserError(f"{stage}: no checkpoint of step {step:,}; leave --step out for the last one{older}")
    raise UserError(
        f"{stage}: the checkpoint of step {wanted:,} is damaged ({problem}); delete {stage.resolve()} and run the "
        f"recipe again{older}"
    )


def evaluation_context(context: int | None, config: ModelConfig) -> int:
    """Tokens of the rows on which a model is evaluated.

    Args:
        context: the setting; None for the model's own context.
        config: the model.

    Raises:
        UserError: the model has fewer learned positions.
    """
    if context and context > config.context and config.positions == "learned":
        raise UserError(
            f"context: found {context:,}, expected at most {config.context:,}, the number of the model's learned "
            "positions; shorten it"
        )
    return context or config.context


def load_frozen(
    stage: Path,
    notify: Callable[[str], None],
    device: str,
    dtype: torch.dtype,
    backend: str = "auto",
    mesh: Mesh = Mesh(),  # noqa: B008 - immutable
) -> nn.Module:
    """Load a finished stage as a companion (`Objective.companion`): in evaluation mode, without gradients.

    Args:
        stage: the stage's directory.
        notify: receives messages.
        device: `cpu` or `cuda`.
        dtype: number format of the weights.
        backend: the backend of the trained model, so that equal weights give equal outputs.
        mesh: the ranks that share the model.

    Raises:
        UserError: as `load_model`.
    """
    loaded = load_model(stage, notify, device, exact=True, backend=backend, mesh=mesh)
    return companion(stage, loaded).to(dtype).eval().requires_grad_(False)


def companion(stage: Path, loaded: LoadedModel) -> nn.Module:
    """What a stage's model is to other stages (`Objective.companion`), such as a reward model with its head."""
    record, model = read_record(stage), loaded.model
    if record["kind"] != "train":
        return model
    objective = _objective_of(record)
    if not _has_companion(objective):
        return model
    extra = nn.ModuleDict(objective.modules(model)).to(model.embedding.weight.device)
    if tensors := {f"model.extra.{n}": p.detach() for n, p in extra.named_parameters()}:
        checkpoint.load(loaded.checkpoint, tensors)
    return objective.companion(model, extra, read_result(stage))


def companion_is_model(stage: Path) -> bool:
    """Whether the companion of a finished stage is its language model alone, without, for example, a reward head."""
    record = read_record(stage)
    if record["kind"] != "train":
        return True
    return not _has_companion(_objective_of(record))


def _has_companion(objective: Objective) -> bool:
    """Whether the companion of an objective is more than its model."""
    return type(objective).companion is not Objective.companion


def build_objective(settings: MethodSettings) -> Objective:
    """Create an objective from its settings."""
    module, name = OBJECTIVES[settings.kind].builder.split(":")  # pyright: ignore[reportAttributeAccessIssue]
    return getattr(importlib.import_module(module), name)(settings)


def _objective_of(record: Mapping[str, Any]) -> Objective:
    """The objective of a train stage."""
    return build_objective(TypeAdapter(ObjectiveSettings).validate_python(record["settings"]["objective"]))


def adapter_settings(stage: Path) -> AdapterSettings | None:
    """Settings of the adapter that a stage trains; None without one."""
    record = read_record(stage)
    table = record["settings"].get("adapter") if record["kind"] == "train" else None
    return AdapterSettings.model_validate(table) if table else None


def base_stage(stage: Path) -> Path:
    """Directory of the base model of a stage's adapter.

    Raises:
        UserError: the directory was deleted.
    """
    base = inputs_of(stage)["init"]
    if not base.path.exists():
        raise UserError(
            f"{stage}: found no directory {base.path}, expected '{base.name}', the base model of its adapter; run the "
            "recipe again"
        )
    return base.path


def load_weights(model: Transformer, path: Path) -> None:
    """Load the trained parameters of a model from a checkpoint, without its optimizer state."""
    tensors = {f"model.{n}": p.detach() for n, p in model.named_parameters() if p.requires_grad}
    checkpoint.load(path, tensors)
