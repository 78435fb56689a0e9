"""Checkpoints: names to tensors as safetensors, integers as JSON, a manifest of checksums; nothing is pickled.

A checkpoint directory appears whole or not at all. On loading, every file is checked against its digest, and a damaged
checkpoint is passed over for the newest good one.

Ranks write and read shards through torch's distributed checkpoint, so what one mesh saved another can load. A process
alone writes the one file, in a form that it reads too, by itself: that library takes 1.2 s and 80 MB to import and
orders the header anew each time, so that equal tensors were not equal files.
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
from torch.distributed import is_initialized

from ingot.core.artifact import (
    STATE,
    atomic_directory,
    atomic_json,
    checkpoint_path,
    checkpoint_steps,
    manifest_problem,
    write_manifest,
)
from ingot.core.errors import UserError

WHOLE, CONFIG = "model.safetensors", "config.json"
BEST = "best"
"""Beside the numbered ones: the weights with the lowest held-out loss, without moments."""


def save(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write one checkpoint directory atomically: tensors, `state` and `config` (plain data), and their digests."""
    with atomic_directory(path) as directory:
        if is_initialized():
            _save_shards(directory, tensors)
        else:
            # torch's own message for a full disk is no OSError, so the bytes are written here
            (directory / WHOLE).write_bytes(serialize({n: t.detach().contiguous() for n, t in tensors.items()}))
        atomic_json(directory / STATE, dict(state))
        atomic_json(directory / CONFIG, dict(config))
        write_manifest(directory)


@torch.no_grad()
def load(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Fill the given tensors in place (only those: a model loads without its optimizer) and return the state."""
    files = list(path.glob("*.safetensors"))
    if is_initialized() or len(files) > 1:
        _load_shards(path, tensors)
    else:
        with safe_open(files[0], "pt") as file:
            for name, tensor in tensors.items():
                found = file.get_tensor(name)
                assert found.shape == tensor.shape, f"{path}: {name} is {found.shape}, expected {tensor.shape}"
                tensor.copy_(found)
    return json.loads((path / STATE).read_text())


def _save_shards(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    with _unwrapped():
        writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
        state_dict_saver.save(dict(tensors), storage_writer=writer)


def _load_shards(path: Path, tensors: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch remarks that one process loads alone, as intended
        state_dict_loader.load(tensors, storage_reader=HuggingFaceStorageReader(str(path)))


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """A full disk stays an OSError: torch wraps what went wrong on each rank in an exception of its own."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            raise cause from None
        raise


def newest_good(root: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files match their digests; each damaged one is named.

    Raises:
        UserError: there are checkpoints and all of them are damaged.
    """
    found = checkpoint_steps(root)
    for step in found:
        path = checkpoint_path(root, step)
        trouble = manifest_problem(path)
        if trouble is None:
            return path
        say(f"damaged checkpoint passed over: {trouble}")
    if found:
        raise UserError(
            f"{root}: all {len(found)} checkpoints are damaged; delete the stage's directory and run it again"
        )
    return None


def drop_after(root: Path, step: int) -> None:
    """Delete checkpoints later than the one a run goes on from: damaged ones must not crowd out good ones."""
    for later in (s for s in checkpoint_steps(root) if s > step):
        shutil.rmtree(checkpoint_path(root, later), ignore_errors=True)


def prune(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints."""
    for step in checkpoint_steps(root)[keep:]:
        shutil.rmtree(checkpoint_path(root, step), ignore_errors=True)
