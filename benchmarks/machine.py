"""What a result was measured on, in words that another reader needs to judge it; the parts of it that need no torch."""

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.contenders import Say, ours
from benchmarks.process import Kept, measure
from ingot.plan.machine import cpu

FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")
"""Instruction sets that decide how fast matrix products are."""
STEADY = 0.85
"""Of its best a machine gives at least so much while nothing else computes on it; products differ by 2 % there."""


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
    changed = [
        f"{'reads of memory' if name == 'read_gb_s' else f'products in {_precision(name)}'} {_rate(machine, name)}"
        for name in machine.get("least", {})
        if _far_below(machine, name)
    ]
    if not changed:
        return None
    return (
        f"Not steady: {', '.join(changed)} between beginning and end, so something else computes on this machine. "
        "Ratios of repetitions that alternate stand it better than rates do; measure again when it is quiet."
    )


def _far_below(machine: Mapping[str, Any], name: str) -> float | None:
    """The worse of both rates, where they are far apart."""
    least = machine.get("least", {}).get(name, machine[name])
    return least if least < STEADY * machine[name] else None


def _rate(machine: Mapping[str, Any], name: str) -> str:
    """The peak, or from the worse to the better one where they are far apart."""
    least = _far_below(machine, name)
    span = "" if least is None else f"{least:,.0f} to "
    return f"{span}{machine[name]:,.0f} {'GB/s' if name == 'read_gb_s' else 'GFLOP/s'}"


def _precision(name: str) -> str:
    """Of the matrix products that such a rate is of: gemm_bf16_gflop_s."""
    return name.split("_")[1]


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
    rates = [name for name in machine if name.startswith("gemm_")]
    products = ", ".join(f"{_rate(machine, name)} in {_precision(name)}" for name in rates)
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['flags'])}), "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB; {machine['device']}, {machine['threads']} threads; "
        f"Python {machine['python']}, torch {machine['torch']}; matrix products {products}; "
        f"memory read at {_rate(machine, 'read_gb_s')}"
    )
