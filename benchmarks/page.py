"""docs/BENCHMARKS.md from the results of `python -m benchmarks all`: the machine, the tables, how to repeat them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.machine import line, unsteady
from ingot.core.artifact import atomic_write

HEAD = """# Benchmarks

Written by `make {target}`. Ours and the peers alternate, {repetitions} repetitions, each measurement a process of its
own; a number is the median, `spread` is (largest - smallest) / median of the repetitions. `ingot is` is the ratio of
tokens per second, ours to theirs, with its 95 % interval (Student's t over the logarithms of the repetitions' ratios);
it is given only where parameters, FLOPs and the losses of the first steps agree. The fastest peer is marked *. What a
shape is and how to measure one yourself: [bench.md](bench.md). Quote ratios: absolute figures are of this machine. An
H100: [BENCHMARKS-GPU.md](BENCHMARKS-GPU.md).

Machine: {machine}.
"""

MODES = {
    "as shipped": "Peers as they are shipped: fp32.",
    "autocast": "Peers with bf16 autocast switched on by hand.",
    "fp32": "Ours told to compute in fp32, peers as shipped.",
}


def page(found: Mapping[str, Any], target: str) -> str:
    """The page as Markdown."""
    parts = [HEAD.format(target=target, repetitions=found["repetitions"], machine=line(found["machine"]))]
    if warning := unsteady(found["machine"]):
        parts.append(f"{warning}\n")
    parts.append("## Training\n")
    for mode, shapes in found["train"]["modes"].items():
        parts.append(f"{MODES[mode]}\n\n{tables.markdown(tables.train_rows(shapes))}\n")
    choices = {s["execution"] for shapes in found["train"]["modes"].values() for s in shapes.values()}
    parts.append("Ours ran as: " + "; ".join(sorted(choices)) + ".\n")
    generated = found["generate"]
    parts.append(
        f"## Generation\n\nShape {generated['shape']}, greedy, prompts of {generated['prompt']} tokens. The floor is "
        f"bytes of weights over the speed at which memory is read, for a step of one row, both measured in turn; in "
        f"fp32 by matrix tiles ours reads three bytes of four.\n\n"
        f"{tables.markdown(tables.generate_rows(generated['rows']))}\n"
    )
    parts.append(f"## Start-up\n\n{tables.markdown(tables.startup_rows(found['startup']))}\n")
    if "data" in found:
        parts.append(f"## Data\n\n{tables.markdown(tables.loader_rows(found['data']['loader']))}\n")
        parts.append(f"The corpus chain:\n\n{tables.markdown(tables.corpus_rows(found['data']['corpus']))}\n")
    if "align" in found:
        parts.append(f"## Post-training\n\n{tables.markdown(tables.align_rows(found['align']['methods']))}\n")
    if "head" in found:
        parts.append(f"## The head, in chunks and whole\n\n{tables.markdown(tables.head_rows(found['head']))}\n")
    measured = [found[part] for part in ("train", "generate", "align") if part in found]
    left_out = {name: why for part in measured for name, why in part["skipped"].items()}
    parts += [f"Left out: {why}.\n" for why in left_out.values()]
    return "\n".join(parts)


def write_page(found: Mapping[str, Any], path: Path, target: str) -> None:
    """Write it, whole or not at all."""
    atomic_write(path, page(found, target))
