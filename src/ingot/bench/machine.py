"""What a result was measured on, in words that another reader needs to judge it; the parts of it that need no torch."""

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.bench.contenders import Say, ours
from ingot.bench.process import Kept, measure
from ingot.plan.machine import cpu

FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")
"""Instruction sets that decide how fast matrix products are."""
STEADY = 0.85
"""Of its best a machine gives at least so much while nothing else computes on it; products differ by 2 % there."""
_WORDS = {
    "gemm_fp32_gflop_s": "products in fp32",
    "gemm_bf16_gflop_s": "products in bf16",
    "gemm_fp16_gflop_s": "products in fp16",
    "read_gb_s": "reads of memory",
}


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


def again(about: Mapping[str, Any], kept: Kept, say: Say) -> dict[str, Any]:
    """The same with the peaks once more, when all has been measured.

    A peak is the better one then, and `least` has the worse: others that compute on the machine show in it.
    """
    say("measuring matrix products and memory again")
    now = measure(ours("machine"), {"seconds": 0.5}, kept, repetition=1)
    rates = [name for name in about if name.endswith(("gflop_s", "gb_s"))]
    best, least = ({name: of(about[name], now[name]) for name in rates} for of in (max, min))
    return {**about, **best, "least": least}


def unsteady(machine: Mapping[str, Any]) -> str | None:
    """A sentence where it gave much less at one time than at another, or None."""
    least = machine.get("least", {})
    changed = [f"{_WORDS[name]} {_rate(machine, name)}" for name in least if least[name] < STEADY * machine[name]]
    if not changed:
        return None
    return (
        f"Not steady: {', '.join(changed)} between beginning and end, so something else computes on this machine. "
        "Ratios of repetitions that alternate stand it better than rates do; measure again when it is quiet."
    )


def _rate(machine: Mapping[str, Any], name: str) -> str:
    """The peak, or from the worse to the better one where they are far apart."""
    unit, most = "GB/s" if name == "read_gb_s" else "GFLOP/s", machine[name]
    least = machine.get("least", {}).get(name, most)
    return f"{least:,.0f} to {most:,.0f} {unit}" if least < STEADY * most else f"{most:,.0f} {unit}"


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


def line(machine: Mapping[str, Any]) -> str:
    """The description as one line."""
    products = ", ".join(
        f"{_rate(machine, name)} in {name.split('_')[1]}" for name in machine if name.startswith("gemm_")
    )
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['flags'])}), "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB; {machine['device']}, {machine['threads']} threads; "
        f"Python {machine['python']}, torch {machine['torch']}; matrix products {products}; "
        f"memory read at {_rate(machine, 'read_gb_s')}"
    )
