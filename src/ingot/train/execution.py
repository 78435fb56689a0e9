"""How a run computes: device, precision, threads, micro-batch, backend.

These choices depend on the machine and are not part of the stage key. They are written to a file and reused on resume.

Parameters are fp32. A lower precision applies to the forward pass only (autocast), so optimizer, checkpoints and export
never see it. fp64 is for tests and proofs; its parameters are fp64.

| | bits: sign, exponent, fraction | range | |
|---|---|---|---|
| fp32 | 1, 8, 23 | 1e-38 to 3e38 | |
| tf32 | 1, 8, 10 | as fp32 | fp32 tensors, rounded in matrix products; NVIDIA from Ampere on |
| bf16 | 1, 8, 7 | as fp32 | |
| fp16 | 1, 5, 10 | 6e-8 to 65,504 | smaller gradients underflow, so it needs loss scaling |
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
"""Precisions that use autocast; with the others matrix products are in the parameters' dtype."""


@dataclass(frozen=True)
class Execution:
    """How a run computes."""

    device: str
    precision: str
    threads: int
    micro_batch: int
    reason: str
    """Why this precision."""
    context: int = 0
    """Tokens of the longest rows; `micro_batch` is for rows of this length."""
    backend: str = "auto"
    """Name of the backend (`backends/select.py`)."""
    cuda_graphs: bool = False
    """Whether a GPU captures updates as CUDA graphs and replays them, if possible."""

    def rows(self, context: int) -> int:
        """Rows of a micro-batch: `micro_batch`, or more if rows are shorter, with no more tokens in total."""
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
        """The autocast context of every forward pass, in training and evaluation."""
        if dtype := AUTOCAST.get(self.precision):
            return torch.autocast(self.device.split(":")[0], dtype=dtype)
        return contextlib.nullcontext()

    def prepare(self) -> None:
        """Set global options of the process: threads, tf32 matrix products, and flushing of denormals to 0.

        Optimizer moments of unused embedding rows decay until they are denormal (below 1e-38), which slows Intel CPUs
        down 30 times.
        """
        torch.set_num_threads(self.threads)
        torch.set_flush_denormal(True)  # inherited by threads that this one starts
        if self.precision == "tf32":
            torch.backends.cuda.matmul.fp32_precision = "tf32"

    def seed(self, value: int) -> None:
        """Seed dropout. Not while a graph is captured: captured updates have no dropout."""
        if self.device == "cpu":
            torch.default_generator.manual_seed(value)  # `torch.manual_seed` takes 0.4 ms, for all kinds of devices
        elif not torch.cuda.is_current_stream_capturing():
            torch.manual_seed(value)

    def summary(self) -> str:
        """One line for logs."""
        graphs = ", CUDA graphs" if self.cuda_graphs else ""
        details = f"threads {self.threads}, micro-batch {self.micro_batch}, backend {self.backend}{graphs}"
        return f"{self.device}, {self.precision} ({self.reason}), {details}"


def choose(settings: LoopSettings, precision: Precision, context: int, batch: int) -> Execution:
    """The execution for this machine; `backend` is as set, not selected yet.

    Args:
        context: tokens of the longest rows.
        batch: rows of the largest step.

    Raises:
        UserError: this machine does not have the device or the precision that is set.
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
    threads, micro_batch = settings.threads or torch.get_num_threads(), settings.micro_batch_rows(context, batch)
    graphs = (
        settings.cuda_graphs is not False and device == "cuda" and chosen != "fp16"
    )  # loss scaling reads the norm back
    return Execution(device, chosen, threads, micro_batch, reason, context, settings.backend, graphs)


def resumed(path: Path, chosen: Execution, settings: LoopSettings) -> Execution:
    """The execution that an interrupted run started with, so that it continues bit for bit. Explicit settings win."""
    if not path.exists():
        return chosen
    old = read_json(path)
    old["threads"] = min(old["threads"], os.cpu_count() or 1)
    unset = [n for n in ("threads", "micro_batch", "cuda_graphs") if getattr(settings, n) is None]
    unset += ["backend"] if settings.backend == "auto" else []
    return replace(chosen, **{name: old[name] for name in ("precision", "reason", *unset)})


def write(path: Path, execution: Execution) -> None:
    """Write an execution for `resumed`."""
    atomic_json(path, asdict(execution))


def resolve_device(name: str, where: str = "device") -> str:
    """Resolve `auto` to a GPU if there is one, else the CPU.

    Args:
        where: the setting, for the error message.

    Raises:
        UserError: no such device.
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
    """The fastest precision of a device, and the reason.

    bf16 if the device has units for it (torch would also accept emulation), else fp16 if it has units for that.
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
