"""Checkpoints: named tensors as safetensors, state as JSON, a manifest of checksums. Nothing is pickled.

A checkpoint directory is written atomically, and every file of it is verified before it is loaded. A run resumes from
the newest intact checkpoint; whoever wants the model of a stage gets the last one or an error.

Ranks that hold parts of a model write and read them with torch's distributed checkpoint, so any mesh can load what
another one saved: all fill one directory, each digests the files that it wrote, and the first one publishes it. Where
every rank has all tensors, the first one writes one file in a compatible form without that library, which takes 1.2 s
and 80 MB to import and orders headers differently each time, so equal tensors would not give equal files.
"""

import contextlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from ingot.core.artifact import (
    STATE,
    atomic_directory,
    atomic_json,
    checkpoint_path,
    checkpoint_problem,
    checkpoint_steps,
    file_record,
    write_manifest,
)
from ingot.core.errors import UserError, name_file
from ingot.distributed.mesh import Mesh
from ingot.distributed.sharding import is_part

WEIGHTS, CONFIG = "model.safetensors", "config.json"
BEST = "best"
"""Name of the checkpoint with the best weights, without moments, next to the numbered ones."""


def save(
    path: Path,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    mesh: Mesh = Mesh(),  # noqa: B008 - immutable
) -> None:
    """Write a checkpoint directory atomically: tensors, `state` and `config` (plain data), and a manifest.

    All ranks call it, and return when the checkpoint is there.
    """
    if not _has_parts(tensors):
        if mesh.leads:
            with atomic_directory(path) as directory:
                # safetensors' own writer raises no OSError if the disk is full, so the bytes are written here
                (directory / WEIGHTS).write_bytes(serialize({n: t.detach().contiguous() for n, t in tensors.items()}))
                _describe(directory, state, config)
        mesh.wait()
        return
    with atomic_directory(path) if mesh.leads else contextlib.nullcontext() as own:
        directory = mesh.first(lambda: own)
        assert directory is not None
        _save_parts(directory, tensors)
        own_files = directory.glob(f"shard-{mesh.rank + 1:05}-*")  # torch counts ranks from 1
        records = mesh.objects({file.name: file_record(file) for file in own_files})
        if mesh.leads:
            _describe(directory, state, config, {name: r for of_rank in records for name, r in of_rank.items()})
    mesh.wait()


def _describe(
    directory: Path, state: Mapping[str, Any], config: Mapping[str, Any], records: Mapping[str, Any] | None = None
) -> None:
    atomic_json(directory / STATE, dict(state))
    atomic_json(directory / CONFIG, dict(config))
    write_manifest(directory, records)


@torch.no_grad()
def load(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Load the given tensors in place and return the state.

    Tensors of the checkpoint that are not given, such as optimizer moments, are not read.

    Raises:
        UserError: a tensor is missing or has another shape.
    """
    files = list(path.glob("*.safetensors"))
    if _has_parts(tensors) or len(files) > 1:
        _load_parts(path, tensors)
    else:
        with name_file(files[0]), safe_open(files[0], "pt") as file:
            stored = file.keys()
            shapes = {name: file.get_slice(name).get_shape() if name in stored else None for name in tensors}
            for name, tensor in tensors.items():
                if shapes[name] != list(tensor.shape):
                    raise UserError(
                        f"{path}: found {shapes[name] or 'nothing'} as {name}, expected {list(tensor.shape)}, as the "
                        "stage's configuration says; delete the stage's directory and run it again"
                    )
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))
    return json.loads((path / STATE).read_text())


def _has_parts(tensors: Mapping[str, Tensor]) -> bool:
    return any(is_part(tensor) for tensor in tensors.values())


def _save_parts(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    with _unwrapped():
        writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
        state_dict_saver.save(dict(tensors), storage_writer=writer)


def _load_parts(path: Path, tensors: dict[str, Tensor]) -> None:
    """Load tensors or parts of them; only with parts do all ranks load together."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a single process loads without a process group
        reader = HuggingFaceStorageReader(str(path))
        state_dict_loader.load(tensors, storage_reader=reader, no_dist=not _has_parts(tensors))


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the original exception of a rank, such as OSError for a full disk, instead of torch's wrapper."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            raise cause from None
        raise


def newest_intact(root: Path, notify: Callable[[str], None], before: int | None = None) -> Path | None:
    """The newest checkpoint whose files match their checksums; None if there is no checkpoint.

    Args:
        notify: receives a message for each damaged checkpoint.
        before: consider only checkpoints of steps before this one.

    Raises:
        UserError: all checkpoints are damaged.
    """
    steps = [step for step in checkpoint_steps(root) if before is None or step < before]
    for step in steps:
        path = checkpoint_path(root, step)
        problem = checkpoint_problem(path)
        if problem is None:
            return path
        notify(f"skipped a damaged checkpoint: {problem}")
    if steps:
        raise UserError(
            f"{root}: all {len(steps)} checkpoints are damaged; delete the stage's directory and run it again"
        )
    return None


def delete_after(root: Path, step: int) -> None:
    """Delete checkpoints after the one that a run resumes from: `prune` must not retain damaged ones instead."""
    for later in (s for s in checkpoint_steps(root) if s > step):
        shutil.rmtree(checkpoint_path(root, later), ignore_errors=True)


def prune(root: Path, keep: int, spare: int | None = None, every: int | None = None) -> None:
    """Delete all but the newest `keep` checkpoints, the newest of a step before `spare`, and those of multiples of
    `every` steps."""
    steps = checkpoint_steps(root)
    spared = next((step for step in steps if spare is not None and step < spare), None)
    for step in (step for step in steps[keep:] if step != spared and (every is None or step % every)):
        shutil.rmtree(checkpoint_path(root, step), ignore_errors=True)
