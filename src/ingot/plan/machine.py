"""What computes: data sheets of GPUs, what this machine has, and how flops become hours. Free of torch.

Peaks are of dense matrix products in bf16 (fp16 where there is no bf16) as the maker prints them, without sparsity, for
the server board (SXM) where there are several. Rejected: measuring the peak (a plan must answer at once, and is mostly
made for a machine that is not this one).
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TERA, GIGA = 10**12, 10**9


@dataclass(frozen=True)
class Device:
    """One GPU, or the CPU with its memory."""

    name: str
    memory: int
    """Bytes."""
    peak: float | None = None
    """Dense 16-bit FLOP/s; None where no data sheet is known."""
    half: Literal["bf16", "fp16"] | None = None
    """The 16 bits that its matrix units know, bf16 where they know both."""

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
"""By the name that `--gpu` takes; the variant with the most memory where there are several."""


def this_machine() -> Device:
    """The first GPU of this machine, or its CPU."""
    return _gpu() or cpu()


def _gpu() -> Device | None:
    """Asked of the driver's tool: the parent process does not load torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    question = [tool, "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, timeout=10, check=True).stdout
        name, mebibytes, capability = (field.strip() for field in answer.splitlines()[0].split(","))
        return known(name, int(mebibytes) << 20, float(capability))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None


def known(name: str, memory: int, capability: float) -> Device:
    """A GPU as the driver names it ("NVIDIA A100-SXM4-40GB"), with the peak of its data sheet if there is one."""
    sheet = next((sheet for sheet in GPUS.values() if _is_called(sheet.name, name)), None)
    half = "bf16" if capability >= 8 else "fp16" if capability >= 7 else None
    return Device(sheet.name if sheet else name, memory, sheet.peak if sheet else None, half)


def _is_called(model: str, name: str) -> bool:
    """Whether a driver's name holds a model's as whole words: an RTX A1000 is no A100."""
    return re.search(rf"(?<![a-z0-9]){model}(?![a-z0-9])", name, re.IGNORECASE | re.ASCII) is not None


def cpu() -> Device:
    """This machine's processor and main memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        memory = min(memory, int(text))
    flags = Path("/proc/cpuinfo")
    words = set(flags.read_text().split()) if flags.exists() else set()
    return Device("CPU", memory, half="bf16" if {"avx512_bf16", "amx_tile"} & words else None)


def gpu_hours(flops: float, peak: float, utilisation: float) -> float:
    """Hours of one GPU at a share of its peak."""
    return flops / (peak * utilisation) / 3600
