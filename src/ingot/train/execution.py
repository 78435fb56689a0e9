"""Choices made by hardware: device, precision path, threads, micro-batch. Written down, reused on resume, never keyed.

`model.parameters()` are fp32 and named; a lower precision is a property of the forward pass (autocast), so optimizer,
checkpoint and export never meet it. fp64 exists for proofs: there the parameters themselves are fp64.

| | bits: sign, exponent, fraction | range | |
|---|---|---|---|
| fp32 | 1, 8, 23 | 1e-38 to 3e38 | |
| tf32 | 1, 8, 10 | as fp32 | fp32 tensors, whose products are rounded; NVIDIA from Ampere on |
| bf16 | 1, 8, 7 | as fp32 | |
| fp16 | 1, 5, 10 | 6e-8 to 65,504 | gradients below it vanish, so it needs loss scaling |
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ingot.backends.select import Compile
from ingot.core.artifact import atomic_json, read_json
from ingot.core.errors import UserError
from ingot.kernels import cpu_train
from ingot.train.settings import LoopSettings, Precision

WHOLE_DEPTH = {"cpu": 8, "cuda": 24}
"""Up to this many blocks a model is compiled as a whole."""
PAYS_AFTER = {"cpu": 300.0, "cuda": 60.0}
"""Seconds of training from which compiling pays."""
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What autocast multiplies in; the other precisions are the tensors' own."""


@dataclass(frozen=True)
class Execution:
    """How this run computes."""

    device: str
    precision: str
    threads: int
    micro_batch: int
    reason: str
    context: int = 0
    """What `micro_batch` is sized for: the longest rows."""
    compile: Compile = ""
    """What is compiled: the whole model, each block of a deep one, or nothing; `native`: nothing need be, the blocks
    are functions of our own."""
    replay: bool = False
    """Whether updates of the usual shape are recorded once and replayed, where nothing else speaks against it."""

    def rows(self, context: int) -> int:
        """Rows of a forward pass: `micro_batch` of the longest, of shorter ones as many more as hold no more tokens."""
        return self.micro_batch * max(1, self.context // context)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens of a row of a full forward pass of the longest rows."""
        return self.micro_batch, self.context

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def product_dtype(self) -> torch.dtype:
        """What matrices are multiplied in."""
        return AUTOCAST.get(self.precision, self.parameter_dtype)

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """The context of every forward pass, in training and evaluation alike."""
        if dtype := AUTOCAST.get(self.precision):
            return torch.autocast(self.device.split(":")[0], dtype=dtype)
        return contextlib.nullcontext()

    def prepare(self) -> None:
        """Set what holds for a whole process, before it computes anything.

        The number of threads; tf32 products where they were chosen; and that denormal numbers, below 1e-38, are zero.
        Moments of an embedding's row whose token does not come up shrink by a factor each step until they are
        denormal, and there they stay, as .9 times the smallest number is rounded to itself. An Intel CPU takes 30 times
        as long for AdamW's step over such moments.
        """
        torch.set_num_threads(self.threads)
        torch.set_flush_denormal(True)  # of this thread and of those that it starts
        if self.precision == "tf32":
            torch.backends.cuda.matmul.fp32_precision = "tf32"

    def seed(self, value: int) -> None:
        """Set what dropout draws from, unless an update is being recorded, which draws nothing.

        `torch.manual_seed` goes through all kinds of devices, and notes down for the absent ones who called it, which
        is .4 ms of a step of 16.
        """
        if self.device == "cpu":
            torch.default_generator.manual_seed(value)
        elif not torch.cuda.is_current_stream_capturing():
            torch.manual_seed(value)

    def line(self) -> str:
        cpu_train = self.compile == "native"
        compiled = ", blocks in C++" if cpu_train else f", {self.compile} compiled" if self.compile else ""
        replayed = ", replayed" if self.replay else ""
        how = f"{self.threads} threads, micro-batch {self.micro_batch}{compiled}{replayed}"
        return f"{self.device}, {self.precision} ({self.reason}), {how}"


def choose(
    settings: LoopSettings,
    precision: Precision,
    context: int,
    batch: int,
    *,
    depth: int = 1,
    flops: float = 0.0,
    common: bool = False,
    say: Callable[[str], None] | None = None,
) -> Execution:
    """The execution for this machine.

    Args:
        context: tokens of the longest rows.
        batch: rows of the largest step.
        depth: blocks of the model.
        flops: of the whole run, which decides whether compiling pays.
        common: whether the model's blocks are such as `blocks.py` computes.
        say: told when that is built, which takes some seconds.

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
    replay = settings.replay is not False and device == "cuda" and chosen != "fp16"  # whose loss scale is asked for
    fresh = Execution(device, chosen, threads, micro_batch, reason, context, replay=replay)
    ours = common and settings.compile is None and _ours(fresh, say)
    return replace(fresh, compile="native" if ours else _compile(settings, fresh, depth, flops))


def remembered(
    path: Path, fresh: Execution, settings: LoopSettings, say: Callable[[str], None] = lambda text: None
) -> Execution:
    """The execution an interrupted run began with, so that it goes on bit for bit; explicit settings win.

    Where that is not possible here, `say` is told.
    """
    if path.exists():
        old = read_json(path)
        old["threads"] = min(old["threads"], os.cpu_count() or 1)
        unset = [n for n in ("threads", "micro_batch", "compile", "replay") if getattr(settings, n) is None]
        begun = replace(fresh, **{name: old[name] for name in ("precision", "reason", *unset)})
        if begun.compile == "native" and not _ours(begun):  # another machine
            begun = replace(begun, compile="" if fresh.compile == "native" else fresh.compile)
            say("the run began with functions in C++ that are not here; it goes on without, equal but for rounding")
        fresh = begun
    atomic_json(path, asdict(fresh))
    return fresh


def _ours(execution: Execution, say: Callable[[str], None] | None = None) -> bool:
    """Whether functions of our own compute so here."""
    return execution.device == "cpu" and cpu_train.available(execution.product_dtype, say)


def _compile(settings: LoopSettings, execution: Execution, depth: int, flops: float) -> Compile:
    """Whether compiling pays, and what of the model to compile.

    It takes 20 to 40 s without a warm cache and makes steps 10 to 35 % faster on a CPU, 60 % on a GPU. A step runs at
    about half the rate of its matrix products, so a run that would take five minutes (one) gains more than it pays.
    """
    what = "blocks" if depth > WHOLE_DEPTH[execution.device] else "whole"
    able = any(map(shutil.which, ("c++", "g++", "clang++")))
    if settings.compile and not able:
        raise UserError(
            "loop.compile: found no C++ compiler on the PATH, expected c++, g++ or clang++; install one or leave it out"
        )
    if settings.compile is not None:
        return what if settings.compile else ""
    pays = able and flops > 0 and flops / (0.5 * _matmul_rate(execution)) > PAYS_AFTER[execution.device]
    return what if pays and execution.precision != "fp64" else ""


def _matmul_rate(execution: Execution) -> float:
    """FLOP/s of a matrix product of middling size, measured here and now in a few hundredths of a second."""
    execution.prepare()
    dtype = AUTOCAST.get(execution.precision, torch.float32)
    a, b = torch.zeros(2, 1024, 1024, dtype=dtype, device=execution.device)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        (a @ b)[0, 0].item()
        times.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(times)


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
