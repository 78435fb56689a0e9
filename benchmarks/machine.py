"""The description of the machine that a result was measured on. No torch; `ours.py` measures the peaks."""

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.contenders import Log, ours
from benchmarks.process import ResultCache, measure
from ingot.plan.machine import cpu

FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")
"""Instruction sets that determine the speed of matrix products."""
MIN_STEADY = 0.85
"""If the lower of two peak measurements is below this fraction of the higher one, the machine has other load. Without
other load they differ by 2 %."""


def describe(cache: ResultCache, log: Log) -> dict[str, Any]:
    """Processor, memory, software, and measured peaks."""
    log("measuring matrix products and memory")
    peaks = measure(ours("machine"), {"seconds": 0.5}, cache)
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "flags": flags(),
        "memory_bytes": cpu().memory,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **peaks,
    }


def measure_again(about: Mapping[str, Any], cache: ResultCache, log: Log) -> dict[str, Any]:
    """The description after measuring the peaks a second time: each peak is the higher of both values, and `least` has
    the lower ones, which reveal other load."""
    log("measuring matrix products and memory again")
    now = measure(ours("machine"), {"seconds": 0.5}, cache, repetition=1)
    rates = [name for name in about if name.endswith(("gflop_s", "gb_s"))]
    best, least = ({name: select(about[name], now[name]) for name in rates} for select in (max, min))
    return {**about, **best, "least": least}


def load_warning(machine: Mapping[str, Any]) -> str | None:
    """A warning if the two measurements of a peak differ much; None if they do not."""
    unsteady = [
        f"{'reads of memory' if name == 'read_gb_s' else f'products in {_precision(name)}'} {_rate(machine, name)}"
        for name in machine.get("least", {})
        if _unsteady_minimum(machine, name)
    ]
    if not unsteady:
        return None
    return (
        f"Not steady: {', '.join(unsteady)} between beginning and end, so something else computes on this machine. "
        "Ratios of alternating repetitions are less affected than rates; measure again when the machine is quiet."
    )


def _unsteady_minimum(machine: Mapping[str, Any], name: str) -> float | None:
    """The lower of both measurements of a rate if they differ much; None if they do not."""
    least = machine.get("least", {}).get(name, machine[name])
    return least if least < MIN_STEADY * machine[name] else None


def _rate(machine: Mapping[str, Any], name: str) -> str:
    """The peak; as a range from the lower to the higher measurement if they differ much."""
    least = _unsteady_minimum(machine, name)
    span = "" if least is None else f"{least:,.0f} to "
    return f"{span}{machine[name]:,.0f} {'GB/s' if name == 'read_gb_s' else 'GFLOP/s'}"


def _precision(name: str) -> str:
    """The precision in the name of a rate: gemm_bf16_gflop_s -> bf16."""
    return name.split("_")[1]


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model name."""
    if cpuinfo.exists() and (match := re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M)):
        return match[1].strip()
    return platform.processor() or platform.machine()


def flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The members of `FLAGS` that the processor has."""
    if not cpuinfo.exists():
        return []
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo.read_text(), re.M)
    words = match[1].split() if match else []
    return [flag for flag in FLAGS if flag in words]


def one_line(machine: Mapping[str, Any]) -> str:
    """The description as one line."""
    rates = [name for name in machine if name.startswith("gemm_")]
    products = ", ".join(f"{_rate(machine, name)} in {_precision(name)}" for name in rates)
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['flags'])}), "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB; {machine['device']}, {machine['threads']} threads; "
        f"Python {machine['python']}, torch {machine['torch']}; matrix products {products}; "
        f"memory read at {_rate(machine, 'read_gb_s')}"
    )
