"""Choices made by hardware: device, precision, threads, micro-batch, backend. Written down, reused on resume, no part
of a key.

Parameters are fp32; a lower precision is a property of the forward pass (autocast), so optimizer, checkpoint and export
never meet it. fp64 exists for proofs: there the parameters themselves are fp64.

| | bits: sign, exponent, fraction | range | |
|---|---|---|---|
| fp32 | 1, 8, 23 | 1e-38 to 3e38 | |
| tf32 | 1, 8, 10 | as fp32 | fp32 tensors, whose products are rounded; NVIDIA from Ampere on |
| bf16 | 1, 8, 7 | as fp32 | |
| fp16 | 1, 5, 10 | 6e-8 to 65,504 | gradients below it vanish, so it needs loss scaling |
"""

import contextlib
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ingot.core.artifact import atomic_json, read_json
from ingot.core.errors import UserError
from ingot.train.settings import LoopSettings, Precision

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precisions that autocast multiplies in; the others are the tensors' own."""


@dataclass(frozen=True)
class Execution:
    """How this run computes."""

    device: str
    precision: str
    threads: int
    micro_batch: int
    reason: str
    """Of the precision."""
    context: int = 0
    """Tokens of the longest rows, for which `micro_batch` is sized."""
    backend: str = "auto"
    """Who computes the blocks (`backends/select.py`)."""
    replay: bool = False
    """Whether a GPU records updates of the usual shape and replays them, where that is possible."""

    def rows(self, context: int) -> int:
        """Rows of a forward pass: `micro_batch` of the longest; of shorter ones as many more as hold no more tokens."""
        return self.micro_batch * max(1, self.context // context)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens of a full micro-batch of the longest rows."""
        return self.micro_batch, self.context

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        return AUTOCAST.get(self.precision, self.parameter_dtype)

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """The context of every forward pass, in training and evaluation alike."""
        if dtype := AUTOCAST.get(self.precision):
            return torch.autocast(self.device.split(":")[0], dtype=dtype)
        return contextlib.nullcontext()

    def prepare(self) -> None:
        """Set what holds for the process: threads, tf32 products, and that denormal numbers (below 1e-38) are 0.

        Moments of embedding rows whose tokens do not occur shrink until they are denormal, on which an Intel CPU takes
        30 times as long.
        """
        torch.set_num_threads(self.threads)
        torch.set_flush_denormal(True)  # of this thread and of those that it starts
        if self.precision == "tf32":
            torch.backends.cuda.matmul.fp32_precision = "tf32"

    def seed(self, value: int) -> None:
        """Seed dropout, unless an update is being recorded, which draws nothing."""
        if self.device == "cpu":
            torch.default_generator.manual_seed(value)  # `torch.manual_seed` visits all kinds of devices: 0.4 ms
        elif not torch.cuda.is_current_stream_capturing():
            torch.manual_seed(value)

    def line(self) -> str:
        replayed = ", replayed" if self.replay else ""
        details = f"{self.threads} threads, micro-batch {self.micro_batch}, backend {self.backend}{replayed}"
        return f"{self.device}, {self.precision} ({self.reason}), {details}"


def choose(settings: LoopSettings, precision: Precision, context: int, batch: int) -> Execution:
    """The execution for this machine, its backend not chosen yet.

    Args:
        context: tokens of the longest rows.
        batch: rows of the largest step.

    Raises:
        UserError: a device or a precision was asked for that is not here.
    """
    device = resolve_device(settings.device, "loop.device")
    if precision == "tf32" and not (device == "cuda" and torch.cuda.is_tf32_supported()):
        raise UserError(
            f"precision: found 'tf32' on {'a GPU' if device == 'cuda' else 'the CPU'} without tf32 units, expected an "
            'NVIDIA GPU from Ampere (A100) on; use "fp32" or "auto"'
        )
    chosen, reason = fastest_precision(device) if precision == "auto" else (precision, "as set")
    if (precision, device) == ("bf16", "cpu") and (fastest := fastest_precision(device))[0] != "bf16":
        reason = f"as set, emulated and slow: {fastest[1]}"
    threads, micro_batch = settings.threads or torch.get_num_threads(), settings.rows_at_once(context, batch)
    replay = settings.replay is not False and device == "cuda" and chosen != "fp16"  # its loss scale is read back
    return Execution(device, chosen, threads, micro_batch, reason, context, settings.backend, replay)


def resumed(path: Path, chosen: Execution, settings: LoopSettings) -> Execution:
    """The execution that an interrupted run began with, so that it goes on bit for bit; explicit settings win."""
    if not path.exists():
        return chosen
    old = read_json(path)
    old["threads"] = min(old["threads"], os.cpu_count() or 1)
    unset = [n for n in ("threads", "micro_batch", "replay") if getattr(settings, n) is None]
    unset += ["backend"] if settings.backend == "auto" else []
    return replace(chosen, **{name: old[name] for name in ("precision", "reason", *unset)})


def write(path: Path, execution: Execution) -> None:
    """Keep an execution for `resumed`."""
    atomic_json(path, asdict(execution))


def resolve_device(name: str, where: str = "device") -> str:
    """`auto` to the device there is; `where` is the setting that named it.

    Raises:
        UserError: there is no such device here.
    """
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if has_gpu else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"{where}: found '{name}', expected auto, cpu or cuda")
    if name.startswith("cuda") and not has_gpu:
        raise UserError(f'{where}: found no CUDA device, expected one for device = "{name}"; use "cpu" or "auto"')
    return name


def fastest_precision(device: str) -> tuple[str, str]:
    """The precision in which a device multiplies fastest, and why.

    bf16 where there are units for it (torch alone would count emulation), else fp16 where there are units for it.
    """
    if device == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16", "the GPU has bf16 matrix units"
        if torch.cuda.get_device_capability() >= (7, 0):
            return "fp16", "the GPU has fp16 matrix units and none for bf16; with loss scaling"
        return "fp32", "the GPU has no 16-bit matrix units"
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return "bf16", "the CPU has bf16 matrix instructions"
    return "fp32", "the CPU has no bf16 matrix instructions"
