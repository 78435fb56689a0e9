"""Devices: data sheets of GPUs, detection of this machine's device, and GPU hours. No torch.

Peaks are the vendor's figures for dense matrix products in bf16 (fp16 without bf16 units), without sparsity, for the
server board (SXM) if there are several. They are not measured: a plan must be instant, and is often for another
machine.
"""

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ingot.core.process import usable_cores

TERA, GIGA = 10**12, 10**9


@dataclass(frozen=True)
class Device:
    """A GPU, or the CPU with its main memory."""

    name: str
    memory: int
    """Bytes."""
    peak: float | None = None
    """Dense 16-bit FLOP/s; None without a data sheet."""
    half: Literal["bf16", "fp16"] | None = None
    """16-bit format of its matrix units; bf16 if they have both."""

    @property
    def is_gpu(self) -> bool:
        return self.name != "CPU"


GPUS = {
    "t4": Device("T4", 16 * GIGA, 65 * TERA, "fp16"),
    "v100": Device("V100", 32 * GIGA, 125 * TERA, "fp16"),
    "a100": Device("A100", 80 * GIGA, 312 * TERA, "bf16"),
    "l4": Device("L4", 24 * GIGA, 121 * TERA, "bf16"),
    "l40s": Device("L40S", 48 * GIGA, 362 * TERA, "bf16"),
    "rtx4090": Device("RTX 4090", 24 * GIGA, 165 * TERA, "bf16"),
    "h100": Device("H100", 80 * GIGA, 989 * TERA, "bf16"),
    "h200": Device("H200", 141 * GIGA, 989 * TERA, "bf16"),
    "b200": Device("B200", 180 * GIGA, 2250 * TERA, "bf16"),
}
"""Data sheets by the name that `--gpu` accepts; of several variants the one with the most memory."""


def this_machine() -> Device:
    """The first GPU of this machine, or its CPU."""
    return _gpu() or cpu()


def _gpu() -> Device | None:
    """The first GPU, queried with nvidia-smi, because the parent process does not load torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    query = [tool, "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        name, mebibytes, capability = (field.strip() for field in output.splitlines()[0].split(","))
        return gpu_from_driver(name, int(mebibytes) << 20, float(capability))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None


def gpu_from_driver(name: str, memory: int, capability: float) -> Device:
    """A GPU from what the driver reports, with the peak of its data sheet if there is one.

    Args:
        name: for example "NVIDIA A100-SXM4-40GB".
        memory: bytes.
        capability: compute capability, for example 8.0.
    """
    sheet = next((sheet for sheet in GPUS.values() if _names_model(name, sheet.name)), None)
    half = "bf16" if capability >= 8 else "fp16" if capability >= 7 else None
    return Device(sheet.name if sheet else name, memory, sheet.peak if sheet else None, half)


def _names_model(name: str, model: str) -> bool:
    """Whether a driver's name contains a model's name as a complete word: "RTX A1000" does not name an A100."""
    return re.search(rf"(?<![a-z0-9]){model}(?![a-z0-9])", name, re.IGNORECASE | re.ASCII) is not None


def cpu() -> Device:
    """This machine's CPU and main memory, or the memory limit of the container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        memory = min(memory, int(text))
    flags = Path("/proc/cpuinfo")
    words = set(flags.read_text().split()) if flags.exists() else set()
    return Device("CPU", memory, half="bf16" if {"avx512_bf16", "amx_tile"} & words else None)


def measured_flops() -> float:
    """FLOP/s of fp32 matrix products on all cores of this machine's CPU: the best of one core times their number.

    The products are small, so that some are undisturbed on a busy machine too; takes about 0.02 s.
    """
    size, best = 64, float("inf")
    matrix = np.ones((size, size), np.float32)
    out = np.empty_like(matrix)
    for _ in range(1000):
        start = time.perf_counter()
        np.matmul(matrix, matrix, out=out)
        best = min(best, time.perf_counter() - start)
    return usable_cores() * 2 * size**3 / best


def gpu_hours(flops: float, peak: float, utilisation: float) -> float:
    """Hours of one GPU at a fraction of its peak.

    Args:
        peak: FLOP/s.
        utilisation: fraction of the peak, 0 to 1.
    """
    return flops / (peak * utilisation) / 3600
