"""What a result was measured on, in words that another reader needs to judge it; the parts of it that need no torch."""

import os
import platform
import re
from pathlib import Path
from typing import Any

from ingot.bench.contenders import Say, ours
from ingot.bench.process import Kept, measure
from ingot.plan.machine import cpu

FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")
"""Instruction sets that decide how fast matrix products are."""


def described(kept: Kept, say: Say) -> dict[str, Any]:
    """Processor, memory, software, and the peaks that a short measurement finds."""
    say("measuring matrix products and memory")
    peaks = measure(ours("machine"), {"seconds": 0.5}, kept)
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "flags": flags(),
        "memory_bytes": cpu().memory,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **peaks,
    }


def processor(information: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the processor's model."""
    if information.exists() and (found := re.search(r"^model name\s*:\s*(.+)$", information.read_text(), re.M)):
        return found[1].strip()
    return platform.processor() or platform.machine()


def flags(information: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Those of FLAGS that it has."""
    if not information.exists():
        return []
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", information.read_text(), re.M)
    words = found[1].split() if found else []
    return [flag for flag in FLAGS if flag in words]


def line(machine: dict[str, Any]) -> str:
    """The description as one line."""
    rates = {name.split("_")[1]: rate for name, rate in machine.items() if name.startswith("gemm_")}
    products = ", ".join(f"{rate:,.0f} GFLOP/s in {precision}" for precision, rate in rates.items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['flags'])}), "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB; {machine['device']}, {machine['threads']} threads; "
        f"Python {machine['python']}, torch {machine['torch']}; matrix products {products}; "
        f"memory read at {machine['read_gb_s']:.0f} GB/s"
    )
